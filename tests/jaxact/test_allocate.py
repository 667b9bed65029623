"""Bits from costs: the optimum or nearly so, the budget kept, changes only if they pay.

Oracles in NumPy: dynamic programming over bits, and the Lagrangian dual.
"""

import dataclasses
import json
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxact
from jaxact import (
    Allocation,
    Cast,
    Cost,
    Exact,
    Policy,
    Quantize,
    Rule,
    Sensitivity,
    allocate,
    reallocate,
)
from jaxact._bits.greedy import LADDER

CONSECUTIVE = tuple(range(1, 9))
KINDS = ["uniform", "normal", "lognormal", "pareto"]


def table(costs, sizes=None, *, signal=1.0, itemsize=4):
    sizes = [100] * len(costs) if sizes is None else sizes
    rows = [
        Cost(f"r{i}", int(size), itemsize, float(cost), signal, 2)
        for i, (cost, size) in enumerate(zip(costs, sizes, strict=True))
    ]
    return Sensitivity(tuple(rows), signal)


def chosen(allocation):
    return [bits for _, bits in allocation.bits]


def costs_of(kind, count, seed):
    """Lognormal (sigma 3) and Pareto (0.7, no mean) are heavy-tailed."""
    rng = np.random.default_rng(seed)
    return {
        "uniform": rng.random(count),
        "normal": rng.standard_normal(count) ** 2,
        "lognormal": np.exp(3 * rng.standard_normal(count)),
        "pareto": rng.pareto(0.7, count),
    }[kind]


def ratio(bits):
    """S: 16 bits are bfloat16, as good as codes of 10.5 bits."""
    return 0.0 if bits == 32 else (2.0 ** (10.45 if bits == 16 else bits) - 1) ** -2


def least_error(costs, ladder, total):
    """Exact: best[t] is the least error of the first residuals with t bits."""
    best = np.zeros(total + 1)
    for cost in costs:
        following = np.full(total + 1, np.inf)
        for bits in ladder:
            candidate = best[: total + 1 - bits] + cost * ratio(bits)
            following[bits:] = np.minimum(following[bits:], candidate)
        best = following
    return best[total]


def dual(values, weights, limit):
    """A lower bound: max over a of sum_i min_b (value_ib + a (weight_ib - limit_i)).

    values, weights: (residual, rung); limit: of the sum of weights.
    """
    slopes = -np.diff(values, axis=1) / np.diff(weights, axis=1)
    bounds = [
        (values + a * weights).min(axis=1).sum() - a * limit for a in slopes.ravel()
    ]
    return max(bounds)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("average", [1.5, 2, 2.75, 4, 7])
def test_equal_sizes_consecutive_bits_are_optimal(kind, average):
    costs = costs_of(kind, 32, seed=0)
    found = allocate(table(costs), bits=average, ladder=CONSECUTIVE)
    best = least_error(costs, CONSECUTIVE, int(32 * average))
    assert found.error == pytest.approx(best, rel=1e-9)
    assert found.average_bits <= average


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("average", [2, 2.5, 4])
def test_equal_sizes_any_ladder_is_within_a_thousandth(kind, average):
    costs = costs_of(kind, 256, seed=1)
    found = allocate(table(costs), bits=average)
    assert found.average_bits <= average
    best = least_error(costs, LADDER, int(256 * average))
    assert best * (1 - 1e-2 * ratio(8)) <= found.error <= 1.001 * best


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ladder", [CONSECUTIVE, LADDER, (1, 2, 4, 8), (8, 3)])
def test_unequal_sizes_miss_the_bound_by_less_than_a_step(kind, ladder):
    """Weak duality: no choice is below `dual`, and the greedy is one step above it."""
    rungs = np.array(sorted(ladder))
    sizes = 2 ** np.random.default_rng(2).integers(0, 12, 64)
    costs = costs_of(kind, 64, seed=3) * sizes
    measured = table(costs, sizes)
    errors = costs[:, None] * [ratio(b) for b in rungs]
    stored = sizes[:, None] * rungs
    for average in (3, 4.4):
        found = allocate(measured, bits=average, ladder=ladder)
        bound = dual(errors, stored, average * sizes.sum())
        assert found.average_bits <= average
        assert found.error >= bound * (1 - 1e-3)  # ratio(16) has three digits
        assert found.error - bound <= -np.diff(errors, axis=1).min()
    for e2 in (errors[:, -1].sum() * 3, errors[:, 0].sum() / 30):
        found = allocate(measured, e2=e2, ladder=ladder)
        bits = found.average_bits * sizes.sum()
        bound = dual(stored[:, ::-1], errors[:, ::-1], e2)
        assert found.error <= e2
        assert bound * (1 - 1e-3) <= bits <= bound * (1 + 1e-3) + np.diff(stored).max()


def test_heavy_tails_gain_most_over_uniform_bits():
    costs = costs_of("lognormal", 128, seed=4)
    found = allocate(table(costs), bits=2)
    assert found.error < costs.sum() * ratio(2) / 8


def test_equal_costs_get_equal_bits():
    assert chosen(allocate(table([1.0] * 10), bits=4)) == [4] * 10
    assert chosen(allocate(table([0.0] * 10), bits=4)) == [4] * 10
    assert sorted(chosen(allocate(table([1.0] * 10), bits=5))) == [4] * 5 + [6] * 5


def test_a_thousand_times_the_cost_is_kept_higher():
    bits = chosen(allocate(table([1.0] * 9 + [1000.0]), bits=4))
    assert bits[-1] > max(bits[:-1])


def test_the_whole_budget_counts_elements():
    found = allocate(table([1.0, 1.0], [1000, 10]), bits=2.3)
    assert chosen(found)[1] > chosen(found)[0] and found.average_bits <= 2.3
    assert chosen(allocate(table([1.0] * 100), bits=32)) == [16] * 100


def test_the_error_bound_is_shared():
    measured = table([1.0, 1.0, 1000.0], signal=10.0)
    bits = chosen(found := allocate(measured, e2=0.1))
    assert found.error <= 0.1 * 10 and found.relative_error <= 0.1
    assert bits[2] > bits[0]
    fewer = [dict(found.bits) | {f"r{i}": b - 1} for i, b in enumerate(bits) if b > 1]
    assert all(measured.error(choice) > 1.0 for choice in fewer)
    assert chosen(allocate(table([0.0, 0.0], signal=0.0), e2=0.1)) == [1, 1]


def test_what_is_not_finite_stays_exact():
    measured = table([1.0, math.nan, math.inf, 1.0], [100, 10, 10, 100])
    found = allocate(measured, bits=8)
    assert chosen(found)[1:3] == [32, 32] and found.average_bits <= 8
    assert math.isfinite(found.error)
    assert "must stay exact" in str(measured)
    assert math.isinf(measured.error({f"r{i}": 4 for i in range(4)}))
    with pytest.raises(ValueError, match=r"r1, r2 must stay exact.*more bits"):
        allocate(measured, bits=2)


def test_bits_of_narrow_floats():
    """16 bits are exact for what has 16, and 8 for what has 8."""
    sixteen = allocate(table([1e9], itemsize=2), e2=1e-9)
    assert chosen(sixteen) == [16] and sixteen.error == 0
    assert sixteen.policy().rules[0].action == Exact()
    eight = allocate(table([1e9], itemsize=1), e2=1e-9)
    assert chosen(eight) == [8] and eight.policy().rules[0].action == Exact()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "exactly one"),
        ({"bits": 2, "e2": 0.1}, "exactly one"),
        ({"bits": 0}, "above 0"),
        ({"bits": 33}, "at most 32"),
        ({"bits": math.nan}, "above 0"),
        ({"e2": 0.0}, "positive"),
        ({"e2": math.inf}, "positive"),
        ({"bits": 0.5}, "at least 1 bits"),
        ({"bits": 1, "ladder": (2, 4)}, "at least 2 bits"),
        ({"e2": 1e-12}, "larger e2, or 32"),
        ({"bits": 2, "ladder": ()}, "1 to 8"),
        ({"bits": 2, "ladder": (1, 9)}, "1 to 8"),
    ],
)
def test_bad_requests(arguments, message):
    with pytest.raises(ValueError, match=message):
        allocate(table([1.0, 2.0]), **arguments)
    with pytest.raises(ValueError, match=message):
        reallocate(allocate(table([1.0, 2.0]), bits=2), table([1.0, 2.0]), **arguments)


def test_a_request_without_bits_is_refused_by_the_name_that_was_called():
    current = allocate(table([1.0]), bits=2)
    with pytest.raises(ValueError, match=r"^reallocate\(bits=None, e2=None\): exactly"):
        reallocate(current, current.measured)


def test_bad_tables():
    with pytest.raises(ValueError, match="empty"):
        allocate(table([]), bits=2)
    row = table([1.0]).rows[0]
    with pytest.raises(ValueError, match="distinct"):
        Sensitivity((row, row), 1.0)
    with pytest.raises(ValueError, match="r0 are required"):
        table([1.0]).error({})
    with pytest.raises(ValueError, match="squared gradient of nan"):
        allocate(table([1.0], signal=math.nan), e2=0.1)
    with pytest.raises(ValueError, match="one entry for each"):
        Allocation((("other", 4),), table([1.0]))
    with pytest.raises(ValueError, match="gain"):
        reallocate(allocate(table([1.0]), bits=2), table([1.0]), bits=2, gain=1)


def test_policy():
    measured = table([1e-3, 1.0, 1e6, math.nan])
    found = Allocation((("r0", 2), ("r1", 8), ("r2", 16), ("r3", 32)), measured)
    mine = Rule(Exact(), path="head/*")
    policy = found.policy(Policy(bits=3, rules=(mine,)))
    actions = [Quantize(2), Quantize(8), Cast(jnp.bfloat16), Exact()]
    named = tuple(Rule(a, key=f"r{i}") for i, a in enumerate(actions))
    assert policy == Policy(bits=3, rules=(mine, *named))
    assert found.policy(action=lambda b: Quantize(min(b, 8))).rules[3].action == (
        Quantize(8)
    )
    assert hash(found.policy()) == hash(found.policy())


def test_printing():
    found = allocate(table([1.0, 1000.0], signal=4.0), bits=4)
    assert str(found).splitlines()[0].split() == (
        ["key", "elements", "bits", "error", "relative"]
    )
    assert "4 bits on average" in str(found)
    measured = dataclasses.replace(table([1.0, math.inf]), unmeasured=("x",))
    *rows, last = str(measured).splitlines()
    assert len(rows) == 3 and len({len(row) for row in rows}) == 1
    assert last == "not measured: x"
    plain = json.loads(json.dumps(measured.to_dict(), allow_nan=False))
    assert plain["rows"][1]["variance"] is None and plain["unmeasured"] == ["x"]


@pytest.mark.parametrize("cost, expected", [(0.0, 0.0), (1.0, math.inf)])
def test_the_gradient_may_be_zero(cost, expected):
    found = allocate(table([cost], signal=0.0), bits=4)
    assert found.relative_error == expected
    assert str(found).splitlines()[1].endswith("-")


def test_merge():
    earlier, later = table([1.0, 2.0, math.inf]), table([3.0, math.nan, 5.0])
    later = dataclasses.replace(
        later, rows=later.rows + (Cost("new", 7, 2, 1.0, 1.0, 4),), signal=3.0
    )
    earlier = dataclasses.replace(
        earlier,
        rows=earlier.rows + (Cost("old", 7, 2, 9.0, 1.0, 4),),
        unmeasured=("new", "never"),
    )
    merged = earlier.merge(later, 0.75)
    variance = {row.key: row.variance for row in merged.rows}
    assert variance["r0"] == 0.75 * 1 + 0.25 * 3
    assert math.isnan(variance["r1"]) and variance["r2"] == 5
    assert variance["new"] == 1 and variance["old"] == 9
    assert merged.signal == 0.75 * 1 + 0.25 * 3
    assert merged.unmeasured == ("never",)
    with pytest.raises(ValueError, match="momentum"):
        earlier.merge(later, 1.5)


COSTS = costs_of("lognormal", 40, seed=5)


def test_noise_changes_nothing():
    """Independent relative errors of 30 % in every cost, twenty times."""
    rng = np.random.default_rng(6)
    first = current = allocate(table(COSTS), bits=2)
    bounded = kept = allocate(table(COSTS, signal=COSTS.sum()), e2=0.05)
    for _ in range(20):
        noisy = COSTS * np.exp(0.3 * rng.standard_normal(40))
        current = reallocate(current, table(noisy), bits=2)
        kept = reallocate(kept, table(noisy, signal=1.2 * noisy.sum()), e2=0.05)
    assert current is first and kept is bounded


def test_what_pays_changes_and_says_so(caplog):
    current = allocate(table(COSTS), bits=2)
    later = table(COSTS[::-1])
    with caplog.at_level(logging.INFO, logger="jaxact"):
        changed = reallocate(current, later, bits=2)
    assert changed == allocate(later, bits=2)
    lines = current.changes(changed)
    assert lines and all(line in caplog.text for line in lines)
    assert lines[0].startswith("r") and lines[0].endswith(" bits")
    assert reallocate(current, later, bits=2, gain=0.999) is current


def test_budget_and_bound_are_kept():
    current = allocate(table(COSTS), bits=3)
    assert reallocate(current, table(COSTS), bits=2.8) is current
    assert reallocate(current, table(COSTS), bits=2.5).average_bits <= 2.5
    assert reallocate(current, table(COSTS), bits=4).average_bits > 3.9
    signal = COSTS.sum()
    current = allocate(table(COSTS, signal=signal), e2=0.01)
    assert reallocate(current, table(COSTS, signal=signal / 1.05), e2=0.01) is current
    tighter = table(COSTS, signal=signal / 1.5)
    assert reallocate(current, tighter, e2=0.01).relative_error <= 0.01
    looser = table(COSTS, signal=signal * 100)
    assert reallocate(current, looser, e2=0.01).average_bits < current.average_bits


def test_graphs_may_change():
    current = allocate(table(COSTS), bits=2)
    fewer = table(COSTS[:30])
    more = table([*COSTS, 1.0])
    assert dict(reallocate(current, more, bits=2).bits).keys() >= {"r40"}
    assert "r40: new" in "".join(current.changes(allocate(more, bits=2)))
    assert "r39: gone" in "".join(current.changes(allocate(fewer, bits=2)))
    vanishing = table([*COSTS[:39], 1e-9])
    current = allocate(vanishing, bits=2)
    rest = dataclasses.replace(vanishing, rows=vanishing.rows[:39])
    assert reallocate(current, rest, bits=2) is current


def test_a_step_that_overflowed_changes_nothing():
    current = allocate(table(COSTS), bits=2)
    assert reallocate(current, table([math.nan] * 40), bits=2) is current
    assert reallocate(current, table(COSTS, signal=math.inf), e2=0.1) is current
    one = COSTS.copy()
    one[3] = math.inf  # only this one: it needs to be exact from now on
    assert dict(reallocate(current, table(one), bits=2).bits)["r3"] == 32


def test_prediction_matches_a_compressed_gradient():
    """`error` of one residual, a linear layer's input, against 300 real gradients.

    variance = R^2 / 6 ||gy||^2 fan_in for one range R: every row holds 0 and 1, which
    are codes, and 62 other values. The mean of 300 draws with 62 independent parts
    deviates by sqrt(2 / 62 / 300) = 1 %; where values fall between codes moves it by
    0.447 / sqrt(3968) = 0.7 %; the scale, 1 / 7 in bfloat16, by up to 0.8 %.
    """
    rng = np.random.default_rng(10)
    x = rng.random((64, 64)).astype(np.float32)
    x[:, 0], x[:, 1] = 0, 1
    w = jnp.zeros((64, 8))
    gy = jnp.asarray(rng.standard_normal((64, 8)), jnp.float32)
    small = jaxact.compress(
        lambda w, x: x @ w, policy=Policy(default=Quantize(3)), activations="x"
    )

    def gradient(key):
        _, pull = jax.vjp(lambda w: small(w, jnp.asarray(x), rounding_key=key), w)
        return pull(gy)[0]

    draws = jax.jit(jax.vmap(gradient))(jax.random.split(jax.random.key(0), 300))
    error = np.square(np.asarray(draws) - x.T @ np.asarray(gy)).sum((1, 2)).mean()
    row = Cost("x", x.size, 4, float(np.square(gy).sum()) * 62 / 6, 1.0, None)
    assert error == pytest.approx(row.error(3), rel=0.05)
