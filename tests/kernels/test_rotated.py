"""The rotated format against its NumPy twin, bit for bit, and its special values."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact_kernels import rotated
from support import rotated_oracle
from support.subjects import ROTATED, Rotated, jitted, sample
from support.variants import thorough

pytestmark = thorough

SHAPES = [(2, 300), (2, 5, 31), (1, 96), ()]


def check_against_oracle(subject, x, seed):
    encode, decode = jitted(subject, x.shape)
    stored = encode(x, np.uint32(seed))
    wanted = rotated_oracle.encode(np.asarray(x), seed, **subject.options)
    np.testing.assert_array_equal(stored.metadata, wanted[1], err_msg="metadata")
    np.testing.assert_array_equal(stored.words, wanted[0], err_msg="words")
    back = np.asarray(decode(stored))
    want = rotated_oracle.decode(
        *wanted, seed, shape=x.shape, dtype=back.dtype, **subject.options
    )
    np.testing.assert_array_equal(back.astype("float32"), want.astype("float32"))
    assert back.dtype == x.dtype and back.shape == x.shape
    return stored


# Two shapes for each format, each shape with half of the formats.
@pytest.mark.parametrize(
    ("subject", "shape"),
    [
        (subject, SHAPES[(number + turn) % len(SHAPES)])
        for number, subject in enumerate(ROTATED)
        for turn in (0, 1)
    ],
    ids=str,
)
def test_words_and_values_equal_the_oracle(subject, shape):
    check_against_oracle(subject, sample(subject, shape, seed=1), 7)


@pytest.mark.parametrize(
    "bits, is_adaptive",
    [(0.5, False), *itertools.product((1, 2, 3, 4, 5, 8), (False, True))],
)
def test_every_kind_of_group_equals_the_oracle(bits, is_adaptive):
    rng = np.random.default_rng(int(2 * bits))
    x = rng.standard_normal((12, 64)).astype(np.float32)
    x[0], x[1], x[2, 3], x[3, 5] = 0, 1 / 3, np.nan, np.inf
    x[4], x[5] = np.maximum(x[4], 0), np.sign(x[5])
    x[6], x[7] = 100 + x[6] / 50, x[7] * 1e-12
    x[8] = np.eye(1, 64, 9) * 30
    x[9], x[10] = np.clip(x[9], -0.1, 1.1), x[10] ** 3 * 1e20
    x[11] = np.linspace(0, 1, 64)
    subject = Rotated(bits, "float32", 64, is_adaptive)
    stored = check_against_oracle(subject, jnp.asarray(x), 2**32 - 1)
    flags = np.asarray(stored.metadata).ravel()[4:] & 0x10001
    if is_adaptive and bits in (2, 3, 4):  # all three kinds occur
        assert {0, 1, 0x10000} <= {int(f) & (1 if f & 1 else 0x10000) for f in flags}


def round_trip(subject, x, seed=3):
    encode, decode = jitted(subject, x.shape)
    return np.asarray(decode(encode(jnp.asarray(x), np.uint32(seed))))


@pytest.mark.parametrize(
    "bits, is_adaptive",
    [(0.5, False), *itertools.product((1, 4, 8), (False, True))],
)
def test_special_values(bits, is_adaptive):
    subject = Rotated(bits, "float32", 64, is_adaptive)
    x = np.asarray(sample(subject, (6, 128))).copy()
    x[0], x[1] = 1 + 2.0**-23, 0
    x[2, 100] = np.nan
    x[3, :64] = x[4, :64]
    x[3, [x[3, :64].argmin(), x[3, :64].argmax()]] = -np.inf, np.inf
    back = round_trip(subject, x)
    np.testing.assert_array_equal(back[:2], x[:2])
    wanted = np.zeros((6, 128), bool)
    wanted[2, 64:] = True
    np.testing.assert_array_equal(np.isnan(back), wanted)
    assert np.isfinite(back[3]).all()
    assert abs(back[3, :64]).max() < 20 * abs(x[4, :64]).max()


def test_infinities_leave_their_neighbours_alone():
    subject = Rotated(2)
    x = np.asarray(sample(subject, (256,), seed=3)).copy()
    x[[10, 20]] = x.min(), x.max()
    other = x.copy()
    other[[10, 20]] = -np.inf, np.inf
    np.testing.assert_array_equal(round_trip(subject, other), round_trip(subject, x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_the_ends_of_the_range_stay_finite(dtype, is_adaptive):
    top = float(jnp.finfo(dtype).max)
    rows = [[top, -top], [top, 0], [-top, 0], [top, top], [top, 1], [np.inf, -np.inf]]
    x = np.array(rows, dtype=jnp.dtype(dtype))
    for bits in (1, 2, 8):
        back = round_trip(Rotated(bits, dtype, 32, is_adaptive), x)
        assert np.isfinite(back.astype(np.float64)).all()


def test_zeros_that_sit_on_codes_come_back_exactly_where_that_is_chosen():
    subject = Rotated(4, is_adaptive=True)
    x = np.where(np.arange(512) % 8 == 0, 1.0, 0.0).astype(np.float32).reshape(2, 256)
    x[:, 4] = 0.3
    back = round_trip(subject, x)
    assert (back[x == 0] == 0).all()


def test_float64_beyond_float32_counts_as_infinite():
    with jax.enable_x64(True):
        x = jnp.asarray(np.array([1e300, 1.0, 2.0, -1e300]))
        stored = rotated.encode(x, jnp.uint32(0), bits=8, group_size=32)
        options = {"shape": (4,), "dtype": x.dtype, "bits": 8, "group_size": 32}
        back = np.asarray(rotated.decode(stored, **options))
        assert back.dtype == np.float64 and (abs(back) < 3).all()


@pytest.mark.parametrize(
    "given",
    [
        {"bits": 0},
        {"bits": 9},
        {"bits": 1.5},
        {"bits": 0.5, "is_adaptive": True},
        {"group_size": 48},
        {"group_size": 8192},
        {"x": jnp.zeros(4, jnp.int32)},
        {"seed": jnp.zeros(2, jnp.uint32)},
    ],
    ids=str,
)
def test_encode_refuses(given):
    arguments = {"x": jnp.ones(4), "seed": jnp.uint32(0), "bits": 4} | given
    x, seed = arguments.pop("x"), arguments.pop("seed")
    with pytest.raises(ValueError, match="got .*;.*; .*"):
        rotated.encode(x, seed, **arguments)


def test_bits_that_are_too_few():
    with pytest.raises(ValueError, match="has 0.5 bits, or it has an integer"):
        rotated.encode(jnp.ones(4), jnp.uint32(0), bits=0.25)


def test_decode_refuses_arrays_that_do_not_fit():
    stored = rotated.encode(jnp.ones((2, 512)), jnp.uint32(0), bits=4)
    for options in ({"shape": (2, 513), "bits": 4}, {"shape": (2, 512), "bits": 3}):
        with pytest.raises(ValueError, match="pass the options"):
            rotated.decode(stored, dtype="float32", **options)


@pytest.mark.parametrize("options", [{"bits": 9}, {"bits": 2, "group_size": 8192}])
def test_bytes_are_refused_where_encode_refuses(options):
    with pytest.raises(ValueError, match="got .*;.*; .*"):
        rotated.stored_bytes((10_000,), **options)
