"""Solve, compile, correct, and solve again until a compiled step is in the budget.

A compiled step takes the bytes that live at its fullest moment, which tables know
nearly, and A, which only the compiler knows: gaps between arrays, other workspace. A
differs by some percent between policies (5 to 13 % of the whole for a small float32
network, 1 to 2 % for GPT-2 medium), so one compiled step tells it for the next.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

from jaxact._budget.frontier import UNCOMPRESSED
from jaxact._budget.plan import Trial, budgeted, planned_rows
from jaxact._budget.problem import Problem, Solution
from jaxact._budget.solve import GAP, solve
from jaxact._engine.warnings import CompressionWarning
from jaxact._measure.progress import progress
from jaxact._memory import Memory
from jaxact._memory.size import Limited
from jaxact._policy import Policy, Rule
from jaxact._recompute import Checkpoint
from jaxact._using import Override, overriding

T = TypeVar("T")
# Live bytes by the tables, and compiled ones.
_Size: TypeAlias = tuple[int, int]

# Compiled steps, without that of a ratio's whole.
MOST_COMPILES = 4
# The part of its live bytes that a first compiled step is expected to take above them:
# ResNet-50 takes 3 % less, ViT-B 17 % less; gaps between arrays are 2 to 10 %.
_GAPS = 0.05
# A step that takes so many times its live bytes is far from the tables: its A says
# little about another's. XLA:CPU computes in float32 where a program has bfloat16.
_FAR = 1.5
# A plan that fills so much of the budget is not improved by less than so much of the
# step's time.
_FULL, _WORTH = 0.9, 0.02
# Parts of the budget left free: at first, and more after each step that is above it.
_MARGIN, _MORE_MARGIN = 0.005, 0.01


@dataclasses.dataclass
class Search:
    """The compiled steps so far.

    Attributes:
      compiled: the memory of the step under a policy.
      of: the memory that a budget limits.
      trials: in order, without repetition.
      known: those of earlier plans for the same step.
    """

    problem: Problem
    base: Policy
    compiled: Callable[[], Memory]
    of: Limited
    slowdown: float
    noise: float
    known: tuple[Trial, ...] = ()
    trials: list[Trial] = dataclasses.field(default_factory=list)

    @property
    def every(self) -> tuple[Trial, ...]:
        """The compiled steps of this search, then those of earlier plans."""
        return (*self.trials, *self.known)

    def run(self, limit: int, most: int = MOST_COMPILES) -> None:
        """Compile policies until one is within `limit`, nearly."""
        margin, step = _MARGIN, 1.0
        for number in progress(range(most), "compiling plans"):
            is_last = number == most - 1 and self.best(limit) is None
            solution = self._safe(limit) if is_last else self._next(limit, margin, step)
            if solution is None and margin > _MARGIN:  # nearer the limit
                solution = self._next(limit, _MARGIN, step)
            if solution is None or self._is_done(limit, solution):
                return
            if self._wants_uncompressed(solution):
                trial = self.uncompressed()
            else:
                trial = self.attempt(solution)
            if trial is None and self.best(limit) is None:
                trial = self.attempt(self._least(recomputes=False))
            if trial is None:
                return
            taken = budgeted(trial.memory, self.of)
            if taken > limit:
                margin, step = margin + _MORE_MARGIN, step + 0.5
            elif trial.cost == 0:
                return

    def best(self, limit: int) -> Trial | None:
        """The cheapest compiled step within the limit."""
        fitting = [
            t
            for t in self.every
            if budgeted(t.memory, self.of) <= limit
            and t.time <= self.slowdown
            and t.noise <= self.noise
        ]
        taken = lambda t: budgeted(t.memory, self.of)
        return min(fitting, key=lambda t: (t.cost, taken(t)), default=None)

    def smallest(self) -> Trial:
        """The compiled step that takes least."""
        return min(self.every, key=lambda t: budgeted(t.memory, self.of))

    def uncompressed(self) -> Trial:
        """The step with nothing compressed."""
        for trial in self.every:
            if trial.policy == UNCOMPRESSED:
                if trial not in self.trials:
                    self.trials.append(trial)
                return trial
        memory = self.memory_of(UNCOMPRESSED)
        self.trials.append(Trial(UNCOMPRESSED, (), None, None, None, memory, 0.0, 0.0))
        return self.trials[-1]

    def attempt(self, solution: Solution) -> Trial | None:
        """Compile a solution; None if it was compiled before."""
        policy = policy_of(solution, self.base)
        if self._tried(policy) is not None:
            return None
        for trial in self.known:
            if trial.policy == policy:
                self.trials.append(trial)
                return trial
        live = solution.live_bytes
        predicted = round(live + self.rest(live))
        memory = self.memory_of(policy)
        rows = planned_rows(solution)
        stored = solution.stored_bytes
        numbers = stored, live, predicted, memory, solution.time, solution.noise
        self.trials.append(Trial(policy, rows, *numbers))
        return self.trials[-1]

    def rest(self, live: float) -> float:
        """A: the bytes besides the live ones, as in the compiled step most alike."""
        known = [
            (t.live_bytes, budgeted(t.memory, self.of) - t.live_bytes)
            for t in self.every
            if t.live_bytes is not None
        ]
        if known:
            return min(known, key=lambda pair: abs(pair[0] - live))[1]
        return _GAPS * live

    def _next(self, limit: int, margin: float, step: float) -> Solution | None:
        """The solution to compile next; None: there is none cheaper than one that fits.

        Args:
          step: how much more than the excess to take off a step above the limit.
        """
        fitting, above = self._nearest(limit)
        best = self.best(limit)
        for room in self._rooms(fitting, above, limit * (1 - margin), step):
            found = self._solve(room)
            if found is not None and (best is None or self._is_better(found, best)):
                return found
        if best is not None:
            return None
        least = self._least()
        found = None
        if above:  # not all that the least one gives up at once
            found = self._solve((least.live_bytes + above[0]) / 2)
        return found or least

    def _nearest(self, limit: int) -> tuple[_Size | None, _Size | None]:
        """The largest compiled step within the limit, the smallest one above it."""
        sizes = [
            (t.live_bytes, budgeted(t.memory, self.of))
            for t in self.every
            if t.live_bytes is not None
        ]
        fitting = max((s for s in sizes if s[1] <= limit), default=None)
        above = [s for s in sizes if s[1] > limit and (not fitting or s > fitting)]
        return fitting, min(above, default=None)

    def _rooms(
        self, fitting: _Size | None, above: _Size | None, wanted: float, step: float
    ) -> Iterator[float]:
        """Bounds on the live bytes, each for where the one before finds nothing new."""
        if fitting and above:
            between = _between(fitting, above, wanted)
            # Between a step that computes calls again and one that stores all, A is
            # no line; so no more than with the A of the larger one, at first.
            if not _is_far(above):
                yield min(between, above[0] + step * (wanted - above[1]))
            yield between
        elif above and _is_far(above):
            yield above[0] * wanted / above[1]
        elif above:
            yield above[0] + step * (wanted - above[1])
        elif fitting:
            yield fitting[0] + wanted - fitting[1]
            whole = self._tried(UNCOMPRESSED)
            free = self._solve(math.inf) if whole else None
            if whole and free:
                exact = free.live_bytes, budgeted(whole.memory, self.of)
                yield _between(fitting, exact, wanted)
        else:
            yield wanted / (1 + _GAPS)

    def _is_done(self, limit: int, solution: Solution) -> bool:
        """Whether the best step fills the budget and costs about as a solution does."""
        best = self.best(limit)
        if best is None or budgeted(best.memory, self.of) < _FULL * limit:
            return False
        return solution.cost > best.cost - _WORTH

    def _is_better(self, solution: Solution, best: Trial) -> bool:
        """Whether a solution is cheaper than a step that fits, and is not compiled."""
        is_new = self._tried(policy_of(solution, self.base)) is None
        return is_new and solution.cost < (1 - GAP) * best.cost

    def _safe(self, limit: int) -> Solution:
        """The solution for a last compilation, when no other was in the budget.

        The smallest in which nothing is computed again, whose workspace is known best;
        with that too, the smallest of all.
        """
        stored = self._least(recomputes=False)
        fits = stored.live_bytes + self.rest(stored.live_bytes) <= limit
        return stored if fits else self._least()

    def _solve(self, room: float) -> Solution | None:
        return solve(self.problem, room, slowdown=self.slowdown, noise=self.noise)

    def _least(self, *, recomputes: bool = True) -> Solution:
        """The solution that stores least on the device, nothing on the host.

        Without a bound on time the host would have everything.

        Args:
          recomputes: whether it may compute calls again, which takes workspace.
        """
        problem = self.problem.on_the_device()
        least = solve(
            problem if recomputes else problem.without_recomputation(),
            math.inf,
            slowdown=self.slowdown,
            noise=self.noise,
            is_smallest=True,
        )
        if least is None:
            raise ValueError(
                f"jaxact.plan(slowdown={self.slowdown}, noise={self.noise}): both must "
                "be at least 0; the uncompressed step has 0 of each."
            )
        return least

    def _wants_uncompressed(self, solution: Solution) -> bool:
        """Whether the solution keeps all exactly, and plainly so was not tried."""
        return solution.cost == 0 and self._tried(UNCOMPRESSED) is None

    def _tried(self, policy: Policy) -> Trial | None:
        """This search's step under a policy, if there is one."""
        return next((t for t in self.trials if t.policy == policy), None)

    def memory_of(self, policy: Policy) -> Memory:
        """The step compiled under a policy."""
        return self.under(policy, self.compiled)

    def under(self, policy: Policy, look: Callable[[], T]) -> T:
        """Call a function that traces the step, under a policy."""
        with overriding(Override(policy)), warnings.catch_warnings():
            warnings.simplefilter("ignore", CompressionWarning)
            return look()


def _between(low: _Size, high: _Size, wanted: float) -> float:
    """The live bytes at which a line through two steps has the wanted ones compiled."""
    part = (wanted - low[1]) / (high[1] - low[1])
    return low[0] + max(0.0, part) * (high[0] - low[0])


def _is_far(size: _Size) -> bool:
    """Whether a step is far from the tables."""
    live, taken = size
    return taken > _FAR * live


def policy_of(solution: Solution, base: Policy) -> Policy:
    """The policy that chooses as the solution does; rules of `base` come first."""
    rules: dict[Rule, None] = {}
    checkpoints = []
    for choice in solution.choices:
        rules |= dict.fromkeys(choice.variant.rules)
        pairs = zip(choice.variant.rows, choice.options, strict=True)
        rules |= {Rule(option.action, key=row.key): None for row, option in pairs}
        if choice.variant.is_checkpoint:
            checkpoints.append(Checkpoint(key=choice.call.key))
    return dataclasses.replace(
        base,
        rules=(*base.rules, *rules),
        recompute=tuple(checkpoints) or None,
    )
