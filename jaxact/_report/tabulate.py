"""Read a table of residuals from a traced program."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from jaxact._codec import Exact, Recompute
from jaxact._decision import Decision, Reason, Remark
from jaxact._jaxpr.flow import fact_of, flow, union
from jaxact._jaxpr.labels import DERIVATIVE
from jaxact._jaxpr.primitives import CHECKPOINTS
from jaxact._jaxpr.read import num_bytes, programs_in, variables_in
from jaxact._jaxpr.types import Atom, Eqn, Jaxpr, Var
from jaxact._plan.mark import copies_of, mark_p
from jaxact._policy import Policy, Rule
from jaxact._report.table import ResidualRow, ResidualTable
from jaxact._residual import Provenance, Residual


@dataclasses.dataclass
class _Marks:
    """The marked residuals in a program: as facts, bit n is about number n.

    Attributes:
      numbers: from the identities of a marking equation and those around it.
      marked: each marking equation, and the arrays that it stands for.
    """

    numbers: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)
    marked: list[tuple[Eqn, int]] = dataclasses.field(default_factory=list)

    def transfer(self, eqn: Eqn, facts: Sequence[int], around: tuple[Eqn, ...]) -> int:
        joined = union(eqn, facts, around)
        if eqn.primitive is not mark_p:
            return joined
        # A body shared by several calls is a different residual in each.
        key = (*map(id, around), id(eqn))
        if key not in self.numbers:
            self.numbers[key] = len(self.marked)
            self.marked.append((eqn, copies_of(eqn, around)))
        return joined | 1 << self.numbers[key]

    def stored_in(self, v: Var, bits: int) -> list[int]:
        """The numbers of the residuals that a kept variable stores, given its fact.

        Several for a step's small arrays that are one (`together.py`), each with as
        many elements. Else it is the first, from which the others are computed.
        """
        numbers = [n for n in range(bits.bit_length()) if bits >> n & 1]
        for eqn, copies in (self.marked[n] for n in numbers):
            sizes = [copies * len(numbers) * x.aval.size for x in eqn.outvars]
            if v.aval.size not in sizes:
                return numbers[:1]
        return numbers


def tabulate(
    jaxpr: Jaxpr, residuals: Sequence[Atom], paths: Sequence[str]
) -> ResidualTable:
    """The table of some of a program's values, given the paths of its inputs."""
    marks = _Marks()
    provenance = Provenance(jaxpr, paths)
    facts = flow(jaxpr, [0] * len(jaxpr.invars), marks.transfer)
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    outside: list[ResidualRow] = []
    stored: dict[int, _Bytes] = {}  # by mark number
    referenced = 0
    for v in dict.fromkeys(variables_in(residuals)):
        kept_bytes, bits = _bytes_of([v]), fact_of(facts, v)
        if v in inputs:
            referenced += kept_bytes.stored
        elif bits:
            numbers = marks.stored_in(v, bits)
            for number in numbers:
                part = kept_bytes.shared(len(numbers))
                stored[number] = stored.get(number, _Bytes()) + part
        else:
            kept = _kept(provenance.of(v))
            outside.append(
                _row(kept, None, kept.residual.shape, kept_bytes.stored, kept_bytes)
            )
    marked = [_marked_row(*marks.marked[n], size) for n, size in sorted(stored.items())]
    return ResidualTable((*marked, *outside), referenced, _unused(marks))


def checkpointed_rows(eqns: Sequence[Eqn]) -> tuple[ResidualRow, ...]:
    """The residuals that a backward program packs again, in forward's order.

    Its checkpoints do, and custom rules that differentiate compressed calls.
    """
    groups = [list(_marks_in(eqns, ()))]
    groups += _checkpoints(eqns)  # the last one's backward pass is first
    return tuple(
        _marked_row(eqn, copies, _bytes_of(eqn.outvars, copies))
        for marks in reversed(groups)
        for eqn, copies in marks
    )


def _checkpoints(
    eqns: Sequence[Eqn], mapped: tuple[Eqn, ...] = ()
) -> Iterator[list[tuple[Eqn, int]]]:
    """For each checkpoint its marks, and the arrays that each stands for.

    Those exist for one step at a time where scans are around it, but on each device.

    Args:
      mapped: the `shard_map`s around the equations.
    """
    for eqn in eqns:
        if eqn.primitive.name in CHECKPOINTS:
            yield list(_marks_inside(eqn, mapped))
        inside = (*mapped, eqn) if eqn.primitive.name == "shard_map" else mapped
        for body in programs_in(eqn):
            yield from _checkpoints(body.eqns, inside)


def _marks_inside(eqn: Eqn, around: tuple[Eqn, ...]) -> Iterator[tuple[Eqn, int]]:
    """The marks in an equation's programs, but for those in checkpoints of these."""
    for body in programs_in(eqn):
        yield from _marks_in(body.eqns, around)


def _marks_in(
    eqns: Sequence[Eqn], around: tuple[Eqn, ...]
) -> Iterator[tuple[Eqn, int]]:
    """The marks among equations and in them, but for those in checkpoints."""
    for eqn in eqns:
        if eqn.primitive is mark_p:
            yield eqn, copies_of(eqn, around)
        elif eqn.primitive.name not in CHECKPOINTS:
            yield from _marks_inside(eqn, (*around, eqn))


class _Bytes(NamedTuple):
    """A residual's stored bytes.

    Attributes:
      host: those in host memory.
    """

    stored: int = 0
    host: int = 0

    def __add__(self, other: "_Bytes") -> "_Bytes":  # pyright: ignore
        return _Bytes(self.stored + other.stored, self.host + other.host)

    def shared(self, count: int) -> "_Bytes":
        """One of so many equal parts."""
        return _Bytes(self.stored // count, self.host // count)


def _bytes_of(variables: Sequence[Var], copies: int = 1) -> _Bytes:
    total = _Bytes()
    for v in variables:
        size = num_bytes(v) * copies
        total += _Bytes(size, size if _is_on_host(v) else 0)
    return total


def _is_on_host(v: Var) -> bool:
    return getattr(v.aval, "memory_space", None) == jax.memory.Space.Host


def _kept(residual: Residual) -> Decision:
    """The decision about a value that no compressed call stored.

    A scan stacks the carry that its body, compressed or not, keeps as it is.
    """
    reason = Reason.CARRIED if residual.is_carry else Reason.OUTSIDE
    return Decision(residual, Exact(), reason)


def _marked_row(eqn: Eqn, copies: int, kept: _Bytes) -> ResidualRow:
    decision, one = eqn.params["decision"], eqn.params["shape"]
    shape = (copies, *one) if copies > 1 else one
    exact_bytes = math.prod(shape) * decision.residual.dtype.itemsize
    return _row(decision, eqn.params["policy"], shape, exact_bytes, kept)


def _row(
    decision: Decision,
    policy: Policy | None,
    shape: tuple[int, ...],
    exact_bytes: int,
    kept: _Bytes,
) -> ResidualRow:
    residual = decision.residual
    return ResidualRow(
        key=residual.key,
        shape=shape,
        dtype=residual.dtype,
        primitive=residual.primitive,
        name=residual.name,
        path=residual.path,
        source=residual.source,
        action=decision.action,
        bias=decision.bias,
        exact_bytes=exact_bytes,
        stored_bytes=kept.stored,
        why=_why(decision, policy),
        host_bytes=kept.host,
        is_outside=decision.reason is Reason.OUTSIDE,
    )


def _why(decision: Decision, policy: Policy | None) -> str:
    """The reason for an action: of a rounded residual, its part in the gradient."""
    if decision.rule is not None and policy is not None:
        reason = _condition(policy.rules[decision.rule])
    elif decision.reason in (Reason.BITS, Reason.DEFAULT):
        reason = _part(decision.residual)
    else:
        return decision.why
    remarks = [r.value for r in decision.remarks if r is not Remark.NORMALIZED]
    declined = [decision.declined] if decision.declined else []
    return "; ".join([reason, *declined, *remarks])


def _condition(rule: Rule) -> str:
    """A rule's conditions: 'rule name=mlp_*'."""
    values = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)}
    conditions = [
        f"{name}={getattr(value, '__name__', value)}"
        for name, value in values.items()
        if name != "action" and value is not None
    ]
    return f"rule {', '.join(conditions)}" if conditions else "a rule for all"


def _part(residual: Residual) -> str:
    """The part that a residual has in the gradient: a factor of it, if nothing else."""
    if DERIVATIVE in (residual.path.rpartition("/")[2], residual.label.split(".")[-1]):
        part = "local derivative"
    elif residual.primitive == "exp":
        part = "exponentials"
    elif residual.origin == "argument":
        part = "input"
    elif residual.is_normalized:
        part = "normalized"
    else:
        part = "factor"
    also = [name for name in residual.aliases if name != residual.name]
    return f"{part}; also for {', '.join(also)}" if also else part


def _unused(marks: _Marks) -> tuple[Rule, ...]:
    """The rules that decided about nothing.

    Without those that recompute: a call that they leave nothing to store has no mark.
    """
    used: dict[tuple[Rule, ...], set[int]] = {}
    for eqn, _ in marks.marked:
        policy, rules = eqn.params["policy"], eqn.params["used_rules"]
        used.setdefault(policy.rules, set()).update(rules)
    return tuple(
        rule
        for several, indices in used.items()
        for index, rule in enumerate(several)
        if index not in indices and not isinstance(rule.action, Recompute)
    )
