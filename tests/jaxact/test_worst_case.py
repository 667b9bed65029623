"""Bits by formula: worst case and expectation, on a linear layer and a convolution."""

import math

import numpy as np
import pytest

from jaxact.policies import Consumer, acgc_worst_case, stochastic_bits


def linear(x, gy):
    return np.einsum("nc,nk->ck", x, gy)


def convolution(x, gy, stride=2):
    """Weight gradient of a 3x3 convolution, VALID padding: (R, S, C, K)."""
    p, q = gy.shape[1:3]
    windows = [
        x[:, r : r + stride * p : stride, s : s + stride * q : stride]
        for r in range(3)
        for s in range(3)
    ]
    return np.stack([np.einsum("npqc,npqk->ck", w, gy) for w in windows])


def layer(kind):
    """(weight gradient of x and gy, x, gy, fan_in, positions)."""
    rng = np.random.default_rng(7)
    if kind == "linear":
        x, gy = rng.random((64, 16)), rng.standard_normal((64, 8))
        return linear, x, gy, 16, 64
    x, gy = rng.random((2, 13, 13, 4)), rng.standard_normal((2, 6, 6, 5))
    return convolution, x, gy, 4 * 9, 2 * 6 * 6


def squared(a):
    return float(np.square(a).sum())


def consumer(gradient, x, gy, fan_in, positions):
    return Consumer(squared(gradient(x, gy)), squared(gy), fan_in, positions)


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("e2", [1.0, 0.01])
def test_worst_case_holds_for_any_error(kind, e2):
    gradient, x, gy, *sizes = layer(kind)
    bits = acgc_worst_case(e2, [consumer(gradient, x, gy, *sizes)], 1.0)
    error = 0.5 / (2**bits - 1)
    rng = np.random.default_rng(8)
    patterns = [
        np.ones_like(x),
        rng.choice([-1.0, 1.0], x.shape),
        rng.uniform(-1, 1, x.shape),
    ]
    if kind == "linear":  # aligned with the gradient: the hardest
        patterns.append(np.sign(gy[:, :1]) * np.ones_like(x))
    for pattern in patterns:
        moved = squared(gradient(error * pattern, gy))
        assert moved <= e2 * squared(gradient(x, gy))


def test_worst_case_is_attained():
    """Constant gradient and constant error: exactly e2 with a half-step of D."""
    x, gy = layer("linear")[1], np.ones((64, 8))
    one = consumer(linear, x, gy, 16, 64)
    allowed = math.sqrt(0.1 * one.weight / (64 * 16 * one.output))
    moved = squared(linear(np.full_like(x, allowed), gy))
    assert moved == pytest.approx(0.1 * one.weight)
    for bits in (3, 7):  # a range of 2 D (2^b - 1) is what b bits just manage
        widest = 2 * allowed * (2**bits - 1)
        assert acgc_worst_case(0.1, [one], 0.999 * widest) == bits
        assert acgc_worst_case(0.1, [one], 1.001 * widest) == bits + 1
        assert acgc_worst_case(0.1, [one], 0.499 * widest, stochastic=True) == bits


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("e2", [1.0, 0.1, 0.01])
def test_expected_error_of_stochastic_rounding(kind, e2):
    """With the step that just reaches e2, 400 draws add e2 +- 10 %.

    A draw's squared error has at least 16 (linear) or 36 independent parts, a relative
    deviation of at most 0.35, 0.018 in the mean; where values fall between codes moves
    the mean by 0.447 / sqrt(288 effective elements) = 0.026. 10 % is three deviations,
    for fixed seeds.
    """
    gradient, x, gy, fan_in, positions = layer(kind)
    one = consumer(gradient, x, gy, fan_in, positions)
    step = math.sqrt(6 * e2 * one.weight / (fan_in * one.output))
    for bits in (2, 5):
        widest = step * (2**bits - 1)
        assert stochastic_bits(e2, [one], 0.999 * widest) == bits
        assert stochastic_bits(e2, [one], 1.001 * widest) == bits + 1
    rng = np.random.default_rng(9)
    start = x - step * rng.random(x.shape)  # where codes fall is uniform too
    draws = [
        squared(gradient(round_at_random(x, start, step, rng) - x, gy))
        for _ in range(400)
    ]
    assert np.mean(draws) == pytest.approx(e2 * one.weight, rel=0.1)


def round_at_random(x, start, step, rng):
    return start + step * np.floor((x - start) / step + rng.random(x.shape))


@pytest.mark.parametrize("kind, extra", [("linear", 4.3), ("conv", 4.4)])
def test_the_worst_case_asks_for_more_bits(kind, extra):
    """log2(6 positions) / 2 more for the same rounding: 64 and 72 positions here."""
    one = consumer(*layer(kind))
    assert math.log2(6 * one.positions) / 2 == pytest.approx(extra, abs=0.05)
    for e2 in (0.1, 0.01, 0.001):
        worst = acgc_worst_case(e2, [one], 1.0, stochastic=True)
        assert worst - stochastic_bits(e2, [one], 1.0) in (4, 5)


def test_several_consumers_share_the_error():
    """The bound is on the sum over both; two of one kind are as one."""
    _, x, gy, *sizes = layer("conv")
    first = consumer(convolution, x, gy, *sizes)
    second = consumer(convolution, x, 10 * gy, *sizes)
    for bits in (acgc_worst_case, stochastic_bits):
        assert bits(0.1, [first, first], 1.0) == bits(0.1, [first], 1.0)
        assert bits(0.1, [first, second], 1.0) == bits(0.1, [first], 1.0)
    bits = acgc_worst_case(0.1, [first, second], 1.0)
    error = np.full_like(x, 0.5 / (2**bits - 1))
    moved = squared(convolution(error, gy)) + squared(convolution(error, 10 * gy))
    assert moved <= 0.1 * (first.weight + second.weight)


@pytest.mark.parametrize("bits", [acgc_worst_case, stochastic_bits])
def test_vanished_gradients_give_bits_all_the_same(bits):
    assert bits(0.1, [Consumer(0.0, 0.0, 4, 8)], 1.0) == 1
    assert bits(0.1, [Consumer(0.0, 1.0, 4, 8)], 1.0) == 16
    assert bits(0.1, [Consumer(math.nan, 1.0, 4, 8)], 1.0) == 16
    assert bits(0.1, [Consumer(math.inf, math.inf, 4, 8)], 1.0) == 16
    assert bits(0.1, [Consumer(1.0, 1.0, 4, 8)], 0.0) == 1
    with pytest.raises(ValueError, match="positive"):
        bits(0.0, [Consumer(1.0, 1.0, 4, 8)], 1.0)
