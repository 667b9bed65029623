"""The format in which an allocation stores a residual at other bits."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxact import (
    Adaptive,
    Cast,
    Cost,
    Dithered,
    Offload,
    PerSample,
    Policy,
    Quantize,
    Rotated,
    Sensitivity,
    allocate,
    compress,
    sensitivity,
)

pytestmark = pytest.mark.unoptimized


@pytest.mark.parametrize(
    "action, allocated",
    [
        (Dithered(4), Dithered(2)),
        (Quantize(4, group_size=64), Quantize(2, group_size=64)),
        (Adaptive(4), Adaptive(2)),
        (PerSample(4.0), Quantize(2)),  # has no bits for each element
        (None, Quantize(2)),  # a formula's
    ],
    ids=str,
)
def test_an_allocation_keeps_the_format_that_was_measured(action, allocated):
    row = Cost("r", 256, 4, 1.0, 1.0, 4, action)
    policy = allocate(Sensitivity((row,), 1.0), bits=2).policy()
    assert [rule.action for rule in policy.rules] == [allocated]
    wide = allocate(Sensitivity((row,), 1.0), bits=16).policy()
    assert [rule.action for rule in wide.rules] == [Cast(jnp.bfloat16)]


HALVED = (0.5, 1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize("kind", [Rotated, Adaptive])
def test_half_a_bit_pays_for_others(kind):
    """9 parts that add little, stored at half a bit, pay for one that adds much."""
    costs = {"loud": 1.0} | {f"quiet{i}": 1e-4 for i in range(9)}
    rows = tuple(Cost(k, 256, 4, v, 1.0, 1, kind(1)) for k, v in costs.items())
    measured = Sensitivity(rows, 1.0)
    allocation = allocate(measured, bits=1, ladder=HALVED)
    # 6 bits for one do not fit, so the rest goes to three of the others.
    assert [bits for _, bits in allocation.bits] == [4, 1, 1, 1, *6 * [0.5]]
    assert allocation.average_bits == 1
    whole = allocate(measured, bits=1, ladder=range(1, 9))
    assert allocation.error < 0.05 * whole.error
    rules = allocation.policy().rules
    assert [rule.action for rule in rules[3:5]] == [kind(1), kind(0.5)]
    assert "0.5" in str(allocation)


def test_who_has_at_least_one_bit():
    """Formats with whole bits, and what the gradient is not linear in."""
    rows = (
        Cost("a", 256, 4, 1.0, 1.0, 4, Quantize(4)),
        Cost("b", 256, 4, 1.0, 1.0, 4, Rotated(4)),
        Cost("c", 256, 4, 1.0, 1.0, 4, Rotated(4), is_linear=False),
        Cost("d", 256, 4, 1.0, 1.0, 4, Adaptive(4)),
    )
    allocation = allocate(Sensitivity(rows, 1.0), bits=0.75, ladder=(0.5,))
    assert allocation.bits == (("a", 1), ("b", 0.5), ("c", 1), ("d", 0.5))
    with pytest.raises(ValueError, match="at least 0.75 bits on average"):
        allocate(Sensitivity(rows, 1.0), bits=0.7, ladder=HALVED)


@pytest.mark.parametrize(
    "action, bits",
    [(Rotated(0.5), 0.5), (Adaptive(0.5), 0.5), (Offload(Rotated(0.5)), 1)],
    ids=str,
)
def test_half_a_bit_is_measured(action, bits):
    """Also inside of another action, which has no error of its own at half a bit."""
    f = compress(jnp.sin, policy=Policy(default=action))
    x = jax.random.normal(jax.random.key(0), (64, 256))
    (row,) = sensitivity(lambda x: f(x).sum(), x).rows
    assert row.bits == bits and 0 < row.error(bits) < math.inf


def test_a_measurement_says_what_the_gradient_is_linear_in():
    @compress(activations="x")
    def attend(w, x):
        return jax.nn.softmax(jnp.tanh(x @ w) @ x.T) @ x

    w, x = jnp.eye(32), jax.random.normal(jax.random.key(0), (32, 32))
    measured = sensitivity(lambda w: (attend(w, x) ** 2).sum(), w)
    found = {row.key.rpartition("/")[2]: row.is_linear for row in measured.rows}
    assert found["tanh.derivative"] and not found["exp"], found
