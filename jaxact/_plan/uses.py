"""How a backward program uses the residuals that are rounded.

A backward program is linear in its cotangents. Where it only multiplies them with
residuals, a residual that is rounded without bias leaves the gradient unbiased. Where
it computes something nonlinear from one (a checkpoint or a custom rule that computes
values again), the gradient is biased; where it divides by one or solves with one, the
noise has no bound. Both are read off the program, however deep in it they happen.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxact._decision import Reason
from jaxact._jaxpr.compat import custom_vjp_body, open_jaxpr, scan_counts
from jaxact._jaxpr.flow import repeated
from jaxact._jaxpr.labels import LARGEST, labels_in, module_path
from jaxact._jaxpr.primitives import (
    BARRIERS,
    BILINEAR,
    ELEMENTWISE,
    EXTREMES,
    FACTORIZATIONS,
    LINEAR_IN_ALL,
    PIECEWISE,
    POLES,
    RUNNING_EXTREMES,
    SEGMENT_EXTREMES,
    SOLVERS,
    SPARSE_MOVES,
)
from jaxact._jaxpr.read import (
    call_body,
    is_float,
    is_literal,
    loses_precision,
    variables_in,
)
from jaxact._jaxpr.types import Atom, ClosedJaxpr, Eqn, Var
from jaxact._plan.forward import Forward
from jaxact._plan.shifts import shifts_in

# Some elements of the operand times updates. Where two updates may meet at an element
# it is a product of more, which is not linear in the updates.
_SCALED = frozenset(["scatter-mul", "scatter_mul"])
# A power of two or more of one value.
_SQUARES = frozenset(["square", "one_minus_square"])
# Slopes with poles, or that grow without bound towards the end of their domain.
_UNBOUNDED = frozenset(POLES) | frozenset("pow asin acos atanh erf_inv tan".split())
# A rounded value may change places with another, and so may their whole gradients: the
# experts that a checkpoint computes again would not be those of the forward pass.
# Nor would the largest elements in a pool's windows.
_ORDERS = frozenset(
    "sort top_k approx_top_k argmax argmin select_and_scatter_add "
    "select_and_gather_add".split()
)
# Nonlinear in cotangents too, where a custom rule clips or ranks gradients.
_NONLINEAR_IN_ALL = (
    ELEMENTWISE
    | EXTREMES
    | RUNNING_EXTREMES
    | SEGMENT_EXTREMES
    | frozenset(
        "sort top_k reduce_prod cumprod reduce_window_max reduce_window_min".split()
    )
)
# Between an extreme and its operand: where that is, as its derivative asks.
_EQUALITIES = frozenset(["eq", "ne"])
# Tell infinity or NaN from a number, which rounding does not change.
_TESTS = frozenset(["is_finite"])


class Value(NamedTuple):
    """The roundings in a value, as sets of bits.

    Attributes:
      linear: of rounded values that it is affine in, and of those that a cotangent was
        multiplied with.
      bent: of those that something nonlinear was computed from on the way.
      has_cotangent: whether it depends on a cotangent.
      extreme: of those that it is an extreme of, along an axis.
      kinked: of those that something piecewise linear was computed from, and no more.
    """

    linear: int = 0
    bent: int = 0
    has_cotangent: bool = False
    extreme: int = 0
    kinked: int = 0

    @property
    def bits(self) -> int:
        return self.linear | self.bent | self.kinked

    def __or__(self, other: "Value") -> "Value":  # pyright: ignore
        return Value(
            self.linear | other.linear,
            self.bent | other.bent,
            self.has_cotangent or other.has_cotangent,
            self.extreme | other.extreme,
            self.kinked | other.kinked,
        )

    def after_nonlinear(self) -> "Value":
        return Value(0, self.bits, self.has_cotangent)

    def after_kink(self) -> "Value":
        kinked = self.linear | self.kinked
        return Value(0, self.bent, self.has_cotangent, kinked=kinked)


_NONE = Value()
_Values = dict[Var, Value]


@dataclasses.dataclass
class Uses:
    """Roundings by how a program uses them; each attribute is a set of bits.

    Attributes:
      repeated: a path multiplies with the rounded value more than once, as the
        Jacobians of a softmax and of a norm do: the mean gradient is exact but for
        terms of second order in the rounding.
      nonlinear: something nonlinear is computed from it.
      divided: something is divided by it, or its logarithm, root or inverse is taken:
        the noise has no bound.
      solved: it is a matrix that is factorized or solved with: the noise has no bound
        here either.
      ordered: its elements, or those of something computed from it, are put in order.
      bent_again: a loop computes a state from it that is nonlinear in itself a step
        before, which may magnify an error with each step.
      undone: a loop subtracts from it, or subtracts it, to have earlier sums from the
        last one: these are smaller, and their error is not.
      returned: a custom rule returns it as a gradient, as those for products in 8-bit
        floats return the history of largest elements.
    """

    repeated: int = 0
    nonlinear: int = 0
    divided: int = 0
    solved: int = 0
    ordered: int = 0
    bent_again: int = 0
    undone: int = 0
    returned: int = 0

    @property
    def unbounded(self) -> dict[Reason, int]:
        """Why a rounded value may leave an error of any size, where it is computed
        with again. (Divisors are another matter: a checkpoint's norms divide too.) Or
        none may be left, as in a gradient that is not one.
        """
        return {
            Reason.GRADIENT: self.returned,
            Reason.SOLVED_WITH: self.solved,
            Reason.ORDERED: self.ordered,
            Reason.BENT_AGAIN: self.bent_again,
            Reason.UNDONE: self.undone,
        }


def find_uses(forward: Forward, roundings: Mapping[Var, int]) -> Uses:
    """How a backward program uses the residuals it reads.

    Args:
      roundings: for each residual, a set of bits: the roundings in it.
    """
    uses, backward = Uses(), forward.backward
    values = {v: Value(has_cotangent=True) for v in variables_in(backward.cotangents)}
    values |= {v: Value(bits) for v, bits in roundings.items()}
    _walk(forward.used_backward, backward.gradients, values, uses)
    gradients = [_value_of(v, values) for v in backward.gradients]
    uses.returned = _union([g for g in gradients if not g.has_cotangent]).bits
    return uses


def _walk(
    eqns: Sequence[Eqn], ends: Sequence[Atom], values: _Values, uses: Uses
) -> None:
    """Follow the roundings through a program to its ends, and note the uses."""
    shifts = shifts_in(eqns, ends)
    for eqn in eqns:
        operands = [_value_of(v, values) for v in eqn.invars]
        if any(operand != _NONE for operand in operands):
            results = _results(eqn, operands, uses)
            if not shifts.isdisjoint(eqn.outvars):
                results = [result._replace(extreme=0) for result in results]
            values.update(zip(eqn.outvars, results, strict=True))


def _value_of(v: Atom, values: _Values) -> Value:
    return _NONE if is_literal(v) else values.get(v, _NONE)


def _results(eqn: Eqn, operands: Sequence[Value], uses: Uses) -> list[Value]:
    """The roundings in the results of one equation."""
    name = eqn.primitive.name
    if name in BARRIERS:
        return list(operands)
    if name == "scan":
        return _scan(eqn, operands, uses)
    if name == "while":
        return _while(eqn, operands, uses)
    if name == "cond":
        uses.nonlinear |= operands[0].bits
        branches = [_inside(b, operands[1:], uses) for b in eqn.params["branches"]]
        return [_union(results) for results in zip(*branches, strict=True)]
    body = _body(eqn)
    if body is not None:
        return _inside(body, operands, uses)
    result = _elementary(eqn, operands, uses)
    return [_settled(v, name, result, uses) for v in eqn.outvars]


def _settled(v: Var, name: str, result: Value, uses: Uses) -> Value:
    """A result: an integer or a mask made from a rounded value carries none further."""
    if is_float(v):
        return result
    # The integers of a sparse matrix are places, which no rounding moves.
    if name not in _TESTS and name not in SPARSE_MOVES:
        uses.nonlinear |= result.bits
    return _NONE


def _elementary(eqn: Eqn, operands: Sequence[Value], uses: Uses) -> Value:
    """The roundings in the results of an equation without a program inside."""
    name, result = eqn.primitive.name, _union(operands)
    if (name in LINEAR_IN_ALL and not loses_precision(eqn)) or name in _TESTS:
        return result
    if name in BILINEAR or (name in _SCALED and eqn.params["unique_indices"]):
        overlap = repeated(operand.bits for operand in operands)
        uses.repeated |= overlap
        linear, kinked = result.linear & ~overlap, result.kinked & ~overlap
        return Value(linear, result.bent | overlap, result.has_cotangent, kinked=kinked)
    if name == "div":
        uses.divided |= operands[1].linear
        uses.nonlinear |= operands[1].bits
        return operands[0] | operands[1].after_nonlinear()
    if name in _SQUARES or (name == "integer_pow" and eqn.params["y"] > 1):
        uses.repeated |= result.bits
        return result.after_nonlinear()
    if name in _UNBOUNDED or name == "integer_pow":
        uses.divided |= result.linear
        uses.nonlinear |= result.bits
        return result.after_nonlinear()
    if name == "triangular_solve":
        uses.solved |= operands[0].bits
        uses.nonlinear |= operands[0].bits
        return operands[1] | operands[0].after_nonlinear()
    # Not understood, such as a kernel: linear in cotangents alone, by contract.
    everything = name in _NONLINEAR_IN_ALL
    residuals = _union([o for o in operands if not o.has_cotangent])
    known = _union(operands) if everything else residuals
    if name in SOLVERS or name in FACTORIZATIONS:
        uses.solved |= known.bits
    if name in _ORDERS:
        if _finds_apart(eqn):
            return _NONE
        uses.ordered |= residuals.bits
    if name in _EQUALITIES:
        first, second = operands
        uses.ordered |= first.extreme & second.bits | second.extreme & first.bits
    uses.nonlinear |= known.bits
    others = _union([o for o in operands if not everything and o.has_cotangent])
    if name in EXTREMES or name in SEGMENT_EXTREMES:
        return (others | known.after_kink())._replace(extreme=known.bits)
    is_kink = name in PIECEWISE or name in RUNNING_EXTREMES
    return others | (known.after_kink() if is_kink else known.after_nonlinear())


def _finds_apart(eqn: Eqn) -> bool:
    """Whether a call inside added it, to store the elements apart that it finds.

    Any are right there: a checkpoint around a cross-entropy may find others again.
    """
    path = module_path(eqn.source_info.name_stack)
    return any(label.kind == LARGEST for label in labels_in(path))


def _body(eqn: Eqn) -> ClosedJaxpr | None:
    """The program that an equation evaluates once on its operands, if it does."""
    body = call_body(eqn)
    if body is None:
        body = custom_vjp_body(eqn)
    if body is None and eqn.primitive.name == "shard_map":
        body = eqn.params["jaxpr"]
    return body


def _inside(body: ClosedJaxpr, operands: Sequence[Value], uses: Uses) -> list[Value]:
    jaxpr, _ = open_jaxpr(body)
    values = dict(zip(jaxpr.invars, operands, strict=True))
    _walk(jaxpr.eqns, jaxpr.outvars, values, uses)
    return [_value_of(v, values) for v in jaxpr.outvars]


def _scan(eqn: Eqn, operands: Sequence[Value], uses: Uses) -> list[Value]:
    """A scan, at the fixed point of its carry.

    What one step leaves in the carry meets the next step's residuals, which have the
    same bits: such products count as repeated, as they are for a constant of the loop.
    """
    num_consts, num_carry = scan_counts(eqn)
    inputs, carry = list(operands), slice(num_consts, num_consts + num_carry)
    while True:  # ends: bits are only added, and there are finitely many
        results = _inside(eqn.params["jaxpr"], inputs, uses)
        joined = [a | b for a, b in zip(inputs[carry], results, strict=False)]
        if joined == inputs[carry]:
            break
        inputs[carry] = joined
    _note_bent_again(eqn.params["jaxpr"], carry, inputs, uses)
    _note_undone(eqn.params["jaxpr"], carry, inputs, uses)
    return results


def _while(eqn: Eqn, operands: Sequence[Value], uses: Uses) -> list[Value]:
    """A loop whose condition and body have constants of their own."""
    num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test_consts = list(operands[:num_test])
    body_consts = list(operands[num_test : num_test + num_body])
    carry = list(operands[num_test + num_body :])
    while True:  # ends, as above
        results = _inside(eqn.params["body_jaxpr"], [*body_consts, *carry], uses)
        joined = [a | b for a, b in zip(carry, results, strict=True)]
        if joined == carry:
            break
        carry = joined
    inputs = [*body_consts, *carry]
    states = slice(num_body, len(inputs))
    _note_bent_again(eqn.params["body_jaxpr"], states, inputs, uses)
    _note_undone(eqn.params["body_jaxpr"], states, inputs, uses)
    _inside(eqn.params["cond_jaxpr"], [*test_consts, *carry], uses)
    return carry


def _note_undone(
    body: ClosedJaxpr, carry: slice, inputs: Sequence[Value], uses: Uses
) -> None:
    """Note the roundings in a state that steps are subtracted from, and in these.

    A causal Performer (Choromanski et al. 2021, arXiv:2009.14794) has its first tokens'
    sums from those for all of them: with errors of 2 gradients at 8 bits.
    """
    jaxpr, _ = open_jaxpr(body)
    lessened = {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "sub"
    }
    states = zip(jaxpr.invars[carry], jaxpr.outvars, inputs[carry], strict=False)
    for v, result, state in states:
        is_undone = not is_literal(result) and lessened.get(result) is v
        if is_undone and not state.has_cotangent:
            uses.undone |= state.bits


def _note_bent_again(
    body: ClosedJaxpr, carry: slice, inputs: Sequence[Value], uses: Uses
) -> None:
    """Note the roundings in a loop's state, where its steps may magnify an error.

    There the state is nonlinear in its own earlier values. A linear one magnifies an
    error no more than itself; and the maximum that attention in chunks carries scales
    its other state, but does not depend on that.
    """
    states = inputs[carry]
    if not any(state.bits and not state.has_cotangent for state in states):
        return
    operands: list[Value] = [_NONE] * len(inputs)
    operands[carry] = [Value(1 << i) for i in range(len(states))]
    steps = _inside(body, operands, Uses())[: len(states)]
    made_from = [step.bits | 1 << i for i, step in enumerate(steps)]
    for i in range(len(states)):  # Warshall's transitive closure
        made_from = [b | made_from[i] if b >> i & 1 else b for b in made_from]
    for i, state in enumerate(states):
        bent = sum(1 << j for j, step in enumerate(steps) if step.bent >> i & 1)
        if bent & made_from[i] and not state.has_cotangent:
            uses.bent_again |= state.bits


def _union(values: Sequence[Value]) -> Value:
    return functools.reduce(operator.or_, values, _NONE)
