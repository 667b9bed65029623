"""Compression inside the programs that equations hold.

A compressed call is evaluated with the bodies of its scans compressed, and with its
branches, shard_maps and jits with shardings. Those inside custom rules and checkpoints
are left as they are.
"""

from collections.abc import Callable

import jax

from jaxact._engine.held import evaluate_held
from jaxact._engine.scan import CompressBody, evaluate_scan
from jaxact._engine.storage import Draw
from jaxact._flat import Flat
from jaxact._jaxpr.evaluate import bind, value_of
from jaxact._jaxpr.flow import fact_of, flow
from jaxact._jaxpr.read import held_programs, is_of_platforms
from jaxact._jaxpr.types import Array, Eqn, Jaxpr
from jaxact._plan.facts import input_facts, learn


def holds_programs(jaxpr: Jaxpr) -> bool:
    """Whether `jaxpr` has equations whose programs are calls of their own."""
    return any(eqn.primitive.name == "scan" or _is_held(eqn) for eqn in jaxpr.eqns)


def _is_held(eqn: Eqn) -> bool:
    return bool(held_programs(eqn)) and not is_of_platforms(eqn)


def push_inside(flat: Flat, compress: CompressBody) -> Callable[..., list[jax.Array]]:
    """`flat` as (draw, *values) -> outputs, with the programs inside compressed."""
    facts = flow(flat.jaxpr, input_facts(flat), learn)

    def run(draw: Draw, *values: Array) -> list[jax.Array]:
        env = dict(zip(flat.invars, values, strict=True))
        for eqn in flat.jaxpr.eqns:
            operands = [value_of(v, env) for v in eqn.invars]
            known = [fact_of(facts, v) for v in eqn.invars]
            if eqn.primitive.name == "scan":
                out = evaluate_scan(eqn, known, draw, operands, compress)
            elif _is_held(eqn) and any(known):
                out = evaluate_held(eqn, known, draw, operands, compress)
            else:
                out = bind(eqn, operands)
            env.update(zip(eqn.outvars, out, strict=True))
        return [value_of(v, env) for v in flat.jaxpr.outvars]

    return run
