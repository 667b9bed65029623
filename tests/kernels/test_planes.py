"""The planes format against its NumPy twin, its allocation, and bad requests."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact_kernels import planes, words
from jaxact_kernels.planes.reference import allocate, log2_sensitivity
from support import oracle
from support.subjects import Planes, jitted, sample

SHAPES = [(), (40,), (5, 300), (4, 3, 31), (3, 2, 520)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("subject", [Planes(2.5), Planes(4.0, "bfloat16", 64)], ids=str)
def test_bits_are_those_of_the_oracle(subject, shape):
    x = sample(subject, shape, seed=3)
    stored = jitted(subject, shape)[0](x, np.uint32(9))
    options = {"bits": subject.bits, "group_size": subject.group_size}
    wanted = oracle.planes_encode(np.asarray(x), 9, **options)
    for got, want in zip(stored, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_equal_samples_come_back_as_from_the_affine_format():
    # Shuffled within groups: equal ranges, different values. Also the noise is equal.
    rng = np.random.default_rng(0)
    group = rng.standard_normal(256).astype(np.float32)
    x = jnp.asarray(rng.permuted(np.tile(group, (6, 2, 1)), axis=-1)).reshape(6, 512)
    stored = planes.encode(x, jnp.uint32(5), bits=3.0)
    assert set(np.asarray(stored.bits)) == {3}
    back = planes.decode(stored, shape=x.shape, dtype=x.dtype)
    wanted = oracle.encode(np.asarray(x), 5, bits=3, group_size=256)
    options = {"bits": 3, "group_size": 256}
    wanted = oracle.decode(wanted, shape=x.shape, dtype=x.dtype, **options)
    np.testing.assert_array_equal(back, wanted)


def objective(c, bits):
    return (c / (2.0 ** np.asarray(bits) - 1) ** 2).sum()


@pytest.mark.parametrize("total", [4, 5, 9, 16, 31, 32])
@pytest.mark.parametrize(
    "c",
    [
        (1.0, 1.0, 1.0, 1.0),
        (1.0, 100.0, 0.01, 3.0),
        (0.0, 0.0, 5.0, 0.0),
        (0.0, 0.0, 0.0, 0.0),
        (1e-60, 1e60, 1.0, 1e-3),
    ],
    ids=str,
)
def test_allocation_is_the_best_of_all(c, total):
    c = np.array(c)
    with np.errstate(divide="ignore"):
        log2 = np.maximum(np.log2(c), -1024).astype(np.float32)
    bits = np.asarray(allocate(jnp.asarray(log2)[None], total))[0]
    assert bits.sum() == total and bits.min() >= 1 and bits.max() <= 8
    every = itertools.product(range(1, 9), repeat=len(c))
    best = min(objective(c, b) for b in every if sum(b) == total)
    assert objective(c, bits) <= best * (1 + 1e-6)  # logarithms in float32


def test_samples_without_a_difference_share_evenly():
    bits = np.asarray(allocate(jnp.zeros((1, 5), jnp.float32), 13))[0]
    assert list(bits) == [3, 3, 3, 2, 2]


@pytest.mark.parametrize("size", [1e-37, 1.0, 1e37])
def test_sensitivity_holds_over_the_range_of_float32(size):
    ranges = np.array([[3.0, 4.0], [0.0, 0.0], [1.0, np.nan]])
    low, high = (jnp.asarray(sign * ranges * size, jnp.float32) for sign in (-1, 1))
    found = np.asarray(log2_sensitivity(low, high))
    wanted = [2 * np.log2(5 * size), -1024, 2 * np.log2(size)]  # of half ranges
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "bits, num_samples, total",
    [(2, 5, 10), (2.5, 5, 12), (1, 7, 7), (8, 3, 24), (1.15, 100, 115), (2.3, 10, 23)],
)
def test_the_budget_is_spent_exactly(bits, num_samples, total):
    x = jax.random.normal(jax.random.key(0), (num_samples, 64))
    x = x * jnp.asarray(2.0 ** (np.arange(num_samples) % 5), jnp.float32)[:, None]
    stored = planes.encode(x, jnp.uint32(0), bits=bits)
    assert stored.bits.sum(dtype=int) == total == stored.words.shape[1]


def test_shards_have_budgets_of_their_own():
    x = sample(Planes(2.0), (8, 96), seed=1)
    encode = lambda x, shards: planes.encode(x, jnp.uint32(0), bits=2.5, shards=shards)
    whole, apart = encode(x, 2), [encode(half, 1).bits for half in (x[:4], x[4:])]
    np.testing.assert_array_equal(whole.bits, jnp.concatenate(apart))
    assert whole.words.shape[:2] == (2, 10)
    assert encode(x, 3).words.shape[:2] == (1, 20)  # 3 does not divide 8


def test_planes_are_words_of_one_bit():
    codes = jax.random.bits(jax.random.key(0), (2, 3, 96), "uint8").astype(jnp.uint32)
    packed = words.pack(codes, 8)
    each = words.cut_planes(packed)
    for i, plane in enumerate(each):
        np.testing.assert_array_equal(plane, words.pack(codes >> i & 1, 1))
    np.testing.assert_array_equal(words.join_planes(each), packed)


def test_infinities_saturate_and_nan_is_loud_where_they_are():
    x = sample(Planes(2.0), (4, 512), seed=2)
    x = x.at[0, 3].set(np.inf).at[1, 300].set(np.nan)
    stored = planes.encode(x, jnp.uint32(0), bits=3)
    back = np.asarray(planes.decode(stored, shape=x.shape, dtype=x.dtype))
    assert np.isnan(back[1, 256:]).all() and np.isfinite(np.delete(back, 1, 0)).all()
    assert np.isfinite(back[1, :256]).all()
    finite = np.asarray(x[0])[np.isfinite(x[0])]
    assert abs(back[0, 3] - finite[:255].max()) < np.ptp(finite)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 0.5}, "1 to 8"),
        ({"bits": 9}, "1 to 8"),
        ({"bits": "2"}, "real number"),
        ({"bits": 2, "group_size": 100}, "multiple of 32"),
        ({"bits": 2, "shards": 0}, "positive number of shards"),
        ({"bits": 2, "seed": 3}, "uint32 scalar"),
        ({"bits": 2, "x": jnp.arange(3)}, "int32.3."),
    ],
)
def test_bad_requests(options, message):
    x = jnp.ones((2, 64))
    with pytest.raises(ValueError, match=message):
        planes.encode(**({"x": x, "seed": jnp.uint32(0)} | options))


def test_decode_says_which_shapes_it_needs():
    stored = planes.encode(jnp.ones((2, 64)), jnp.uint32(0), bits=2)
    with pytest.raises(ValueError, match="group_size=256 require"):
        planes.decode(stored, shape=(2, 96), dtype=jnp.float32)
