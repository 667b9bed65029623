"""The search behind a plan, with a compiler that differs from the tables."""

import math

from jaxact import Exact, Policy, Quantize
from jaxact._budget.planning import frontier_of
from jaxact._budget.problem import Call, Option, Problem, Row, Variant
from jaxact._budget.search import MOST_COMPILES, Search
from jaxact._budget.solve import solve
from jaxact._memory import Memory
from jaxact._using import current_override

SIZE = 64 << 20
EIGHT_BITS = 0.01 + 4.0**-8 / 100


def problem_of(rows, options):
    """Calls with three rows each."""
    keys = [f"layer{i // 3}/{i}" for i in range(rows)]
    rows = [Row(key, "", SIZE // 2, SIZE, tuple(options)) for key in keys]
    calls = tuple(
        Call(str(i), (Variant("stored", tuple(rows[i : i + 3]), 0),))
        for i in range(0, len(rows), 3)
    )
    return Problem(calls, 0, len(rows) * SIZE, 0, 1.0, False, 1e12, 0)


def packed(*widths):
    return [
        Option(Quantize(bits), SIZE * bits // 16, 0.01, 4.0**-bits / 100)
        for bits in widths
    ]


EXACT = Option(Exact(), SIZE, 0.0, 0.0)


def searched(problem, ratio, whole, taken):
    """A finished search, and its limit, a part of the whole.

    Args:
      taken: the compiler's bytes, by those of packed residuals and the number of
        exact ones.
    """

    def compiled():
        rules = current_override().policy.rules
        bits = [rule.action.bits for rule in rules if rule.action.bits is not None]
        packed = sum(SIZE * b // 16 for b in bits)
        return Memory(round(taken(packed, rows - len(bits))), 0, 0, 0, "cpu")

    rows = sum(len(call.variants[0].rows) for call in problem.calls)
    search = Search(problem, Policy(), compiled, "temp", math.inf, math.inf)
    limit = int(ratio * whole)
    search.uncompressed()
    search.run(limit)
    assert len(search.trials) <= 1 + MOST_COMPILES
    return search, limit


def test_exact_residuals_that_take_more_than_the_tables_say():
    """A solution between is compiled before all is rounded to the fewest bits.

    As XLA:CPU takes a bfloat16 network: exact residuals take three times as much.
    """
    problem = problem_of(12, [*packed(1, 2, 4, 8), EXACT])
    wide = lambda packed, exact: packed + 3 * exact * SIZE
    costs = []
    for ratio in (0.7, 0.6, 0.5, 0.4, 0.3):
        search, limit = searched(problem, ratio, 3 * 12 * SIZE, wide)
        best = search.best(limit)
        assert best.cost <= 12 * EIGHT_BITS  # all at 8 bits fit in each of these
        costs.append(best.cost)
    assert costs == sorted(costs)


def test_workspace_that_grows_between_two_compiled_steps():
    """The larger one's workspace says too much of those between."""
    problem = problem_of(48, [*packed(8), EXACT])
    high = lambda packed, exact: packed + exact * SIZE * (1.5 if exact > 24 else 1)
    search, limit = searched(problem, 0.6, 72 * SIZE, high)
    best = search.best(limit)
    assert best.memory.temp_bytes > 0.8 * limit


def test_a_full_step_with_a_much_cheaper_one_near():
    """It has room left for what would save much more than a compilation is worth."""
    dear = Option(Quantize(1), SIZE // 16, 0.1, 0.0)
    problem = problem_of(48, [dear, *packed(8)])
    by_the_tables = lambda packed, exact: packed + exact * SIZE
    search, limit = searched(problem, 0.375, 48 * SIZE, by_the_tables)
    fewest = min(trial.cost for trial in search.trials[1:])
    assert search.best(limit).cost == fewest
    # The first: 5 % of the budget for gaps that are not there.
    assert fewest < search.trials[1].cost - 0.05


def test_no_prediction_of_a_frontier_takes_more_at_a_higher_cost_than_another():
    """Packing takes workspace, which the step with all packed predicts for others."""
    problem = problem_of(48, [*packed(1, 2, 4, 8), EXACT])
    high = lambda packed, exact: packed + exact * SIZE + (0 if exact > 24 else 9 * SIZE)
    search, _ = searched(problem, 0.8, 48 * SIZE, high)
    search.attempt(solve(problem, math.inf, is_smallest=True))
    points = frontier_of(search)
    predicted = [point for point in points if not point.is_compiled]
    assert len(predicted) > 3
    for point in predicted:
        smaller = [p for p in points if p.bytes <= point.bytes and p is not point]
        assert all(p.time + p.noise > point.time + point.noise for p in smaller)
