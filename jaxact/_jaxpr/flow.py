"""Carry facts forward through a traced program, into calls, scans and branches.

A fact about a value is a bit of an integer; values join by OR. One walk serves three
questions: which arguments does a value depend on, is it an activation or made of
parameters alone, and which marked residual is it made from.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxact._jaxpr.compat import open_jaxpr, scan_counts
from jaxact._jaxpr.read import call_body, is_literal

# (equation, facts of its inputs, equations around it) -> facts of its outputs
Transfer = Callable[[Any, Sequence[int], tuple[Any, ...]], int]


def union(eqn: Any, facts: Sequence[int], around: tuple[Any, ...]) -> int:
    """A value has every fact that an input has."""
    out = 0
    for bits in facts:
        out |= bits
    return out


def flow(
    jaxpr: Any,
    facts: Sequence[int],
    transfer: Transfer = union,
    around: tuple[Any, ...] = (),
) -> dict[Any, int]:
    """Facts of every variable, given those of the last inputs.

    `facts` may begin with facts of the constants; without them a constant has none.
    """
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    padding = [0] * (len(inputs) - len(facts))
    env = dict(zip(inputs, [*padding, *facts], strict=True))
    for eqn in jaxpr.eqns:
        out = flow_through(eqn, [fact_of(env, v) for v in eqn.invars], transfer, around)
        env.update(zip(eqn.outvars, out, strict=True))
    return env


def fact_of(env: dict[Any, int], v: Any) -> int:
    return 0 if is_literal(v) else env.get(v, 0)


def flow_through(
    eqn: Any,
    facts: Sequence[int],
    transfer: Transfer = union,
    around: tuple[Any, ...] = (),
) -> list[int]:
    """Facts of the outputs of one equation."""
    name = eqn.primitive.name
    inside = (*around, eqn)
    if name == "scan":
        return scan_facts(eqn, facts, transfer, around)[1]
    if name == "cond":
        branches = [
            _outputs(b, facts[1:], transfer, inside) for b in eqn.params["branches"]
        ]
        return [
            facts[0] | union(eqn, outs, around) for outs in zip(*branches, strict=True)
        ]
    if name == "optimization_barrier":
        return list(facts)
    body = call_body(eqn)
    if body is not None:
        return _outputs(body, facts, transfer, inside)
    return [transfer(eqn, facts, around)] * len(eqn.outvars)


def scan_facts(
    eqn: Any, facts: Sequence[int], transfer: Transfer, around: tuple[Any, ...] = ()
) -> tuple[list[int], list[int]]:
    """Facts of a scan's body inputs and of its outputs, at the carry's fixed point."""
    num_consts, num_carry = scan_counts(eqn)
    inside, carry = list(facts), slice(num_consts, num_consts + num_carry)
    while True:  # ends: facts only grow, and there are finitely many
        out = _outputs(eqn.params["jaxpr"], inside, transfer, (*around, eqn))
        grown = [a | b for a, b in zip(inside[carry], out[:num_carry], strict=True)]
        if grown == inside[carry]:
            return inside, out
        inside[carry] = grown


def _outputs(
    closed: Any, facts: Sequence[int], transfer: Transfer, around: tuple[Any, ...]
) -> list[int]:
    jaxpr, _ = open_jaxpr(closed)
    env = flow(jaxpr, facts, transfer, around)
    return [fact_of(env, v) for v in jaxpr.outvars]
