"""The search behind a plan, with a compiler that differs from the tables."""

import math

from jaxact import Exact, Policy, Quantize
from jaxact._budget.problem import Call, Option, Problem, Row, Variant
from jaxact._budget.search import MOST_COMPILES, Search
from jaxact._memory import Memory
from jaxact._using import current_override

SIZE = 64 << 20
ROWS = [f"layer{i}/{name}" for i in range(4) for name in "xyz"]


def row(key):
    packed = [
        Option(Quantize(bits), SIZE * bits // 16, 0.01, 4.0**-bits / 100)
        for bits in (1, 2, 4, 8)
    ]
    exact = Option(Exact(), SIZE, 0.0, 0.0)
    return Row(key, "", SIZE // 2, SIZE, (*packed, exact))


def wide_floats():
    """As XLA:CPU takes a bfloat16 network: exact residuals take three times as much."""
    sizes = {}
    for rule in current_override().policy.rules:
        bits = rule.action.bits
        sizes[rule.key] = 3 * SIZE if bits is None else SIZE * bits // 16
    taken = round(sum(sizes.get(key, 3 * SIZE) for key in ROWS))
    return Memory(taken, 0, 0, 0, "cpu")


def test_exact_residuals_that_take_more_than_the_tables_say():
    """A solution between is compiled before all is rounded to the fewest bits."""
    calls = tuple(
        Call(str(i), (Variant("stored", tuple(map(row, ROWS[i : i + 3])), 0),))
        for i in range(0, len(ROWS), 3)
    )
    problem = Problem(calls, 0, len(ROWS) * SIZE, 0, 1.0, False, 1e12, 0)
    costs = []
    for ratio in (0.7, 0.6, 0.5, 0.4, 0.3):
        search = Search(problem, Policy(), wide_floats, "temp", math.inf, math.inf)
        limit = int(ratio * 3 * len(ROWS) * SIZE)
        search.uncompressed()
        search.run(limit)
        assert len(search.trials) <= 1 + MOST_COMPILES
        best = search.best(limit)
        # All at 8 bits fit in each of these.
        assert best.cost <= len(ROWS) * (0.01 + 4.0**-8 / 100)
        costs.append(best.cost)
    assert costs == sorted(costs)
