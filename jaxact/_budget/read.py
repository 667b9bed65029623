"""Read the choice that a plan is from a step: a few traces, and no compilation.

The step is traced under policies that ask for one way of keeping at a time. The table
of each trace has the residuals that are stored then; the decisions about them, and the
operations of each call, come from the calls as they are traced.
"""

import collections
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxact._bits.cost import Sensitivity
from jaxact._budget import candidates
from jaxact._budget.gradients import gradient_bytes
from jaxact._budget.inside import largest_recomputed
from jaxact._budget.problem import Call, Option, Problem, Row, Variant, undominated
from jaxact._codec import Action, Bias, Exact, Recompute
from jaxact._decision import Decision
from jaxact._engine.warnings import CompressionWarning
from jaxact._jaxpr.primitives import ELEMENTWISE
from jaxact._jaxpr.read import num_bytes
from jaxact._jaxpr.types import Jaxpr
from jaxact._memory.compiling import trace
from jaxact._memory.targets import Gpu
from jaxact._policy import Policy, Rule
from jaxact._recompute import Checkpoint, call_key
from jaxact._report.step import step_program, step_residuals
from jaxact._report.table import ResidualRow
from jaxact._residual import Residual
from jaxact._time.flops import flops_of
from jaxact._using import Override, overriding

# A gradient's relative variance over the mean relative squared error of residuals: on a
# transformer of 8 layers at initialisation 0.034 with `Quantize(2)` and 0.0010 with
# `Quantize(4)`, whose errors are 0.55 and 0.022.
ASSUMED_SHARE = 0.05
# What is computed from a rounded value in a way that is not linear is biased; and most
# exponentials of a softmax are near zero, which takes one bit more for the same error.
_WEIGHT = 4.0
# The part of peak operations a second that a training step reaches.
_UTILIZATION = 0.5
# The most bits inside a call that is computed again, where few rows exist at a time;
# None: all exact.
_INSIDE_BITS = (None, 4, 2, 1)
# A call's workspace over its largest residual: an operation of its backward pass reads
# a decoded array and a gradient, and writes another. ResNet-50's third block takes 3.7,
# ViT-B's blocks 2.5.
_WORKSPACE = 4
# The same over the largest product in a checkpoint inside the call: attention's weights
# are computed again, and from them two cotangents as large.
_RECOMPUTED = 3
# Results of elementwise operations that exist besides when these are computed again: an
# activation function's input and its value, in ViT-B's blocks.
_REPLAYED = 2


@dataclasses.dataclass
class _TracedCall:
    """A call, as it was traced.

    Attributes:
      flops: of its forward pass, once.
      inside: bytes of the largest product in a checkpoint of its own, such as
        attention's scores.
    """

    decisions: dict[str, Decision] = dataclasses.field(default_factory=dict)
    flops: int = 0
    inside: int = 0


@dataclasses.dataclass(frozen=True)
class _Trace:
    """A step traced under one policy.

    Attributes:
      rows: of each call, by the call's key; '' has none where a call has that key.
      outside: rows of no call.
      calls: by key.
      has_checkpointed: whether a `jax.checkpoint` around calls packs residuals.
    """

    program: Jaxpr
    rows: Mapping[str, list[ResidualRow]]
    outside: list[ResidualRow]
    calls: Mapping[str, _TracedCall]
    has_checkpointed: bool


@dataclasses.dataclass(frozen=True)
class Step:
    """A step and its arguments."""

    function: Callable[..., Any]
    args: Sequence[object]
    kwargs: dict[str, Any]

    def traced(self, policy: Policy) -> _Trace:
        """The step with its compressed calls under `policy`."""
        calls: dict[str, _TracedCall] = {}

        def record(path: str, program: Jaxpr, decisions: Sequence[Decision]) -> None:
            call = calls.setdefault(call_key(path), _TracedCall())
            for d in decisions:
                call.decisions.setdefault(d.residual.key, d)
            call.flops = max(call.flops, flops_of(program))
            call.inside = max(call.inside, largest_recomputed(program))

        with overriding(Override(policy, record)), warnings.catch_warnings():
            warnings.simplefilter("ignore", CompressionWarning)
            traced = trace(self.function, self.args, self.kwargs)
        program = step_program(traced.jaxpr)
        call_of = {key: name for name, c in calls.items() for key in c.decisions}
        rows = collections.defaultdict(list)
        outside = []
        table = step_residuals(program)
        for row in table.rows:
            if row.is_outside or row.key not in call_of:
                outside.append(row)
            else:
                rows[call_of[row.key]].append(row)
        return _Trace(program, rows, outside, calls, bool(table.checkpointed))


def read_problem(
    step: Step,
    base: Policy,
    actions: Sequence[Action],
    gpu: Gpu,
    measured: Sensitivity | None,
) -> Problem:
    """The residuals of a step, and the options for each.

    Args:
      base: its rules decide where they match, and nothing is chosen there.
      actions: to choose from.

    Raises:
      ValueError: no call in the step is compressed, or no residual is rounded.
    """
    stored = step.traced(base)
    if not any(_is_free(call, row) for call, row in _pairs(stored)):
        raise ValueError(
            f"jaxact.plan: the step has no residual to choose for. {_cause(stored)}; "
            "see jaxact.residuals(step, ..., argnums=())."
        )
    reader = _Reader(stored, actions, gpu, measured)
    again = step.traced(dataclasses.replace(base, recompute=Checkpoint()))
    elementwise = _elementwise_rules(stored)
    replayed = None
    if elementwise:
        rules = (*base.rules, *elementwise)
        replayed = step.traced(dataclasses.replace(base, rules=rules))
    calls = []
    gradients = gradient_bytes(stored.program, list(stored.calls))
    for key in stored.calls:
        variants = [reader.stored(key)]
        if replayed is not None:
            variants += reader.elementwise(key, replayed, elementwise)
        variants += reader.checkpoints(key, again)
        calls.append(Call(key, tuple(variants), gradients.pop(key, 0)))
    exact = sum(row.exact_bytes for _, row in _pairs(stored))
    outside = sum(row.stored_bytes for row in stored.outside)
    return Problem(
        tuple(calls),
        outside,
        exact + outside,
        sum(gradients.values()) + sum(call.gradient_bytes for call in calls),
        reader.seconds,
        measured is not None,
        reader.flops_per_second,
        sum(map(num_bytes, stored.program.invars)),
    )


def _cause(stored: _Trace) -> str:
    """Why nothing can be chosen, and the remedy."""
    if any(not row.is_outside for row in stored.outside):
        return (
            "Its compressed calls are inside jaxact.using, whose policy counts: plan "
            "the step without it"
        )
    if stored.has_checkpointed:
        return (
            "Its compressed calls are in a jax.checkpoint, which computes them again: "
            "plan the step without it, the plan chooses calls to compute again"
        )
    return (
        "A loss alone has none: plan its gradient, jax.grad(loss), or the whole step. "
        "Compress the unit that its network repeats: jaxact.compress(Block), or a "
        "layer's function with activations='x'"
    )


def _pairs(traced: _Trace) -> list[tuple[_TracedCall, ResidualRow]]:
    return [(traced.calls[key], r) for key, rows in traced.rows.items() for r in rows]


def _is_free(call: _TracedCall, row: ResidualRow) -> bool:
    """Whether the policy rounds it, and no rule asked for that."""
    decision = call.decisions[row.key]
    return decision.rule is None and decision.bias is not Bias.EXACT


def _elementwise_rules(stored: _Trace) -> list[Rule]:
    """Rules to compute elementwise results of other residuals again."""
    return [
        Rule(Recompute(), key=row.key)
        for call, row in _pairs(stored)
        if _is_free(call, row) and row.primitive in ELEMENTWISE
    ]


class _Reader:
    """Makes the variants of calls.

    Attributes:
      seconds: of the uncompressed step.
      flops_per_second: that it reaches.
    """

    def __init__(
        self,
        traced: _Trace,
        actions: Sequence[Action],
        gpu: Gpu,
        measured: Sensitivity | None,
    ) -> None:
        self._traced, self._actions, self._gpu = traced, actions, gpu
        self._costs = {row.key: row for row in measured.rows} if measured else {}
        free = [(h, r) for h, r in _pairs(traced) if _is_free(h, r)]
        self._count = sum(_copies(h.decisions[r.key].residual, r) for h, r in free)
        dtypes = collections.Counter(str(r.dtype) for _, r in free)
        peaks = gpu.peak_flops
        peak = peaks.get(dtypes.most_common(1)[0][0], gpu.alu_flops)
        self.flops_per_second = _UTILIZATION * peak
        moved = 4 * sum(r.exact_bytes for _, r in _pairs(traced))
        self.seconds = flops_of(traced.program) / self.flops_per_second  # type: ignore[arg-type]
        self.seconds += moved / gpu.bytes_per_second

    def stored(self, key: str) -> Variant:
        """All residuals stored."""
        rows, fixed = self._rows(key, self._traced)
        return Variant("stored", rows, fixed, self._workspace(key))

    def _workspace(self, key: str) -> int:
        """Bytes of one call's arrays that exist while it is differentiated."""
        rows = self._traced.rows.get(key, [])
        sizes = [self._bytes_of_one(key, row) for row in rows]
        inside = self._traced.calls[key].inside
        return max(_WORKSPACE * max(sizes, default=0), _RECOMPUTED * inside)

    def _bytes_of_one(self, key: str, row: ResidualRow) -> int:
        """Exact bytes: one array among those that a row sums up."""
        decision = self._traced.calls[key].decisions[row.key]
        return row.exact_bytes // _copies(decision.residual, row)

    def elementwise(
        self, key: str, replayed: _Trace, rules: Sequence[Rule]
    ) -> list[Variant]:
        """Results of elementwise operations computed again, if that stores less.

        Args:
          replayed: the step in which they are.
          rules: that say so.
        """
        before = self._traced.rows.get(key, [])
        after = replayed.rows.get(key, [])
        size = lambda rows: sum(row.exact_bytes for row in rows)
        if size(after) >= size(before):
            return []
        kept = {row.key for row in after}
        own = {row.key for row in before} - kept
        rows, fixed = self._rows(key, replayed)
        gone = [row for row in before if row.key in own]
        time = 2 * size(gone) / self._gpu.bytes_per_second / self.seconds
        mine = tuple(rule for rule in rules if rule.key in own)
        largest = max((self._bytes_of_one(key, row) for row in gone), default=0)
        workspace = self._workspace(key) + _REPLAYED * largest
        return [Variant("elementwise", rows, fixed, workspace, time, rules=mine)]

    def checkpoints(self, key: str, again: _Trace) -> list[Variant]:
        """The call computed again from its inputs."""
        rows, fixed = self._rows(key, again, is_recomputed_from=True)
        kept = {row.key for row in again.rows.get(key, [])}
        call = self._traced.calls[key]
        own = [
            (row, d := call.decisions[row.key], self._options(d, row))
            for row in self._traced.rows.get(key, [])
            if row.key not in kept
        ]
        if not own:
            return []
        # A residual of a scan in the call has a copy for each step of that, too.
        copies = min(_copies(d.residual, row) for row, d, _ in own)
        flops = call.flops * copies
        moved = sum(row.exact_bytes for row, *_ in own)
        repeated = flops / self.flops_per_second + moved / self._gpu.bytes_per_second
        variants, least = [], float(self._workspace(key))
        for bits in _INSIDE_BITS:
            workspace, rules = least, []
            time, noise = repeated / self.seconds, 0.0
            for row, d, options in own:
                number = _copies(d.residual, row)
                if not _is_free(call, row) or not options:
                    workspace += row.stored_bytes / number
                    continue
                few = [o for o in options if _has_at_most(o.action, bits)]
                option = min(few or options, key=lambda o: (o.workspace, o.noise))
                workspace += option.bytes / number + option.workspace
                time, noise = time + option.time, noise + option.noise
                rules.append(Rule(option.action, key=row.key))
            variants.append(
                Variant(
                    "checkpoint",
                    rows,
                    fixed,
                    round(workspace),
                    time,
                    noise,
                    tuple(rules),
                )
            )
        return variants

    def _rows(
        self, key: str, traced: _Trace, *, is_recomputed_from: bool = False
    ) -> tuple[tuple[Row, ...], int]:
        """A call's rows to choose for, and the bytes of the others."""
        grouped: dict[str, list[ResidualRow]] = {}
        for row in traced.rows.get(key, []):
            grouped.setdefault(row.key, []).append(row)
        rows, fixed = [], 0
        for name, several in grouped.items():
            call = traced.calls[key]
            if not _is_free(call, several[0]):
                fixed += sum(row.stored_bytes for row in several)
                continue
            whole = dataclasses.replace(
                several[0], exact_bytes=sum(row.exact_bytes for row in several)
            )
            decision = call.decisions[name]
            options = self._options(decision, whole, is_recomputed_from)
            elements = whole.exact_bytes // whole.dtype.itemsize
            rows.append(Row(name, whole.path, elements, whole.exact_bytes, options))
        return tuple(rows), fixed

    def _options(
        self, decision: Decision, row: ResidualRow, is_recomputed_from: bool = False
    ) -> tuple[Option, ...]:
        residual = decision.residual
        copies = _copies(residual, row)
        is_biased = is_recomputed_from or residual.is_recomputed_from
        weight = (_WEIGHT if is_biased else 1.0) * copies / self._count
        weight *= _WEIGHT if residual.primitive == "exp" else 1.0
        options = []
        for action in self._actions:
            if action.declines(residual.shape, residual.dtype) is not None:
                continue
            noise = ASSUMED_SHARE * weight * candidates.relative_error(action, residual)
            cost = self._costs.get(row.key)
            if cost is not None:
                noise = candidates.measured_error(action, residual, cost)
            if not math.isfinite(noise):
                continue
            time = candidates.seconds(action, residual, copies, self._gpu)
            size = candidates.stored_bytes(action, residual, copies)
            whole = candidates.workspace(action, residual)
            options.append(Option(action, size, time / self.seconds, noise, whole))
        exact = Option(Exact(), row.exact_bytes, 0.0, 0.0)
        return undominated([*options, exact])


def _has_at_most(action: Action, bits: int | None) -> bool:
    """Whether an action stores in so many bits or fewer; None: exactly."""
    if bits is None:
        return isinstance(action, Exact)
    return bool(action.bits and action.bits <= bits)


def _copies(residual: Residual, row: ResidualRow) -> int:
    """How many arrays a row is the sum of."""
    one = max(1, math.prod(residual.shape)) * residual.dtype.itemsize
    return max(1, row.exact_bytes // one)
