"""An opaque call computes what its function does, and JAX does not look inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxact
from jaxact import Policy, Quantize
from jaxact._jaxpr.compat import open_jaxpr, scan_counts
from jaxact._jaxpr.opaque import opaque
from jaxact._jaxpr.read import call_body
from support.programs import assert_same_bits

pytestmark = pytest.mark.unoptimized

X = jnp.linspace(-2.0, 2.0, 48).reshape(3, 16)
WIDTH, BATCH, DEPTH = 32, 64, 3


def codes(x, seed):
    """Of several outputs, in a tree, of several dtypes."""
    noise = jax.random.uniform(jax.random.key(seed), x.shape)
    low = x.min(-1, keepdims=True)
    return {"code": (x - low + noise).astype(jnp.uint8), "low": low, "none": None}


def scale(x, seed):
    return x * 2.0 + seed.astype(jnp.float32)


SEED = jnp.uint32(3)
each_function = pytest.mark.parametrize("f", [codes, scale])


@each_function
def test_values_are_those_of_the_function(f):
    assert_same_bits(opaque(f, X, SEED), f(X, SEED))
    hidden = jax.jit(lambda x, seed: opaque(f, x, seed))
    assert_same_bits(hidden(X, SEED), jax.jit(f)(X, SEED))


@each_function
def test_it_is_one_equation(f):
    jaxpr = jax.make_jaxpr(lambda x, seed: jax.tree.leaves(opaque(f, x, seed)))(X, SEED)
    assert [e.primitive.name for e in jaxpr.eqns] == ["jaxact_opaque"]


def test_constants_are_inputs_of_the_equation():
    table = jnp.asarray(np.random.default_rng(0).normal(size=X.shape), jnp.float32)
    f = lambda x: x * table
    assert_same_bits(opaque(f, X), f(X))
    assert_same_bits(jax.jit(lambda x: opaque(f, x))(X), jax.jit(f)(X))
    jaxpr = jax.make_jaxpr(lambda x: opaque(f, x))(X)
    body, _ = open_jaxpr(jaxpr.eqns[-1].params["jaxpr"])
    assert not body.constvars


@each_function
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (2, 0)])
def test_vmap_is_a_loop(f, axes):
    stacked = jnp.stack([X, X + 1.0], axes[0]) if axes[0] is not None else X
    seeds = jnp.arange(2, dtype=jnp.uint32) if axes[1] == 0 else SEED
    pick = lambda a, axis, i: a if axis is None else jnp.take(a, i, axis)
    loop = [f(pick(stacked, axes[0], i), pick(seeds, axes[1], i)) for i in range(2)]
    want = jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop)
    got = jax.vmap(lambda x, seed: opaque(f, x, seed), axes)(stacked, seeds)
    assert_same_bits(got, want)


def test_vmap_stays_one_equation():
    mapped = jax.vmap(jax.vmap(lambda x: opaque(lambda x: jnp.sin(x) + 1.0, x)))
    jaxpr = jax.make_jaxpr(mapped)(X)
    assert [e.primitive.name for e in jaxpr.eqns] == ["jaxact_opaque"]


def scans(jaxpr):
    """The scans in a program, also inside calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        body = call_body(eqn)
        if body is not None:
            yield from scans(open_jaxpr(body)[0])


def block_of(activation, policy):
    def block(w, x):
        return x + activation(x @ w)

    return jaxact.compress(block, policy=policy, activations="x")


ACTIVATIONS = [jax.nn.relu, jnp.sin, jnp.tanh, jax.nn.gelu, jax.nn.silu]


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda f: f.__name__)
def test_nothing_as_large_as_a_residual_is_hoisted_out_of_a_scan(activation, bits):
    block = block_of(activation, Policy(default=Quantize(bits)))

    def loss(w, x):
        layer = lambda x, w: (block(w, x), None)
        return lax.scan(layer, x, w)[0].sum()

    w, x = jnp.ones((DEPTH, WIDTH, WIDTH)), jnp.ones((BATCH, WIDTH))
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(jax.grad(loss))(w, x))
    found = list(scans(jaxpr))
    assert len(found) == 2, "one scan forward, one backward"
    for eqn in found:
        num_consts, num_carry = scan_counts(eqn)
        consts = [v.aval.size for v in eqn.invars[:num_consts]]
        assert max(consts, default=0) < x.size, "as large as the residual"
    forward = found[0]
    stacked = forward.outvars[scan_counts(forward)[1] :]
    floats = [v for v in stacked if v.aval.dtype == x.dtype and v.aval.size >= x.size]
    assert not [v for v in floats if v.aval.shape[1:] == x.shape]


def test_a_plain_function_would_be_hoisted():
    """What `opaque` is there for: this fails once JAX does it itself."""

    def loss(w, x, hide):
        def layer(x, w):
            wide = lambda x: x * jnp.arange(float(x.size)).reshape(x.shape)
            y = lax.stop_gradient(x)
            return jnp.sin(x @ w) + (opaque(wide, y) if hide else wide(y)), None

        return lax.scan(layer, x, w)[0].sum()

    w, x = jnp.ones((DEPTH, WIDTH, WIDTH)), jnp.ones((BATCH, WIDTH))

    def largest(hide):
        jaxpr = jax.make_jaxpr(jax.grad(lambda w: loss(w, x, hide)))(w)
        inputs = [
            v.aval.size
            for eqn in scans(open_jaxpr(jaxpr)[0])
            for v in eqn.invars[: scan_counts(eqn)[0]]
        ]
        return max(inputs, default=0)

    assert largest(hide=False) >= x.size
    assert largest(hide=True) < x.size
