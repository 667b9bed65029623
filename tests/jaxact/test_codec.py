"""The contract of an action: its facts are its own, and a user's codec is one of ours.

Oracles in NumPy, with the float8 type of ml_dtypes.
"""

import dataclasses
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxact
from jaxact import (
    Action,
    Adaptive,
    Bias,
    Bitmask,
    Cast,
    Codec,
    Dithered,
    DualPrecision,
    Exact,
    Offload,
    PerSample,
    Policy,
    Quantize,
    Recompute,
    Rotated,
    Rule,
)
from jaxact._residual import Residual
from jaxact_kernels.normalization import Normalization

LARGEST = 448.0  # in float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Float8(Codec):
    """Nearest float8 of x over its scale."""

    bias = Bias.BIASED
    bits = 8

    def encode(self, x, seed):
        scale = jnp.max(jnp.abs(x)) / LARGEST
        return (x / scale).astype(jnp.float8_e4m3fn), scale

    def decode(self, stored, shape, dtype):
        codes, scale = stored
        return codes.astype(dtype) * scale.astype(dtype)


@dataclasses.dataclass(frozen=True)
class RandomSign(Codec):
    """+m or -m at random with mean x, m being the largest |x|."""

    bits: int  # a field without a default
    bias = Bias.UNBIASED

    def encode(self, x, seed):
        largest = jnp.max(jnp.abs(x))
        draw = jax.random.uniform(jax.random.key(seed), x.shape, x.dtype, -1)
        return draw < x / largest, largest

    def decode(self, stored, shape, dtype):
        is_positive, largest = stored
        return jnp.where(is_positive, largest, -largest).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Halves(Codec):
    """float32 as two halves of its bits: lossless."""

    bias = Bias.EXACT
    bits = None

    def encode(self, x, seed):
        return jax.lax.bitcast_convert_type(x, jnp.uint16)

    def decode(self, stored, shape, dtype):
        return jax.lax.bitcast_convert_type(stored, dtype)


@dataclasses.dataclass(frozen=True)
class Table(Codec):
    """The level below, of a table, as one byte."""

    levels = np.linspace(-1, 1, 17, dtype=np.float32)
    bias = Bias.BIASED
    bits = 8

    def encode(self, x, seed):
        return jnp.searchsorted(jnp.asarray(self.levels), x, "right").astype(jnp.uint8)

    def decode(self, stored, shape, dtype):
        return jnp.asarray(self.levels, dtype)[stored.astype(jnp.int32) - 1]


W = jax.random.normal(jax.random.key(1), (64, 32)) / 8
X = jax.random.normal(jax.random.key(0), (128, 64))
C = jax.random.normal(jax.random.key(2), (128, 32))


def loss(w, x, c):
    return jnp.sum((jnp.sin(x) @ w) * c)


def compressed(policy):
    return jaxact.compress(loss, policy=policy, activations="x")


def gradient(f, w=W, x=X, **options):
    return jax.grad(lambda w: f(w, x, C, **options))(w)


def wanted(x):
    """dL/dW from the input that float8 keeps, in float64."""
    stored = np.sin(np.asarray(x, np.float64)).astype(np.float32)
    scale = np.abs(stored).max() / np.float32(LARGEST)
    codes = (stored / scale).astype(ml_dtypes.float8_e4m3fn)
    decoded = codes.astype(np.float64) * np.float64(scale)
    return decoded.T @ np.asarray(C, np.float64)


def rows(policy):
    return jaxact.residuals(compressed(policy), W, X, C).rows


def test_a_codec_of_ones_own_as_the_default():
    policy = Policy(default=Float8())
    (row,) = jaxact.residuals(compressed(policy), W, X, C, argnums=0).rows
    assert row.action == Float8() and row.bias == "biased"
    assert row.stored_bytes == X.size + 4 and row.exact_bytes == 4 * X.size
    # Sine may differ by an ulp there, which moves few codes by one of 2^-4 relative;
    # the sum over 128 rows is then off by far less than 1 % of its size.
    error = np.linalg.norm(gradient(compressed(policy)) - wanted(X))
    noise = np.linalg.norm(gradient(loss) - wanted(X))
    assert error < noise / 10 and 0.01 < noise / np.linalg.norm(wanted(X)) < 0.05


def test_a_codec_of_ones_own_in_a_rule():
    policy = Policy(bits=2, rules=(Rule(Float8(), primitive="sin"),))
    actions = {row.primitive: row.action for row in rows(policy)}
    assert actions.pop("sin") == Float8() and set(actions.values()) == {Quantize(2)}
    table = jaxact.residuals(compressed(policy), W, X, C)
    assert "Float8()" in table.text(full=True) and table.to_dict()["rows"]
    other = Policy(rules=(Rule(Float8(), dtype="int32"),))
    with pytest.warns(jaxact.CompressionWarning, match="Float8"):
        assert Float8() not in {row.action for row in rows(other)}


def test_it_declines_integers():
    policy = Policy(default=Float8())
    residual = Residual((64, 64), np.dtype("int32"))
    decision = policy.decide(residual, small_size=0)
    assert decision.action == Exact()
    assert "Float8 stores real floats, not int32" in decision.why


@pytest.mark.parametrize("run", [jax.jit, lambda f: f], ids=["jitted", "eager"])
def test_functions_that_jax_lowers_late(run):
    """`jnp.searchsorted` is one primitive until a program is compiled, in JAX 0.12."""
    small = compressed(Policy(default=Table()))
    stored = np.sin(np.asarray(X, np.float64)).astype(np.float32)
    below = Table.levels[np.searchsorted(Table.levels, stored, "right") - 1]
    # A sine that differs by an ulp may have the next level: 1 / 8 in one of 128 rows.
    want = below.astype(np.float64).T @ np.asarray(C, np.float64)
    np.testing.assert_allclose(run(lambda: gradient(small))(), want, atol=0.5)


def test_it_runs_under_jit_vmap_and_scan():
    small = compressed(Policy(default=Float8()))
    xs = jnp.stack([X, 2 * X, 3 * X])
    loop = jnp.stack([jax.jit(lambda x: gradient(small, x=x))(x) for x in xs])
    mapped = jax.jit(jax.vmap(lambda x: gradient(small, x=x)))(xs)
    scanned = jax.lax.map(lambda x: gradient(small, x=x), xs)
    # Each sum has 128 products; float32 in another order: 128 * 2^-24 relative to the
    # sum of their sizes, at most |C| 128.
    limit = 128 * 2**-24 * 128 * float(jnp.abs(C).max())
    np.testing.assert_allclose(mapped, loop, rtol=0, atol=limit)
    np.testing.assert_allclose(scanned, loop, rtol=0, atol=limit)


def test_it_is_measured():
    small = compressed(Policy(default=Float8()))
    measured = jaxact.sensitivity(small, W, X, C)
    (row,) = measured.rows
    assert row.bits == 8 and row.size == X.size
    noise = np.square(wanted(X) - np.asarray(gradient(loss), np.float64)).sum()
    # As above: codes on a boundary may differ, the squared error by less than 5 %.
    assert row.error(8) == pytest.approx(noise, rel=0.05)
    assert jaxact.allocate(measured, bits=4).bits == ((row.key, 4),)


def test_a_lossless_codec_is_exact_everywhere():
    small = compressed(Policy(default=Halves()))
    assert {row.bias for row in rows(Policy(default=Halves()))} == {"exact"}
    jitted = lambda f: jax.jit(lambda: gradient(f))()
    # XLA may sum 128 products in another order: each order is off by at most 127 times
    # 2^-24 of the sum of their sizes, and a sine by an ulp, 2^-23.
    sizes = np.abs(np.sin(np.asarray(X))).T @ np.abs(np.asarray(C))
    assert (abs(jitted(small) - jitted(loss)) <= (2 * 127 + 2) * 2**-24 * sizes).all()
    with pytest.raises(ValueError, match="nothing in the loss is stored rounded"):
        jaxact.sensitivity(small, W, X, C)


def test_second_derivatives_need_a_codec_that_jax_differentiates():
    small = compressed(Policy(default=Halves()))
    with pytest.raises(TypeError, match="second-order"):
        jax.grad(lambda x: jnp.sum(jax.grad(small, 1)(W, x, C)))(X)


def test_an_unbiased_codec_gives_unbiased_gradients():
    """z per element of the mean of 400 draws; P(fail) < 2048 P(|z| > 6) < 5e-6."""
    small, draws = compressed(Policy(default=RandomSign(bits=1))), 400
    keys = jax.random.split(jax.random.key(5), draws)
    draw = lambda key: gradient(small, rounding_key=key)
    gradients = np.asarray(jax.lax.map(draw, keys), np.float64)
    deviation = gradients.std(0, ddof=1)
    assert deviation.min() > 0
    z = (gradients.mean(0) - gradient(loss)) / (deviation / math.sqrt(draws))
    assert np.abs(z).max() < 6
    assert 0.9 < z.std() < 1.1  # 2048 of them, of which 64 columns are independent


@pytest.mark.parametrize(
    "action, label, bias, bits",
    [
        (Exact(), "exact", "exact", None),
        (Recompute(), "recompute", "biased", None),
        (Bitmask(), "1 bit", "exact", None),
        (Quantize(4), "4 bits", "unbiased", 4),
        (Quantize(1), "1 bit", "unbiased", 1),
        (Quantize(8, stochastic=False), "8 bits, nearest", "biased", 8),
        (Cast(jnp.bfloat16), "bfloat16", "biased", 16),
        (Cast("float8_e4m3fn"), "float8_e4m3fn", "biased", 8),
        (Dithered(2), "2 bits, dithered", "unbiased", 2),
        (Rotated(1), "1 bit, rotated", "unbiased over rotations", 1),
        (Rotated(0.5), "0.5 bits, rotated", "unbiased over rotations", 0.5),
        (Adaptive(0.5), "0.5 bits, adaptive", "unbiased over rotations", 0.5),
        (Adaptive(3), "3 bits, adaptive", "unbiased over rotations", 3),
        (PerSample(2.5), "2.5 bits, per sample", "unbiased", 2.5),
        (DualPrecision(2), "2 bits and means", "unbiased", 2),
        (Offload(), "exact, host", "exact", None),
        (Offload(Quantize(4)), "4 bits, host", "unbiased", 4),
        (Offload(Bitmask()), "1 bit, host", "exact", None),
        (Float8(), "Float8, 8 bits", "biased", 8),
        (Halves(), "Halves", "exact", None),
        (Offload(Float8()), "Float8, 8 bits, host", "biased", 8),
    ],
    ids=str,
)
def test_the_facts_of_an_action(action, label, bias, bits):
    assert (action.label, action.bias, action.bits) == (label, bias, bits)
    assert action.is_lossless == (bias == "exact")
    assert action.is_packed == (not isinstance(action, Exact | Recompute))
    is_kept = isinstance(action, Exact | Bitmask) or action == Offload()
    assert action.is_differentiable == is_kept or action == Offload(Bitmask())
    assert hash(action) == hash(dataclasses.replace(action))


def test_a_replay_is_no_codec():
    assert not isinstance(Recompute(), Codec) and isinstance(Recompute(), Action)
    with pytest.raises(TypeError, match="stores something"):
        Offload(Recompute())


def public_actions():
    for name, value in vars(jaxact).items():
        is_action = isinstance(value, type) and issubclass(value, Action)
        if is_action and not inspect.isabstract(value):
            yield name


def test_the_message_has_every_action():
    with pytest.raises(TypeError) as caught:
        Policy(default=4)
    names = list(public_actions())
    assert len(names) >= 8
    assert not [name for name in names if f"{name}(" not in str(caught.value)]
    assert "Float8" not in str(caught.value)


class Silent(Codec):
    encode = Float8.encode
    decode = Float8.decode


class Bitless(Silent):
    bias = Bias.UNBIASED


class Wordy(Bitless):
    bias = "unbiased"
    bits = 8


@dataclasses.dataclass
class Thawed(Bitless):
    bits: int = 8


@pytest.mark.parametrize(
    "action, message",
    [
        (Silent(), "Silent does not. Write `bias = jaxact.Bias.UNBIASED`"),
        (Wordy(), "Write `bias = jaxact.Bias.UNBIASED`"),
        (Bitless(), "Bitless has none. Write `bits = 8`"),
        (Thawed(), "Thawed cannot. Write @dataclasses.dataclass.frozen=True"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_codec_that_breaks_the_contract(action, message):
    with pytest.raises(TypeError, match=message):
        Policy(default=action)
    with pytest.raises(TypeError, match=message):
        Rule(action)


def test_an_abstract_codec_is_refused():
    class Half(Codec[Any]):
        bias, bits = Bias.UNBIASED, 8

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]


@pytest.mark.parametrize(
    "action, shape",
    [
        (Quantize(3), (4, 300)),
        (Dithered(3), (4, 300)),
        (Rotated(3), (4, 300)),
        (Rotated(0.5), (4, 300)),
        (Adaptive(2), (4, 300)),
        (DualPrecision(2), (2, 9, 9, 16)),
        (DualPrecision(2), (9, 16)),
        (PerSample(2.5), (5, 70)),
        (Cast(jnp.bfloat16), (4, 300)),
        (Offload(Quantize(3)), (4, 300)),
        (Bitmask(), (4, 300)),
        (Float8(), (4, 300)),
    ],
    ids=str,
)
def test_a_fused_encoding_is_the_same(action, shape):
    x = jax.random.normal(jax.random.key(3), shape)
    x = x > 0 if action == Bitmask() else x
    seed = jnp.uint32(7)
    one, other = jax.jit(action.encode), jax.jit(action.encode_fused)
    jax.tree.map(np.testing.assert_array_equal, one(x, seed), other(x, seed))
    if action == Bitmask():
        return
    norm = Normalization((-1,), is_centered=False)
    halves = jnp.full(shape[-1:], 0.5, jnp.float32)  # products are exact
    half = action.encode_normalized(x, seed, norm, [halves])
    jax.tree.map(np.testing.assert_array_equal, half, action.encode(0.5 * x, seed))


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_a_cast_of_numbers_beyond_its_largest(dtype):
    largest = float(jnp.finfo(dtype).max)
    x = jnp.array([1e6, -1e6, jnp.inf, 2.0, jnp.nan])
    codec = Cast(dtype)
    found = codec.decode(codec.encode(x, np.uint32(0)), x.shape, x.dtype)
    np.testing.assert_array_equal(found, [largest, -largest, largest, 2.0, np.nan])


def test_a_cast_needs_a_sign():
    with pytest.raises(ValueError, match="a type with a sign is required"):
        Cast("float8_e8m0fnu")


@pytest.mark.parametrize("codec", [Rotated, Adaptive])
@pytest.mark.parametrize("bits", [0.25, 3.5, True, 9])
def test_bits_of_rotated_groups(codec, bits):
    with pytest.raises(ValueError) as caught:
        codec(bits)
    wanted = "0.5, or an integer from 1 to 8, is required."
    assert str(caught.value) == f"{codec.__name__}(bits={bits!r}): {wanted}"
    assert codec(np.float32(0.5)) == codec(0.5)
