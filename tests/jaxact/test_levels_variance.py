"""What a bit more is worth: the error of each format, and bfloat16's beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxact import Adaptive, Cost, Dithered, Quantize, Rotated
from jaxact._bits.cost import levels_variance
from support.variants import thorough

pytestmark = pytest.mark.unoptimized

F32 = jnp.float32
WIDTHS = tuple(range(1, 9))


def test_levels_variance():
    assert [levels_variance(b) for b in (1, 2, 4)] == [1, 1 / 9, 1 / 225]
    assert levels_variance(32) == levels_variance("exact") == 0
    for bits, action in ((0, None), (0.5, None), (0.5, Dithered(1)), (1.5, Rotated(1))):
        with pytest.raises(ValueError, match="at least 1"):
            levels_variance(bits, action)


@thorough
@pytest.mark.parametrize("kind", [Quantize, Dithered, Rotated, Adaptive])
def test_levels_variance_is_the_error_of_the_format(kind):
    """On normal values, over the error at 4 bits.

    2^18 errors: chance is below 1 %. The scales of rotated formats have 8 bits, which
    adds to the error of many bits. At 1 bit normal values lie nearer to the middle
    between two codes than even ones, which S is for: `Quantize` errs 1.3 times as much.
    """
    x = jax.random.normal(jax.random.key(0), (1024, 256))

    def error(codec):
        run = jax.jit(lambda x, seed: codec.decode(codec.encode(x, seed), x.shape, F32))
        return float(((run(x, jnp.uint32(1)) - x) ** 2).mean())

    of_four = error(kind(4)) / levels_variance(4, kind(4))
    half = (0.5,) if issubclass(kind, Rotated) else ()
    for bits in (b for b in (*half, *WIDTHS) if b > 1 or kind is not Quantize):
        wanted = levels_variance(bits, kind(bits))
        assert error(kind(bits)) / of_four == pytest.approx(wanted, rel=0.06), bits


def test_sixteen_bits_are_bfloat16():
    """On normal values, groups of 256, as errors of codes are measured.

    2^20 values: the mean squares are known to 0.3 %.
    """
    x = np.random.default_rng(0).standard_normal((4096, 256)).astype(np.float32)
    error = np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float64) - x
    of_one_bit = ((x.max(1) - x.min(1)) ** 2).mean() / 6
    assert levels_variance(16) == pytest.approx((error**2).mean() / of_one_bit, 0.02)
    assert levels_variance(16) == pytest.approx((2**10.45 - 1) ** -2, 0.02)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("action", [None, Dithered(1), Rotated(1), Adaptive(1)])
def test_every_ladder_is_convex(itemsize, action):
    """So greedy steps come in order, and no rung has to be skipped."""
    half = (0.5,) if isinstance(action, Rotated) else ()
    bits = [b for b in (*half, *WIDTHS, 16, 32) if b <= 8 * itemsize]
    row = Cost("r", 1, itemsize, 1.0, 1.0, None, action)
    slopes = np.diff([row.error(b) for b in bits]) / np.diff(bits)
    assert (np.diff(slopes) > 0).all() and slopes[-1] < 0
