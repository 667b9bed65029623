"""The integer program behind a plan, beside trying every choice."""

import itertools
import math

import numpy as np
import pytest

import jaxact
from jaxact import Quantize
from jaxact._budget.problem import Call, Option, Problem, Row, Variant
from jaxact._budget.solve import solve


def random_problem(rng):
    """Small enough to try every choice; sizes are those of arrays in practice."""

    def row(name):
        size = int(rng.integers(100, 1000)) << 20
        options = [
            Option(
                Quantize(b),
                size * b // 32,
                float(rng.uniform(0, 0.1)),
                0.5 / 4**b,
                int(rng.integers(0, 50)) << 20,
            )
            for b in (1, 4)
        ]
        return Row(
            name,
            "",
            size // 4,
            size,
            (*options, Option(jaxact.Exact(), size, 0.0, 0.0)),
        )

    def call(number):
        rows = tuple(row(f"{number}/{i}") for i in range(2))
        again = Variant(
            "checkpoint",
            rows[:1],
            5 << 20,
            int(rng.integers(10, 300)) << 20,
            float(rng.uniform(0, 0.2)),
            0.01,
        )
        workspace = int(rng.integers(10, 500)) << 20
        kept = Variant("stored", rows, 7 << 20, workspace)
        return Call(str(number), (kept, again), int(rng.integers(1, 100)) << 20)

    calls = tuple(map(call, range(2)))
    gradients = sum(call.gradient_bytes for call in calls) + (3 << 20)
    return Problem(calls, 11 << 20, 4000 << 20, gradients, 1.0, False, 1e12, 0)


def every_choice(problem):
    """(bytes, time, noise) of all choices, by enumeration."""
    ways = [
        [
            (variant, options)
            for variant in call.variants
            for options in itertools.product(*(row.options for row in variant.rows))
        ]
        for call in problem.calls
    ]
    for choice in itertools.product(*ways):
        parts = [o for _, options in choice for o in options]
        variants = [v for v, _ in choice]
        size = lambda v, parts: v.fixed_bytes + sum(o.bytes for o in parts)
        room = lambda v, parts: v.workspace + sum(o.workspace for o in parts)
        stored, used = ([f(*pair) for pair in choice] for f in (size, room))
        first, second = problem.calls
        unowned = problem.gradient_bytes - first.gradient_bytes - second.gradient_bytes
        yield (
            problem.outside_bytes
            + unowned
            + second.gradient_bytes
            + max(
                first.gradient_bytes + stored[0] + used[0],
                stored[0] + stored[1] + used[1],
            ),
            sum(o.time for o in parts) + sum(v.time for v in variants),
            sum(o.noise for o in parts) + sum(v.noise for v in variants),
        )


@pytest.mark.parametrize("seed", range(4))
def test_the_solver_finds_the_cheapest(seed):
    problem = random_problem(np.random.default_rng(seed))
    every = list(every_choice(problem))
    least = min(size for size, _, _ in every)
    assert solve(problem, math.inf, is_smallest=True).live_bytes == least
    assert solve(problem, least - 2**10) is None
    for room in np.linspace(least + 1, 4000 << 20, 6):
        found = solve(problem, room)
        best = min(t + n for size, t, n in every if size <= room)
        # Up to the solver's tolerance, a millionth of a MiB.
        assert found.live_bytes <= room + 10
        # The program stops within a thousandth of the best.
        assert best - 1e-6 <= found.cost <= 1.001 * best + 1e-6
        quiet = [t + n for size, t, n in every if size <= room and n <= 0.02]
        bounded = solve(problem, room, noise=0.02)
        assert (bounded is None) == (not quiet)
        if bounded is not None:
            assert bounded.noise <= 0.02 + 1e-6
            assert bounded.cost <= 1.001 * min(quiet) + 1e-6
