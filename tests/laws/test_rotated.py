"""Rotated groups: a known error whatever the values, and nearly no bias.

Contract: over seeds the squared error is `NORMAL_ERROR[bits]` times the squared
distance from the group's mean, none of it along that distance, and as much in every
other direction; the squared bias is below 5e-4 of it. Adaptive groups err as little as
the best of the three ways.

With N draws of the errors the squared norm of their mean is bias^2 + error / N, so
(N |mean|^2 - error) / (N - 1) estimates bias^2 without bias. Where the true one is 0
its standard deviation is error sqrt(2 / elements) / N. Bounds allow 6 of these
(probability 1e-9 for normal numbers); the seeds are fixed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxact_kernels.rotated.group import NORMAL_ERROR
from support.subjects import Affine, Dithered, Rotated
from support.variants import thorough

pytestmark = thorough

DRAWS = 96
ROWS = 128
MOST_BIAS = 5e-4


def sparse(size, count):
    """Rows with some values, equal in size, and zeros."""
    rng = np.random.default_rng(size + count)
    x = np.zeros((ROWS, size), np.float32)
    for row in x:
        place = rng.choice(size, count, replace=False)
        row[place] = np.sign(rng.standard_normal(count))
    return x


def data(name):
    normal = np.random.default_rng(5).standard_normal((ROWS, 256)).astype(np.float32)
    gelu = jax.vmap(jax.vmap(jax.grad(jax.nn.gelu)))
    return {
        "normal": normal,
        "far from zero": normal + 100,
        "a large channel": normal * np.where(np.arange(256) == 7, 100, 1),
        "exponentials": np.exp(3 * (normal - normal.max(1, keepdims=True))),
        "slopes of GELU": np.asarray(gelu(jnp.asarray(normal))),
        "after a ReLU": np.maximum(normal, 0),
        "one row": np.where(np.arange(256) == 7, 40, np.tile(normal[:1], (ROWS, 1))),
        "two values": np.where(normal > 0, 1, 0),
        "one of 256": sparse(256, 1),
        "four of 256": sparse(256, 4),
        "one of 96": sparse(96, 1),
        "two of 160": sparse(160, 2),
        "padded": normal[:, :150],
    }[name].astype(np.float32)


@functools.cache
def errors(subject, name):
    """Decoded less encoded values, `float64[DRAWS, *shape]`, and the values."""
    x = data(name)

    @jax.jit
    def run(x, seeds):
        decode = lambda seed: subject.decode(subject.encode(x, seed), x.shape)
        return lax.map(decode, seeds)

    back = run(jnp.asarray(x), jnp.arange(DRAWS, dtype=jnp.uint32))
    return np.asarray(back, np.float64) - x, x.astype(np.float64)


def error(subject, name):
    found, _ = errors(subject, name)
    return (found**2).sum() / DRAWS


@pytest.mark.parametrize(
    "bits, name",
    [
        *((2, name) for name in ("normal", "a large channel", "exponentials")),
        *((1, name) for name in ("slopes of GELU", "two values", "four of 256")),
        *((4, name) for name in ("after a ReLU", "one of 256", "one of 96")),
        *((2, name) for name in ("two of 160", "one of 256", "padded")),
        *((bits, "normal") for bits in (1, 3, 4, 8)),
        *((0.5, name) for name in ("normal", "two values", "one of 96", "padded")),
        *((0.5, name) for name in ("four of 256", "two of 160", "a large channel")),
    ],
)
def test_bias_is_below_its_bound(bits, name):
    found, x = errors(Rotated(bits), name)
    squared = (found**2).sum() / DRAWS
    mean = (found.mean(0) ** 2).sum()
    bias = (DRAWS * mean - squared) / (DRAWS - 1)
    spread = np.sqrt(2 / x.size) / DRAWS
    assert bias / squared < MOST_BIAS + 6 * spread


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_values_do_not_shrink(bits, is_adaptive):
    # The part of the error along x itself, of every group and draw: from the scale's
    # rounding alone.
    found, x = errors(Rotated(bits, is_adaptive=is_adaptive), "normal")
    x = x - x.mean(1, keepdims=True)
    along = ((found * x).sum(-1) / (x**2).sum(-1)).ravel()
    assert abs(along.mean()) < 6 * along.std() / np.sqrt(along.size)


@pytest.mark.parametrize(
    "bits, name",
    [
        *((bits, "normal") for bits in (0.5, 1, 2, 3, 4, 6, 8)),
        *((0.5, name) for name in ("two values", "four of 256", "one of 96")),
        *((2, name) for name in ("one of 256", "exponentials", "a large channel")),
        *((1, name) for name in ("two values", "four of 256", "one of 96")),
    ],
)
def test_error_is_known_whatever_the_values(bits, name):
    # Within 3 %, and 2 / 256 or 2 / 96 by which a rotated group is no normal; a
    # bfloat16 scale adds (2**-8)**2 / 12, 6 % at 8 bits.
    x = data(name).astype(np.float64)
    centered = ((x - x.mean(1, keepdims=True)) ** 2).sum()
    wanted = (NORMAL_ERROR[bits] + 2.0**-16 / 12) * centered
    assert abs(error(Rotated(bits), name) / wanted - 1) < 0.03 + 2 / x.shape[1]


def test_error_is_the_same_in_every_direction_but_one():
    # Along d, the distance from the mean, there is none: element i has a share of
    # 1 - d_i^2 / |d|^2. Over 128 rows and 96 draws within 6 sqrt(2 / 12288), 8 %, of an
    # even share.
    found, x = errors(Rotated(2), "one row")
    d = x[0] - x[0].mean()
    share = 1 - d**2 / (d**2).sum()
    each = (found**2).mean((0, 1))
    assert abs(each / each.sum() - share / share.sum()).max() < 0.08 / x.shape[1]
    assert share.min() < 0.2


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize(
    "name", ["normal", "slopes of GELU", "after a ReLU", "two values"]
)
def test_adaptive_errs_as_little_as_the_best_way(bits, name):
    # A scale with one bit less is up to 2**-6 larger. Values at the group's top, R
    # above zero, then sit off their code: a variance of R**2 / 64 / (2**bits - 1).
    ways = Affine(bits), Dithered(bits), Rotated(bits)
    best = min(error(way, name) for way in ways)
    energy = (data(name).astype(np.float64) ** 2).sum()
    found = error(Rotated(bits, is_adaptive=True), name)
    assert found <= 1.06 * best + energy / 64 / (2**bits - 1)


def test_each_way_is_chosen_where_it_is_best():
    def shares(name):
        subject = Rotated(2, is_adaptive=True)
        flags = np.asarray(subject.encode(data(name), np.uint32(0)).metadata) & 0x10001
        rotated = flags & 1 > 0
        return rotated.mean(), ((flags >> 16 > 0) & ~rotated).mean()

    assert shares("normal")[0] == 1
    assert shares("slopes of GELU")[1] > 0.9
    assert shares("two values") == (0, 0)


def test_the_choice_does_not_depend_on_noise():
    subject = Rotated(4, is_adaptive=True)
    x = data("after a ReLU")
    stored = [subject.encode(x, np.uint32(seed)) for seed in range(4)]
    flags = [np.asarray(each.metadata) & 0x1 for each in stored]
    for other in flags[1:]:
        np.testing.assert_array_equal(flags[0], other)
    assert 0 < flags[0].mean() < 1


def test_one_seed_rotates_other_data_otherwise():
    # Errors of x and of 1.01 x are alike if both are rotated alike.
    subject, x = Rotated(2), data("normal")
    error_of = lambda x: np.asarray(
        subject.decode(subject.encode(jnp.asarray(x), np.uint32(0)), x.shape) - x
    )
    one, other = error_of(x), error_of(x * np.float32(1.01))
    correlation = (one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum())
    assert abs(correlation) < 6 / np.sqrt(x.size) + 0.05  # some means stay the same
