"""Strict promotion, one platform, one key."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling takes longer than any deadline; the same examples on every run.
hypothesis.settings.register_profile(
    "jaxact", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("jaxact")


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
def key():
    return jax.random.key(0)
