"""Compressed functions under the options of JAX, and under its coming defaults."""

import contextlib
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify

import jaxact
from support.programs import PROGRAMS, Program, relative_error, same_bits, scalar
from support.variants import thorough

pytestmark = pytest.mark.unoptimized

# Some change how a derivative is traced; others, which mistakes raise an error.
OPTIONS = [
    ("jax_numpy_dtype_promotion", "strict"),
    ("jax_numpy_rank_promotion", "raise"),
    ("jax_enable_x64", True),
    ("jax_check_tracer_leaks", True),
    ("jax_debug_nans", True),
    ("jax_disable_jit", True),
    ("jax_threefry_partitionable", False),
    ("jax_softmax_custom_jvp", False),
    ("jax_mutable_array_checks", True),
    ("jax_mutable_array_checks", False),
    ("jax_use_direct_linearize", True),
    ("jax_use_direct_linearize", False),
    ("jax_custom_vjp3", True),
    ("jax_custom_vjp3", False),
    ("jax_custom_jvp3", True),
    ("jax_custom_jvp3", False),
    ("jax_remat3", True),
    ("jax_remat3", False),
    ("jax_remat_barrier_no_cotangents", True),
    ("jax_remat_barrier_no_cotangents", False),
]


@contextlib.contextmanager
def option(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x) * x


doubled.defvjp(lambda x: (doubled(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


def rules(p, x):
    """A checkpoint, a custom_vjp and a custom_jvp (softplus), in a scan and a cond."""

    def layer(x, w):
        y = jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)
        return doubled(y) + jax.nn.softplus(y), None

    x = lax.cond(x[0, 0] > 100.0, jnp.cos, lambda x: layer(x, p["w"])[0], x)
    return lax.scan(layer, x, jnp.stack([p["w"], p["v"]]))[0]


SUBJECTS = [
    *(program for program in PROGRAMS if program.name in ("attention", "dropout")),
    Program("rules", rules, {"w": (64, 64), "v": (64, 64)}),
]
EXACT = jaxact.Policy(default=jaxact.Exact())
PACKED = jaxact.Policy(bits=8)
each_subject = pytest.mark.parametrize(
    "subject",
    [
        pytest.param(s, id=s.name, marks=() if s.name == "rules" else thorough)
        for s in SUBJECTS
    ],
)


def compressed(subject, policy):
    return jaxact.compress(subject.f, policy=policy, activations="x")


# Fusions may contract a * b + c; without them every operation is the same one.
LEVEL0 = {"xla_backend_optimization_level": 0}
jit = functools.partial(jax.jit, compiler_options=LEVEL0)


def check(subject, transform=jit, same=same_bits):
    """Outputs and gradients against the plain ones, all by `transform`."""
    args = subject.arguments()
    plain = transform(subject.f)(*args)
    assert same(transform(compressed(subject, PACKED))(*args), plain)
    gradient = lambda f: transform(jax.grad(scalar(f), (0, 1)))(*args)
    wanted = gradient(subject.f)
    # XLA divides by a constant here, and multiplies with its inverse there.
    assert close(gradient(compressed(subject, EXACT)), wanted)
    # The bound of test_compressed_functions.
    assert relative_error(gradient(compressed(subject, PACKED)), wanted) < 0.05


def close(a, b):
    """To a few roundings in float32: where programs are compiled in other parts."""
    return relative_error(a, b) < 1e-5


# What an option is about: `rules` has the rest.
ABOUT = {"jax_softmax_custom_jvp": "attention", "jax_threefry_partitionable": "dropout"}


@pytest.mark.parametrize(
    "name, value, subject",
    [
        pytest.param(name, value, subject, id=f"{name}-{value}-{subject.name}")
        for name, value in OPTIONS
        for subject in SUBJECTS
        if subject.name in ("rules", ABOUT.get(name))
    ],
)
def test_an_option_changes_nothing(name, value, subject):
    if not hasattr(jax.config, name):
        pytest.skip(f"this JAX has no {name}")
    if getattr(jax.config, name) == value:
        pytest.skip("the default, which every other test has")
    with option(name, value):
        check(subject, same=close if name == "jax_disable_jit" else same_bits)


@thorough
@each_subject
def test_checkify_finds_errors_of_the_function_alone(subject):
    def checked(f):
        def run(*args):
            error, out = jit(checkify.checkify(f, errors=checkify.all_checks))(*args)
            error.throw()
            return out

        return run

    check(subject, checked, close)


def test_a_check_beside_a_compressed_function_is_reported():
    def loss(x):
        y = jaxact.compress(jnp.tanh, policy=PACKED)(x)
        checkify.check(y.sum() > 0, "the sum is negative")
        return (y**2).sum()

    run = jax.jit(checkify.checkify(jax.grad(loss)))
    x = jnp.ones((16, 64))
    assert run(x)[0].get() is None
    assert "the sum is negative" in run(-x)[0].get()


@each_subject
def test_export(subject):
    def exported(f):
        return lambda *args: jit(jax.export.export(jax.jit(f))(*args).call)(*args)

    check(subject, exported, close)


WITHOUT = ["flax", "matplotlib", "optax", "rich", "jax_plugins", "jax_cuda13_plugin"]


def test_import_and_use_need_jax_alone():
    program = f"""
import sys
for name in {WITHOUT}:
    sys.modules[name] = None  # an import raises ImportError
import jax, jax.numpy as jnp, jaxact
f = jaxact.compress(lambda x: jnp.tanh(x) ** 2)
x = jnp.ones((64, 64))
print(jaxact.residuals(f, x), jaxact.memory(jax.grad(lambda x: f(x).sum()), x))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
