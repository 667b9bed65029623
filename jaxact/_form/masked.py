"""Values of which only the elements that a mask keeps are needed.

A decay exp(g_i - g_j) is e^45 above the diagonal, where a mask sets it to zero: in one
group with such elements all others are lost (8 gradients at 8 bits, in a gated linear
attention). Masked, it is what the forward pass goes on with, and what the derivative
needs: the cotangent is masked too.
"""

import dataclasses
from collections.abc import Mapping, Sequence, Set

from jaxact._form.masks import Masks, Zeros
from jaxact._jaxpr.primitives import EXPONENTIALS
from jaxact._jaxpr.read import is_literal, variables_in
from jaxact._jaxpr.rewrite import (
    in_order,
    new_equation,
    new_variable,
    rename,
    with_outputs,
)
from jaxact._jaxpr.types import Atom, Eqn, Renaming, Var
from jaxact._plan.forward import Forward

# Zero where an operand is, but for a divisor; or where the one that they select is.
_KEEP_ZEROS = frozenset("mul neg convert_element_type div select_n".split())


def with_masked(forward: Forward) -> Forward:
    """A forward program with masked exponentials, where backward needs no others.

    Wherever one is multiplied with a cotangent that the mask sets to zero as well.
    Values made from it, and masked before their use, are made from the masked one: in
    `x * softmax(x, where=mask)` JAX divides, then masks, and both are residuals.
    """
    eqns, masked = list(forward.jaxpr.eqns), dict[Var, tuple[Zeros, Eqn]]()
    masks, maskings = _maskings(eqns)
    exponentials = _exponentials(eqns).intersection(variables_in(forward.residuals))
    if not maskings or not exponentials:
        return forward
    zeros = _zeros_of_cotangents(forward, masks)
    for v in exponentials.intersection(zeros):
        masking = _masking(v, zeros[v], maskings)
        if masking is not None:
            masked[v] = masking
    if not masked:
        return forward
    outputs = forward.jaxpr.outvars[: forward.num_outputs]
    eqns = _reading_masked(eqns, masked, _Unread(eqns, outputs, masks, zeros))
    names: Renaming = {v: eqn.outvars[0] for v, (_, eqn) in masked.items()}
    residuals = [rename(v, names) for v in forward.residuals]
    jaxpr = with_outputs(forward.jaxpr, eqns, [*outputs, *residuals])
    return dataclasses.replace(forward, jaxpr=jaxpr)


def _masking(
    v: Var, zeros: Set[Zeros], maskings: Mapping[Zeros, Sequence[tuple[Var, Eqn]]]
) -> tuple[Zeros, Eqn] | None:
    """Where to mask `v`, and the equation: its own, or one like another's.

    Args:
      zeros: where its cotangents are zero.
      maskings: operands that are masked, and by which equations.
    """
    alike = [
        (where, x, eqn)
        for where, found in maskings.items()
        for x, eqn in found
        if where in zeros
        and (x.aval.shape, x.aval.dtype) == (v.aval.shape, v.aval.dtype)
    ]
    if not alike:
        return None
    where, x, eqn = next((found for found in alike if found[1] is v), alike[0])
    if x is not v:
        inputs = [v if u is x else u for u in eqn.invars]
        out = new_variable(v.aval)
        eqn = new_equation(eqn, eqn.primitive, inputs, [out], eqn.params)
    return where, eqn


class _Unread:
    """Which elements of a program's values reach no output and no gradient."""

    def __init__(
        self,
        eqns: Sequence[Eqn],
        outputs: Sequence[Atom],
        masks: Masks,
        of_residuals: Mapping[Var, set[Zeros]],
    ):
        self._masks = masks
        self._of = dict(of_residuals)
        self._of.update((v, set()) for v in variables_in(outputs))
        for eqn in reversed(eqns):
            if not eqn.effects and self._of.keys().isdisjoint(eqn.outvars):
                continue  # nothing reads it
            for v in set(variables_in(eqn.invars)):
                zeros = self.by(eqn, v)
                self._of[v] = self._of.get(v, zeros) & zeros

    def by(self, eqn: Eqn, v: Var) -> set[Zeros]:
        """Where `eqn` reads elements of `v` for nothing, by mask.

        Only where zeros in their place give zeros: an inverse, or a logarithm, would be
        infinite there, and nothing is to be stored in a group with such a number.
        """
        name = eqn.primitive.name
        is_divisor = name == "div" and eqn.invars[1] is v
        if name not in _KEEP_ZEROS or is_divisor:
            return set()
        (out,) = eqn.outvars
        zeros = set(self._of.get(out, ()))
        if name == "select_n" and len(eqn.invars) == 3:
            mask, *sides = eqn.invars
            if not is_literal(mask) and [u is v for u in sides].count(True) == 1:
                zeros.add(self._masks.where(mask, sides[0] is v))
        return zeros


def _reading_masked(
    eqns: Sequence[Eqn], masked: Mapping[Var, tuple[Zeros, Eqn]], unread: _Unread
) -> list[Eqn]:
    """`eqns` that read masked values where it makes no difference.

    Args:
      masked: for an exponential, where it is masked, and the equation that does it.
    """
    maskings = {id(eqn) for _, eqn in masked.values()}

    def read(eqn: Eqn, v: Atom) -> Atom:
        if is_literal(v) or v not in masked:
            return v
        where, masking = masked[v]
        return masking.outvars[0] if where in unread.by(eqn, v) else v

    program: list[tuple[int, Eqn]] = []
    for i, eqn in enumerate(eqns):
        if id(eqn) not in maskings:
            inputs = [read(eqn, v) for v in eqn.invars]
            program.append((i, eqn.replace(invars=inputs)))
        # Early, as one that read the exponential itself may come before its mask. No
        # mask waits for such a one: its elements where the mask is zero are not read.
        program += [(i, masked[v][1]) for v in eqn.outvars if v in masked]
    return in_order(program)


def _exponentials(eqns: Sequence[Eqn]) -> set[Var]:
    return {v for e in eqns if e.primitive.name in EXPONENTIALS for v in e.outvars}


def _maskings(
    eqns: Sequence[Eqn],
) -> tuple[Masks, dict[Zeros, list[tuple[Var, Eqn]]]]:
    """Masks; and operands that are set to zero, with the equation, by where."""
    masks, found = Masks(with_gates=True), dict[Zeros, list[tuple[Var, Eqn]]]()
    for eqn in eqns:
        masks.note(eqn)
        masking = masks.masking(eqn)
        if masking is not None:
            x, where = masking
            found.setdefault(where, []).append((x, eqn))
    return masks, found


def _zeros_of_cotangents(forward: Forward, known: Masks) -> dict[Var, set[Zeros]]:
    """For residuals that are only multiplied: where all their cotangents are zero.

    Args:
      known: masks in the forward program.
    """
    made: dict[Var, set[Zeros]] = {}
    for eqn in forward.jaxpr.eqns:
        made |= dict.fromkeys(eqn.outvars, _zeros_of_result(eqn, known, made))
    masks = Masks(with_gates=True)
    residuals = {own: v for v, own in forward.residual_pairs}
    zeros = {
        own: made.get(v, set()) | {known.where(v, False)}
        for own, v in residuals.items()
    }
    met: dict[Var, list[set[Zeros]]] = {}
    for eqn in forward.backward.eqns:
        masks.note(eqn)
        own = {
            known.where(residuals.get(mask, mask), value)
            for mask, value in _zeros_of_result(eqn, masks, zeros)
        }
        zeros |= dict.fromkeys(eqn.outvars, own)
        inputs = variables_in(eqn.invars)
        for v in residuals.keys() & set(inputs):
            others = [zeros.get(u, set()) for u in inputs if u is not v]
            is_factor = eqn.primitive.name == "mul" and len(others) == 1
            met.setdefault(residuals[v], []).append(others[0] if is_factor else set())
    gradients = variables_in(forward.backward.gradients)
    met |= {residuals[v]: [set()] for v in gradients if v in residuals}
    return {v: set.intersection(*each) for v, each in met.items()}


def _zeros_of_result(
    eqn: Eqn, masks: Masks, zeros: Mapping[Var, set[Zeros]]
) -> set[Zeros]:
    """Where the result of an equation is zero, from where its operands are.

    A product is zero where a factor is; a selection, by its mask; a sum, where both
    terms are: the derivative of `jax.nn.softmax(x, where=mask)` adds two.
    """
    operands = [set() if is_literal(v) else zeros.get(v, set()) for v in eqn.invars]
    masking = masks.masking(eqn)
    own = set() if masking is None else {masking[1]} | zeros.get(masking[0], set())
    match eqn.primitive.name:
        case "mul" | "neg" | "convert_element_type":
            return own.union(*operands)
        case "div":
            return operands[0]
        case "add" | "add_any" | "sub":
            return set.intersection(*operands)
    return own
