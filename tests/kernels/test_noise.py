"""Random bits: the same as the NumPy twin, uniform, independent.

Every statistical bound fails with probability at most 1e-9 for ideal noise; the inputs
are fixed, so a passing test stays passed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxact_kernels import noise
from support import oracle

FAILURE = 1e-9
GROUP, GROUPS = 256, 512
METADATA = np.uint32(0x3F803C00)  # one zero point and scale for all: the hardest case


@functools.cache
def draw(seed, metadata=METADATA, shape=(GROUPS,)):
    """`[*shape, GROUP]` noise of groups that share their metadata."""

    @jax.jit
    def draw(seed):
        keys = noise.group_keys(seed, jnp.full(shape, metadata))
        return noise.sixteen_bits(keys, GROUP)

    return np.asarray(draw(np.uint32(seed)))


def p_uniform(cells, num_cells):
    return stats.chisquare(np.bincount(cells.ravel(), minlength=num_cells)).pvalue


def p_independent(a, b):
    """p of the joint distribution of the top 4 bits of two streams being uniform."""
    return p_uniform((a >> 12) * 16 + (b >> 12), 256)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_equals_the_oracle(seed):
    got = draw(seed, shape=(3, 5)).reshape(15, GROUP)
    parts = METADATA >> np.uint32(16), METADATA & np.uint32(0xFFFF)
    wanted = [oracle.noise(seed, index, *parts, GROUP) for index in range(15)]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("shift", [0, 4, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_is_uniform(seed, shift):
    cells = draw(seed) >> shift & 0xFF
    for part in (cells, cells[:, :128], cells[:, 128:], cells[:16], cells[:, ::17]):
        assert p_uniform(part, 256) > FAILURE


def test_every_value_is_equally_likely_in_each_position():
    # Over groups, position by position: 256 chi-squares of 16 cells. Their sum has
    # 256 * 15 degrees of freedom.
    top = draw(3) >> 12
    counts = np.stack([np.bincount(column, minlength=16) for column in top.T])
    chi2 = ((counts - GROUPS / 16) ** 2 / (GROUPS / 16)).sum()
    assert FAILURE < stats.chi2.sf(chi2, GROUP * 15) < 1 - FAILURE


@pytest.mark.parametrize("distance", [1, 2, 3, 16, 64, 127])
def test_neighbours_are_independent(distance):
    x = draw(0)
    assert p_independent(x[:, :-distance], x[:, distance:]) > FAILURE


def test_the_halves_of_one_hash_are_independent():
    x = draw(0)
    assert p_independent(x[:, :128], x[:, 128:]) > FAILURE


def test_adjacent_groups_are_independent():
    x = draw(0)
    for distance in (1, 2, 8):
        assert p_independent(x[:-distance], x[distance:]) > FAILURE


@pytest.mark.parametrize("other", [1, 2, 0x80000000, 0x9E3779B9])
def test_seeds_are_independent(other):
    # Also one golden ratio apart, where a group's counter meets its neighbour's seed.
    assert p_independent(draw(0), draw(other)) > FAILURE


@pytest.mark.parametrize("bit", [0, 7, 16, 31])
def test_metadata_makes_independent_noise(bit):
    other = np.uint32(METADATA ^ np.uint32(1 << bit))
    assert p_independent(draw(0), draw(0, other)) > FAILURE


def test_hash_is_a_bijection_of_its_bits():
    # Distinct inputs must give distinct hashes: single bits, runs and small counters.
    x = np.unique(
        np.concatenate(
            [np.arange(2**16), 2 ** np.arange(32), 2**32 - 1 - np.arange(99)]
        )
    ).astype(np.uint32)
    assert len(np.unique(np.asarray(noise.hash32(jnp.asarray(x))))) == len(x)


def test_avalanche():
    # Each input bit flips each output bit half of the time. 1024 pairs of bits and n
    # draws: |z| stays below 7 with probability 1 - 3e-9 for ideal bits; lowbias32's
    # own bias, below 0.2 % here, adds 2 * sqrt(n) * 0.002 = 0.5.
    n = 2**14
    x = np.random.default_rng(0).integers(0, 2**32, n, np.uint32)
    flipped = x[:, None] ^ np.uint32(1) << np.arange(32, dtype=np.uint32)
    both = jnp.asarray(np.concatenate([x[:, None], flipped], axis=1))
    hashed = np.asarray(noise.hash32(both))
    changed = hashed[:, :1] ^ hashed[:, 1:]
    ones = [(changed >> np.uint32(bit) & 1).sum(0) for bit in range(32)]
    z = (np.array(ones) - n / 2) / np.sqrt(n / 4)
    assert abs(z).max() < 7.5


@pytest.mark.parametrize("sizes", [(2, 16), (8, 32), (8, 2, 12), (32, 1)], ids=str)
def test_every_platform_has_the_same_bits_along_several_axes(sizes):
    """A CPU's form and a GPU's, which draws the same hashes, against the plain one."""
    group = int(np.prod(sizes))
    keys = noise.group_keys(np.uint32(3), jnp.full((5,), METADATA))
    wanted = noise.sixteen_bits(keys, group).reshape(5, *sizes)
    np.testing.assert_array_equal(noise.slots_of_bits(keys, sizes), wanted)
    low, high = wanted[:, : sizes[0] // 2], wanted[:, sizes[0] // 2 :]
    for halves in (noise.halves_in_turn, noise.halves_at_once):
        np.testing.assert_array_equal(halves(low | high << 16, axis=1), wanted)
