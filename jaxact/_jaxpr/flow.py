"""Carry facts forward through a traced program, into calls, scans and branches.

A fact about a value is a bit in an integer; values join by OR. One walk serves several
questions: which arguments does a value depend on, is it an activation or made from
parameters alone, which marked residual is it made from, is it a custom rule's own.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from jaxact._jaxpr.compat import open_jaxpr, scan_counts
from jaxact._jaxpr.primitives import BARRIERS
from jaxact._jaxpr.read import call_body, is_literal
from jaxact._jaxpr.types import Atom, ClosedJaxpr, Eqn, Jaxpr, Var

Facts: TypeAlias = dict[Var, int]
# (equation, facts about its inputs, equations around it) -> about its outputs; those of
# a conditional are about its index, and about one output in each branch
Transfer: TypeAlias = Callable[[Eqn, Sequence[int], tuple[Eqn, ...]], int]


def union(eqn: Eqn, facts: Sequence[int], around: tuple[Eqn, ...]) -> int:
    """A value has every fact that an input has."""
    out = 0
    for bits in facts:
        out |= bits
    return out


def repeated(facts: Iterable[int]) -> int:
    """The facts that more than one of several values have."""
    once = more = 0
    for bits in facts:
        once, more = once | bits, more | (once & bits)
    return more


def flow(
    jaxpr: Jaxpr,
    facts: Sequence[int],
    transfer: Transfer = union,
    around: tuple[Eqn, ...] = (),
) -> Facts:
    """Facts about every variable, given those about the last inputs.

    `facts` may begin with facts about the constants; without them a constant has none.
    """
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    padding = [0] * (len(inputs) - len(facts))
    env = dict(zip(inputs, [*padding, *facts], strict=True))
    for eqn in jaxpr.eqns:
        out = flow_through(eqn, [fact_of(env, v) for v in eqn.invars], transfer, around)
        env.update(zip(eqn.outvars, out, strict=True))
    return env


def fact_of(facts: Facts, v: Atom) -> int:
    return 0 if is_literal(v) else facts.get(v, 0)


def flow_through(
    eqn: Eqn,
    facts: Sequence[int],
    transfer: Transfer = union,
    around: tuple[Eqn, ...] = (),
) -> list[int]:
    """Facts about the outputs of one equation."""
    name = eqn.primitive.name
    if name == "scan":
        return scan_facts(eqn, facts, transfer, around)[1]
    if name == "cond":
        branches = [
            _outputs(b, facts[1:], transfer, (*around, eqn))
            for b in eqn.params["branches"]
        ]
        outputs = zip(*branches, strict=True)
        return [transfer(eqn, [facts[0], *outs], around) for outs in outputs]
    if name in BARRIERS:
        return list(facts)
    body = eqn.params["jaxpr"] if name == "shard_map" else call_body(eqn)
    if body is not None:
        return _outputs(body, facts, transfer, (*around, eqn))
    return [transfer(eqn, facts, around)] * len(eqn.outvars)


def facts_inside(eqn: Eqn, facts: Sequence[int]) -> list[int]:
    """Facts about the inputs of each program in `held_programs(eqn)`."""
    return list(facts[1:] if eqn.primitive.name == "cond" else facts)


def scan_facts(
    eqn: Eqn, facts: Sequence[int], transfer: Transfer, around: tuple[Eqn, ...] = ()
) -> tuple[list[int], list[int]]:
    """Facts about a scan's body inputs and its outputs, at the carry's fixed point."""
    num_consts, num_carry = scan_counts(eqn)
    carry = slice(num_consts, num_consts + num_carry)
    inputs = list(facts)
    while True:  # ends: facts only grow, and there are finitely many
        out = _outputs(eqn.params["jaxpr"], inputs, transfer, (*around, eqn))
        grown = [a | b for a, b in zip(inputs[carry], out[:num_carry], strict=True)]
        if grown == inputs[carry]:
            return inputs, out
        inputs[carry] = grown


def _outputs(
    closed: ClosedJaxpr,
    facts: Sequence[int],
    transfer: Transfer,
    around: tuple[Eqn, ...],
) -> list[int]:
    jaxpr, _ = open_jaxpr(closed)
    env = flow(jaxpr, facts, transfer, around)
    return [fact_of(env, v) for v in jaxpr.outvars]
