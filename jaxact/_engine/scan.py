"""Compression inside scan bodies.

The residuals in a scan are stacked by the scan itself, so compressing them afterwards
would need all layers' at once. A scan in a compressed call is therefore evaluated with
its body compressed, wherever in branches, jits and shard_maps it is; the body's
parameters stay where the scan keeps them. Scans inside custom rules and checkpoints are
left as they are.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxact._engine.seeds import seed_of_step
from jaxact._engine.storage import Draw
from jaxact._flat import Flat, Kind
from jaxact._jaxpr.compat import jit_shardings, open_jaxpr, scan_counts
from jaxact._jaxpr.evaluate import bind, traced_at, value_of
from jaxact._jaxpr.flow import fact_of, facts_inside, flow, scan_facts
from jaxact._jaxpr.labels import module_path, numbered, scan_inputs, with_labels
from jaxact._jaxpr.read import held_programs
from jaxact._jaxpr.types import Array, ClosedJaxpr, Eqn, Jaxpr
from jaxact._plan.facts import input_facts, kind_of, learn
from jaxact._residual import join_paths

# (flat function, draw, values, the scan's scope) -> outputs
CompressBody: TypeAlias = Callable[[Flat, Draw, Sequence[Array], str], list[jax.Array]]
_Arrays: TypeAlias = tuple[Any, ...]


def contains_scan(jaxpr: Jaxpr) -> bool:
    """Whether `jaxpr`, or a program that its equations hold, has a scan."""
    return any(eqn.primitive.name == "scan" or _holds_scan(eqn) for eqn in jaxpr.eqns)


def _holds_scan(eqn: Eqn) -> bool:
    # Of `lax.platform_dependent` JAX lowers the branch for this platform alone, and the
    # others may be of kernels that it has not.
    if eqn.params.get("branches_platforms") is not None:
        return False
    return any(contains_scan(open_jaxpr(held)[0]) for held in held_programs(eqn))


def push_into_scans(
    flat: Flat, compress: CompressBody
) -> Callable[..., list[jax.Array]]:
    """`flat` as (draw, *values) -> outputs, with its scans' bodies compressed."""
    facts = input_facts(flat)

    def run(draw: Draw, *values: Array) -> list[jax.Array]:
        return _evaluate(flat.jaxpr, facts, draw, values, compress)

    return run


def _evaluate(
    jaxpr: Jaxpr,
    facts: Sequence[int],
    draw: Draw,
    values: Sequence[Array],
    compress: CompressBody,
) -> list[jax.Array]:
    facts_of_all = flow(jaxpr, facts, learn)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
    for eqn in jaxpr.eqns:
        operands = [value_of(v, env) for v in eqn.invars]
        operand_facts = [fact_of(facts_of_all, v) for v in eqn.invars]
        if eqn.primitive.name == "scan":
            out = _scan(eqn, operand_facts, draw, operands, compress)
        elif _holds_scan(eqn):
            out = _holding(eqn, operand_facts, draw, operands, compress)
        else:
            out = bind(eqn, operands)
        env.update(zip(eqn.outvars, out, strict=True))
    return [value_of(v, env) for v in jaxpr.outvars]


def _holding(
    eqn: Eqn,
    facts: Sequence[int],
    draw: Draw,
    values: Sequence[Array],
    compress: CompressBody,
) -> list[jax.Array]:
    """An equation with scans in the programs that it holds."""
    scope = module_path(eqn.source_info.name_stack)

    def compress_body(
        flat: Flat, draw: Draw, values: Sequence[Array], inner_scope: str
    ) -> list[jax.Array]:
        return compress(flat, draw, values, join_paths(scope, inner_scope))

    def run(held: ClosedJaxpr, draw: Draw, *values: Array) -> list[jax.Array]:
        body, consts = open_jaxpr(held)
        given = [0] * len(consts) + facts_inside(eqn, facts)
        return _evaluate(body, given, draw, [*consts, *values], compress_body)

    runs = [functools.partial(run, held) for held in held_programs(eqn)]
    if eqn.primitive.name == "cond":
        index, *operands = values
        return lax.switch(index, runs, draw, *operands)
    if eqn.primitive.name == "shard_map":
        params = eqn.params
        mapped = jax.shard_map(
            runs[0],
            mesh=params["mesh"],
            in_specs=(PartitionSpec(), *params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=params["newly_manual_axes"],
            check_vma=params["check_vma"],
        )
        return mapped(draw, *values)
    inputs = _placed(values, jit_shardings(eqn, "in"))
    return _placed(jax.jit(runs[0])(draw, *inputs), jit_shardings(eqn, "out"))


def _placed(
    values: Sequence[Array], shardings: Sequence[jax.sharding.Sharding | None]
) -> list[Any]:
    """The values where a jit asks for them to be."""
    return [
        x if place is None else lax.with_sharding_constraint(x, place)
        for x, place in zip(values, shardings, strict=True)
    ]


def _scan(
    eqn: Eqn,
    facts: Sequence[int],
    draw: Draw,
    values: Sequence[Array],
    compress: CompressBody,
) -> list[jax.Array]:
    body, body_consts = open_jaxpr(eqn.params["jaxpr"])
    kinds = _kinds_inside(eqn, facts)
    num_consts, num_carry = scan_counts(eqn)
    first = len(body_consts) + num_consts
    flat = Flat(
        with_labels(body),
        (Kind.PARAMETER,) * len(body_consts) + kinds,
        (*numbered(["closed over"] * len(body_consts)), *scan_inputs(eqn)),
        tuple(range(len(body_consts) + len(values))),
        tuple((first + i, i) for i in range(num_carry)),
        tuple(range(num_carry, len(body.outvars))),
    )
    scope = module_path(eqn.source_info.name_stack)

    def compressed(step: jax.Array, *xs: Array) -> list[jax.Array]:
        own = draw._replace(seed=seed_of_step(draw.seed, step))
        return compress(flat, own, [*body_consts, *xs], scope)

    with traced_at(eqn):  # residuals that the scan stacks are told by its label
        return rebuild(eqn, compressed, values)


def _kinds_inside(eqn: Eqn, facts: Sequence[int]) -> tuple[Kind, ...]:
    """The kinds that a scan's inputs have inside its body.

    Constants are as parameters: values made from them alone are the same in each step,
    and JAX keeps them once, as an LSTM's joined kernels. Not where steps have their own
    parameters, as layers have: products with those differ.
    """
    kinds = [kind_of(f) for f in scan_facts(eqn, facts, learn)[0]]
    num_consts, _ = scan_counts(eqn)
    consts, own = kinds[:num_consts], kinds[num_consts:]
    if Kind.PARAMETER not in own:
        consts = [Kind.PARAMETER] * num_consts
    return (*consts, *own)


def rebuild(
    eqn: Eqn, body: Callable[..., list[jax.Array]], values: Sequence[Array]
) -> list[jax.Array]:
    """A scan with another body: (the step's number, *constants, *carry, *xs)."""
    num_consts, num_carry = scan_counts(eqn)
    start, consts = num_consts + num_carry, values[:num_consts]
    length = eqn.params["length"]

    def step(
        carry: _Arrays, numbered: tuple[jax.Array, _Arrays]
    ) -> tuple[_Arrays, _Arrays]:
        number, xs = numbered
        out = body(number, *consts, *carry, *xs)
        return tuple(out[:num_carry]), tuple(out[num_carry:])

    carry, ys = lax.scan(
        step,
        tuple(values[num_consts:start]),
        (lax.iota(np.uint32, length), tuple(values[start:])),
        length=length,
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [_without_tangent(x) for x in (*carry, *ys)]


def _without_tangent(x: jax.Array) -> jax.Array:
    """`x`; an integer by an operation that has no derivative, and that XLA drops.

    A scan whose body has a custom rule gives integers tangents, of type float0, which
    `lax.cummax` and `jnp.prod` cannot take.
    """
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    return lax.bitwise_or(x, lax.full_like(x, 0)) if is_integer else x
