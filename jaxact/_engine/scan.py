"""CompressBody inside scan bodies.

Residuals of a scan are stacked by the scan itself, so compressing them afterwards
would need all of them at once. A scan found in a compressed call is therefore
evaluated with its body compressed; the body's parameters stay where the scan keeps
them. Scans inside branches, custom rules and checkpoints are left as they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxact._jaxpr.compat import open_jaxpr, scan_counts
from jaxact._jaxpr.evaluate import bind, value_of
from jaxact._jaxpr.flow import fact_of, flow, scan_facts
from jaxact._jaxpr.primitives import JITS
from jaxact._plan.facts import input_facts, kind_of, learn
from jaxact._residual import join_paths, module_path
from jaxact._trace import Flat, Kind

# (flat function, seed, values, scope of the scan) -> outputs
CompressBody = Callable[[Flat, Any, Sequence[Any], str], list[Any]]


def contains_scan(jaxpr: Any) -> bool:
    """Whether `jaxpr`, or a jitted function it calls, has a scan."""
    return any(eqn.primitive.name == "scan" or _calls_scan(eqn) for eqn in jaxpr.eqns)


def _calls_scan(eqn: Any) -> bool:
    return eqn.primitive.name in JITS and contains_scan(
        open_jaxpr(eqn.params["jaxpr"])[0]
    )


def push_into_scans(flat: Flat, compress: CompressBody) -> Callable[..., list[Any]]:
    """`flat` as (seed, *values) -> outputs, with the bodies of its scans compressed."""
    facts = input_facts(flat)

    def run(seed: Any, *values: Any) -> list[Any]:
        return _evaluate(flat.jaxpr, facts, seed, values, compress)

    return run


def _evaluate(
    jaxpr: Any,
    facts: Sequence[int],
    seed: Any,
    values: Sequence[Any],
    compress: CompressBody,
) -> list[Any]:
    known = flow(jaxpr, facts, learn)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [value_of(v, env) for v in eqn.invars]
        learned = [fact_of(known, v) for v in eqn.invars]
        if eqn.primitive.name == "scan":
            out = _scan(eqn, learned, seed, inputs, compress)
        elif _calls_scan(eqn):
            out = _jit(eqn, learned, seed, inputs, compress)
        else:
            out = bind(eqn, inputs)
        env.update(zip(eqn.outvars, out, strict=True))
    return [value_of(v, env) for v in jaxpr.outvars]


def _jit(
    eqn: Any,
    facts: Sequence[int],
    seed: Any,
    values: Sequence[Any],
    compress: CompressBody,
) -> list[Any]:
    inner, consts = open_jaxpr(eqn.params["jaxpr"])
    scope = module_path(eqn.source_info.name_stack)

    def compress_inside(flat: Flat, seed: Any, values: Any, within: str) -> list[Any]:
        return compress(flat, seed, values, join_paths(scope, within))

    def run(seed: Any, *values: Any) -> list[Any]:
        facts_inside = [0] * len(consts) + list(facts)
        return _evaluate(inner, facts_inside, seed, [*consts, *values], compress_inside)

    return jax.jit(run)(seed, *values)


def _scan(
    eqn: Any,
    facts: Sequence[int],
    seed: Any,
    values: Sequence[Any],
    compress: CompressBody,
) -> list[Any]:
    num_consts, num_carry = scan_counts(eqn)
    body, body_consts = open_jaxpr(eqn.params["jaxpr"])
    kinds = [kind_of(f) for f in scan_facts(eqn, facts, learn)[0]]
    flat = Flat(
        body,
        (Kind.PARAMETER,) * len(body_consts) + tuple(kinds),
        ("closed over",) * len(body_consts)
        + ("constant",) * num_consts
        + ("carry",) * num_carry
        + ("x",) * (len(values) - num_consts - num_carry),
        tuple(range(len(body_consts) + len(values))),
    )
    scope = module_path(eqn.source_info.name_stack)
    inside = lambda *xs: compress(flat, seed, [*body_consts, *xs], scope)
    return rebuild(eqn, inside, values)


def rebuild(
    eqn: Any, body: Callable[..., list[Any]], values: Sequence[Any]
) -> list[Any]:
    """A scan with another body, of (*constants, *carry, *xs) as the scan's own."""
    num_consts, num_carry = scan_counts(eqn)
    start, consts = num_consts + num_carry, values[:num_consts]

    def step(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[Any, Any]:
        out = body(*consts, *carry, *xs)
        return tuple(out[:num_carry]), tuple(out[num_carry:])

    carry, ys = lax.scan(
        step,
        tuple(values[num_consts:start]),
        tuple(values[start:]),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys]
