"""Codecs pack arrays that are cut over Explicit axes, wherever the cut is."""

import math

import jax
import jax.numpy as jnp
import pytest

import jaxact
from jaxact import Adaptive, DualPrecision, PerSample, Quantize, Rotated
from jaxact._codec.parts import Parts

MESH = jax.sharding.AbstractMesh(
    (2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
)
CUTS = [  # along rows, whose groups they go through; along channels; along images
    ((16, 64), ("data", "model")),
    ((8, 8, 4, 4), ("data", "model")),
    ((8, 8, 4, 4), ("data", None, "model")),
    ((8, 512), (("data", "model"),)),
]
CODECS = [Quantize(4), Rotated(4), Adaptive(2), PerSample(2.5), DualPrecision(4)]
SEED = jax.ShapeDtypeStruct((), jnp.uint32)


def parts(array):
    names = jax.tree.leaves(tuple(array.sharding.spec))
    return math.prod(MESH.shape[name] for name in names)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
@pytest.mark.parametrize("shape, spec", CUTS)
def test_each_device_has_its_part(codec, dtype, shape, spec):
    """Nothing is compiled: types say where parts lie, and JAX refuses while tracing."""
    codec = Parts(codec) if dtype == jnp.complex64 else codec
    with jax.sharding.use_abstract_mesh(MESH):
        sharding = jax.NamedSharding(MESH, jax.P(*spec))
        x = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        stored = jax.eval_shape(codec.encode, x, SEED)
        decoded = jax.eval_shape(lambda s: codec.decode(s, shape, x.dtype), stored)
    assert parts(decoded) == 4
    if "PerSample" not in repr(codec):  # whose samples share bits: all have the words
        assert all(parts(a) == 4 for a in jax.tree.leaves(stored) if a.size > 1)


def cross_entropy(logits):
    rows = jnp.arange(len(logits))
    chosen = jax.nn.one_hot(rows, logits.shape[1])
    return -(jax.nn.log_softmax(logits) * chosen).sum()


def norm(x):
    centered = x - x.mean(-1, keepdims=True)
    return jnp.sin(centered * jax.lax.rsqrt(centered.var(-1, keepdims=True))).sum()


@pytest.mark.parametrize("loss", [cross_entropy, norm])
@pytest.mark.parametrize("length", [256, 288, 1024])  # cut through groups, or between
def test_statistics_stay_with_their_rows(loss, length):
    """A row's packed parts are exchanged; its sums and largest element are not."""
    with jax.sharding.use_abstract_mesh(MESH):
        sharding = jax.NamedSharding(MESH, jax.P("data", "model"))
        x = jax.ShapeDtypeStruct((16, length), jnp.float32, sharding=sharding)
        small = jaxact.compress(loss, activations=0)
        gradient = jax.eval_shape(jax.grad(small), x)
    assert gradient.sharding.spec == sharding.spec


def test_an_output_that_nobody_differentiates_has_its_place():
    """An auxiliary array of a loss: its cotangent is zeros, split as it is."""

    def loss(x):
        hidden = jnp.tanh(x)
        return jnp.sin(hidden).sum(), hidden

    with jax.sharding.use_abstract_mesh(MESH):
        sharding = jax.NamedSharding(MESH, jax.P("data", "model"))
        x = jax.ShapeDtypeStruct((16, 256), jnp.float32, sharding=sharding)
        step = jax.value_and_grad(jaxact.compress(loss, activations=0), has_aux=True)
        (_, hidden), gradient = jax.eval_shape(step, x)
    assert hidden.sharding.spec == gradient.sharding.spec == sharding.spec


@pytest.mark.parametrize("recompute", [None, jaxact.Checkpoint()])
def test_a_part_that_xla_places_takes_the_key_too(recompute):
    """What `auto_axes` computes is packed there, in another mesh than the key's."""
    rows = jax.P("data", None)

    def loss(x):
        part = lambda x: jnp.tanh(x) * x.mean()
        return jnp.sin(jax.sharding.auto_axes(part, out_sharding=rows)(x)).sum()

    policy = jaxact.Policy(recompute=recompute)
    step = jax.grad(jaxact.compress(loss, policy=policy, activations=0))
    with jax.sharding.use_abstract_mesh(MESH):
        sharding = jax.NamedSharding(MESH, rows)
        x = jax.ShapeDtypeStruct((16, 256), jnp.float32, sharding=sharding)
        key = jax.eval_shape(jax.random.key, 0)
        gradient = jax.eval_shape(lambda x, key: step(x, rounding_key=key), x, key)
    assert gradient.sharding.spec == rows


@pytest.mark.parametrize("shape, spec", CUTS)
def test_telemetry_measures_rows_where_they_are_cut(shape, spec):
    loss = lambda w, x: jnp.sin(jnp.tanh(x) * w).sum()
    measured = jaxact.telemetry(jaxact.compress(loss, activations="x"))
    gradients = jax.grad(measured, argnums=(0, 1, 2))
    with jax.sharding.use_abstract_mesh(MESH):
        sharding = jax.NamedSharding(MESH, jax.P(*spec))
        x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        step = jax.jit(lambda w, x: gradients(measured.probe(w, x), w, x))
        _, _, gradient = jax.eval_shape(step, SEED.update(dtype=jnp.float32), x)
    assert parts(gradient) == 4


def test_telemetry_measures_a_call_that_xla_places():
    """In the call's own mesh; JAX refused to mix it with the probe's."""
    rows = jax.P("data", None)
    layer = jaxact.compress(lambda w, x: jnp.sin(x @ w), activations="x")
    placed = jax.sharding.auto_axes(layer, out_sharding=rows)
    measured = jaxact.telemetry(lambda w, x: placed(w, x).sum())
    gradients = jax.grad(measured, argnums=(0, 1, 2))
    with jax.sharding.use_abstract_mesh(MESH):
        sharding = jax.NamedSharding(MESH, rows)
        x = jax.ShapeDtypeStruct((16, 256), jnp.float32, sharding=sharding)
        w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        step = jax.jit(lambda w, x: gradients(measured.probe(w, x), w, x))
        noise, _, gradient = jax.eval_shape(step, w, x)
    assert {*noise.values} == {"x", "sin.derivative"}
    assert gradient.sharding.spec == rows
