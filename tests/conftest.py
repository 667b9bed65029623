"""Strict promotion, one platform, shared fixtures; and what `make test` leaves out."""

import collections
import importlib
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

from support.garbage import look_rarely

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Modules make 256 arrays, in every worker; `optimizations` sets it as a test asks.
jax.config.update("jax_disable_most_optimizations", True)

look_rarely()

# Compiling takes longer than any deadline; the same examples on every run.
hypothesis.settings.register_profile(
    "jaxact", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("jaxact")

ROOT = Path(__file__).parent.parent
# Where the examples and benchmarks are run from, so that they import one another.
SCRIPTS = "examples", "examples/benchmarks", "kernels/benchmarks"
# Of the variants of one test, how many `--quick` runs: the first and the last; only the
# first of one about numbers, which is marked `unoptimized`.
VARIANTS = 2


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out slow and thorough tests, and all but one variant of each test "
        f"about numbers, or {VARIANTS} of any other",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave out the tests that `--quick` names; `.ci/run` runs them."""
    # Slow ones first: no worker starts one when the others have nothing left to do.
    items.sort(key=lambda item: not _is(item, "slow"))
    if not config.getoption("quick"):
        return
    tests = collections.defaultdict(list)
    for item in items:
        if not _is(item, "slow") and not _is(item, "thorough"):
            tests[item.path, item.location[2].partition("[")[0]].append(item)
    kept = [item for variants in tests.values() for item in _some(variants)]
    left_out = set(items) - set(kept)
    config.hook.pytest_deselected(items=[i for i in items if i in left_out])
    items[:] = [item for item in items if item not in left_out]


def _is(item, marker):
    return item.get_closest_marker(marker) is not None


def _some(variants):
    """`VARIANTS` of them, evenly spaced, or one; all, if there are no more."""
    count = 1 if _is(variants[0], "unoptimized") else VARIANTS
    steps = min(len(variants), count) - 1
    if not steps:
        return variants[:1]
    return [variants[(len(variants) - 1) * i // steps] for i in range(steps + 1)]


@pytest.fixture(autouse=True)
def optimizations(request):
    """Compile without LLVM's for tests marked `unoptimized`, in half the time."""
    name = "jax_disable_most_optimizations"
    mark = request.node.get_closest_marker("unoptimized")
    off = mark is not None and mark.args != (False,)
    if jax.config.values[name] != off:
        jax.config.update(name, off)
        jax.clear_caches()  # JAX would not compile again what it has compiled


@pytest.fixture
def load(monkeypatch):
    """Imports a file of the examples or benchmarks as its command does."""
    for folder in SCRIPTS:
        monkeypatch.syspath_prepend(ROOT / folder)
    with jax.numpy_dtype_promotion("standard"):  # as Flax asks
        yield importlib.import_module


@pytest.fixture
def key():
    return jax.random.key(0)
