"""The codecs that studies in examples/benchmarks compare with."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from support.variants import thorough

pytest.importorskip("flax")
pytest.importorskip("optax")


@pytest.fixture
def codecs(load):
    return load("ablation_codecs")


@pytest.fixture
def zeros(load):
    return load("zeros")


def test_a_range_per_tensor(codecs):
    x = jnp.linspace(-3, 5, 16 * 32 * 32).reshape(16, 32, 32)
    action = codecs.PerTensor(2)
    stored = action.encode(x, np.uint32(0))
    decoded = action.decode(stored, x.shape, x.dtype)
    assert len(np.unique(decoded)) == 4  # the levels of one range
    # One step is 8 / 3, and the range is rounded up by less than 1 % (bfloat16).
    assert abs(decoded - x).max() <= 8 / 3 * 1.01


def test_bits_by_a_table_of_gradients(codecs):
    weights = np.array([1.0, 0.01, 9.0, 1.0])
    widths = codecs.shared_out(weights, 2)
    cost = lambda widths: float(np.sum(weights / (2.0 ** np.array(widths) - 1) ** 2))
    every = [w for w in itertools.product(range(1, 9), repeat=4) if sum(w) == 8]
    assert sum(widths) == 8 and cost(widths) == min(map(cost, every))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 512)), jnp.float32)
    codec = codecs.ByTable(widths)
    decoded = codec.decode(codec.encode(x, np.uint32(0)), x.shape, x.dtype)
    step = (x.max(1) - x.min(1)) / (2.0 ** np.array(widths) - 1)
    # A group's range is rounded up by less than 1 % (bfloat16).
    assert (abs(decoded - x).max(1) <= 1.01 * step).all()
    assert codec.declines((8, 512), np.float32)


@thorough
def test_zero_values_take_a_bit(zeros):
    """With room for all that is not zero, and with room for half of it."""
    values = np.random.default_rng(0).normal(size=(3, zeros.ROW))
    x = jnp.asarray(np.maximum(values, 0), jnp.float32)  # half of it is not zero
    count = int((x != 0).sum(1).max())

    def draws(room, number):
        codec = zeros.NonZero(jaxact.Quantize(8), room / zeros.ROW)
        encode = jax.vmap(lambda seed: codec.encode(x, seed))
        stored = encode(jnp.arange(number, dtype=jnp.uint32))
        return jax.vmap(lambda s: codec.decode(s, x.shape, x.dtype))(stored)

    (whole,) = draws(count, 1)
    assert (whole[x == 0] == 0).all()
    # One step of 8 bits, of a range below 5 deviations.
    assert abs(whole - x).max() <= 5 / 255
    some = draws(count // 2, 400)
    kept = np.asarray((some != 0).sum(-1))
    assert kept.max() <= count // 2 and kept.min() > 0.45 * count  # few round to 0
    # An element is there in half of the draws, twice as large: a deviation of itself.
    # The mean of 400 draws is off by a twentieth of one; 6 of them for 12,288 elements,
    # each with a chance of 2e-9, and the rounding's step.
    assert (abs(some.mean(0) - x) <= 6 * x / 20 + 10 / 255).all()
    assert abs(some.mean(0).sum() / x.sum() - 1) < 0.01  # 6,000 of them: 0.07 % each
