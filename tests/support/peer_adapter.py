"""A pytest plugin: other projects' tests, with `jaxact.compress` in place of remat.

Their files are imported after `pytest_configure`, so they bind the replacements:

- *remat*: `jax.checkpoint`, `nn.remat` and `nnx.remat` become `compress`. A call's
  policy and `prevent_cse` concern recomputation and are dropped.
- *grad*: `jax.grad`, `value_and_grad`, `vjp` and `jacrev` differentiate `compress(f)`
  instead of `f`. Only the outermost derivative does: compress supports reverse mode
  once, and a second or forward derivative around it is judged by no suite of this kind.

In the mode `exact` of these, `check_grads` also compares with JAX's own gradients, and
they must be equal to the last bit.

Where remat is replaced, `check_grads` is cut to that contract: reverse mode, order one.
A test that asks for more is judged on the part that applies, and on its other lines.
"""

import contextvars
import functools
import json
import random
import sys
from pathlib import Path

import jax
import jax.ad_checkpoint
import jax.test_util
import numpy as np
import pytest

import jaxact

POLICIES = {
    "exact": jaxact.Policy(default=jaxact.Exact()),
    "bits8": jaxact.Policy(bits=8),
}
TRANSFORMS = {
    "checkpoint": jax.checkpoint,
    **{m: functools.partial(jaxact.compress, policy=p) for m, p in POLICIES.items()},
}
# These mean JAX's own. Haiku's tests compare Haiku's remat with it.
LIBRARIES = "jax", "jaxact", "flax", "haiku._src.integration"
# Parts of JAX that act for a test.
TEST_TOOLS = "jax._src.public_test_util", "jax._src.test_util"


def pytest_addoption(parser):
    group = parser.getgroup("peers")
    group.addoption("--peer-kind", choices=["remat", "grad", "linen", "nnx"])
    group.addoption("--peer-mode", choices=["base", *TRANSFORMS])
    group.addoption("--peer-sample", type=int, help="this many tests, always the same")
    group.addoption("--peer-report", type=Path, help="JSON: what became of each test")


def pytest_configure(config):
    mode, kind = config.getoption("--peer-mode"), config.getoption("--peer-kind")
    # Residuals of tiny tests stay exact, which is what the warning says.
    config.addinivalue_line("filterwarnings", "ignore::jaxact.CompressionWarning")
    if mode != "base":
        replace = {
            "remat": replace_remat,
            "grad": replace_derivatives,
            "linen": replace_linen,
            "nnx": replace_nnx,
        }
        if mode == "exact" and kind == "grad":
            compare_bits(TRANSFORMS[mode])
        replace[kind](TRANSFORMS[mode])
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config.getoption("--peer-report")))


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config, items):
    size = config.getoption("--peer-sample")
    if size is not None and size < len(items):
        # Sorted: some projects make their tests from sets.
        names = sorted(item.nodeid for item in items)
        chosen = set(random.Random(0).sample(names, size))
        items[:] = [item for item in items if item.nodeid in chosen]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.failed:
        report.user_properties.append(("evidence", evidence(item, call.excinfo)))


def evidence(item, excinfo):
    """The statement of the test file that failed, and the error."""
    here = [e for e in excinfo.traceback if Path(e.path) == item.path]
    statement = str(here[-1].statement) if here else ""
    return f"{statement.strip()} -> {excinfo.typename}: {excinfo.value}"


class Report:
    """Collects one outcome a test, in the process that sees all of them."""

    def __init__(self, path):
        self.path, self.outcomes, self.failures = path, {}, {}

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.partition("::")[2] or report.nodeid
        if report.failed:
            self.failures[name] = dict(report.user_properties).get(
                "evidence", report.longreprtext
            )
        elif report.skipped:
            self.outcomes[name] = "skipped"
        elif report.when == "call":
            self.outcomes.setdefault(name, "passed")

    def pytest_collectreport(self, report):
        if report.failed:
            self.failures[report.nodeid] = f"collection: {report.longreprtext}"

    def pytest_sessionfinish(self):
        passed = self.outcomes | dict.fromkeys(self.failures, "failed")
        self.path.write_text(
            json.dumps({"outcomes": passed, "failures": self.failures}, indent=1)
        )


def is_library(frame):
    """Whether the caller means JAX's own transformation."""
    name = frame.f_globals.get("__name__", "")
    within = any(name == m or name.startswith(m + ".") for m in LIBRARIES)
    return within and name not in TEST_TOOLS


def applied(transform, target, static_argnums):
    """The transformed target; a decorator where there is none yet."""
    options = {"static_argnums": static_argnums}
    return transform(target, **options) if target else transform(**options)


def replace_remat(transform):
    limit_check_grads()
    real = jax.checkpoint

    def remat(f=None, **options):
        if is_library(sys._getframe(1)):
            return real(f, **options) if f else functools.partial(real, **options)
        return applied(transform, f, options.get("static_argnums", ()))

    for module in (jax, jax.ad_checkpoint):
        for name in ("checkpoint", "remat"):
            if hasattr(module, name):
                setattr(module, name, remat)


def replace_linen(transform):
    from flax import linen

    def remat(target=None, *, static_argnums=(), **_):
        return applied(transform, target, static_argnums)  # both count self

    linen.remat = linen.checkpoint = remat


def replace_nnx(transform):
    from flax import nnx

    def remat(f=None, *, static_argnums=(), **_):
        return applied(transform, f, static_argnums)

    nnx.remat = remat


def replace_derivatives(transform):
    inside = contextvars.ContextVar("inside a derivative", default=False)

    def enter(f, function):
        @functools.wraps(f)
        def outermost(*args, **kwargs):
            if inside.get():
                return f(*args, **kwargs)
            token = inside.set(True)
            try:
                return function(*args, **kwargs)
            finally:
                inside.reset(token)

        return outermost

    def replace(real, change):
        @functools.wraps(real)
        def derivative(f, *args, **kwargs):
            if not is_library(sys._getframe(1)):
                f = enter(f, change(f))
            return real(f, *args, **kwargs)

        return derivative

    # JAX's tests say `api.vjp`, and so does check_grads. It is found, not imported: a
    # replacement that only the public name saw would judge half of the tests.
    modules = jax, sys.modules["jax._src.api"]
    changes = {
        **dict.fromkeys(["grad", "value_and_grad", "vjp", "jacrev"], transform),
        **dict.fromkeys(["jvp", "linearize", "jacfwd", "hessian"], lambda f: f),
    }
    for name, change in changes.items():
        function = replace(getattr(jax, name), change)
        for module in modules:
            setattr(module, name, function)


def limit_check_grads():
    real = jax.test_util.check_grads

    def check_grads(f, args, order, modes=("fwd", "rev"), *tolerances, **named):
        if "rev" in modes:
            real(f, args, 1, ["rev"], *tolerances, **named)

    replace_check_grads(check_grads)


def compare_bits(transform):
    """Let check_grads compare with JAX's own gradients too: equal, not close."""
    real, vjp = jax.test_util.check_grads, jax.vjp

    def gradients(f, args):
        out, backward = vjp(f, *args)
        return out, backward(out)

    def check_grads(f, args, order, modes=("fwd", "rev"), *tolerances, **named):
        if "rev" in modes:
            both = gradients(transform(f), args), gradients(f, args)
            jax.tree.map(np.testing.assert_array_equal, *both)
        real(f, args, order, modes, *tolerances, **named)

    replace_check_grads(check_grads)


def replace_check_grads(check_grads):
    modules = [jax.test_util, *map(sys.modules.get, TEST_TOOLS)]
    for module in modules:
        if hasattr(module, "check_grads"):
            module.check_grads = check_grads
