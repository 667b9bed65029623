"""Branches, shard_maps and jits with shardings, with compressed programs inside.

JAX differentiates these programs as they are: their residuals are outputs to the
program around, which cannot see how each is made. So each is a call of its own, which
plans for its residuals like any other. A BatchNorm's input, for one, has to be stored
as normalized, else channels of unlike scales share a step: at 8 bits the noise was up
to 12 times the gradient in a `shard_map`.
"""

import functools
from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxact._engine.scan import CompressBody
from jaxact._engine.storage import Draw
from jaxact._flat import Flat, Kind
from jaxact._jaxpr.compat import open_jaxpr, with_body
from jaxact._jaxpr.flow import facts_inside
from jaxact._jaxpr.labels import (
    Label,
    branch_component,
    labels_in,
    module_path,
    numbered,
    with_labels,
)
from jaxact._jaxpr.primitives import JITS
from jaxact._jaxpr.read import held_programs
from jaxact._jaxpr.rewrite import without_constants
from jaxact._jaxpr.types import Array, ClosedJaxpr, Eqn
from jaxact._plan.facts import kind_of
from jaxact._residual import join_paths


def evaluate_held(
    eqn: Eqn,
    facts: Sequence[int],
    draw: Draw,
    values: Sequence[Array],
    compress: CompressBody,
) -> list[jax.Array]:
    """An equation with the programs that it holds compressed."""
    kinds = tuple(map(kind_of, facts_inside(eqn, facts)))
    scope = module_path(eqn.source_info.name_stack)

    def run(
        number: int, held: ClosedJaxpr, draw: Draw, *values: Array
    ) -> list[jax.Array]:
        body, consts = open_jaxpr(held)
        paths = ["closed over"] * len(consts) + ["operand"] * len(kinds)
        flat = Flat(
            with_labels(body),
            (*(Kind.PARAMETER for _ in consts), *kinds),
            numbered(paths),
            tuple(range(len(paths))),
            is_inside=True,
        )
        own = join_paths(scope, _label(eqn, number))
        return compress(flat, draw, [*consts, *values], own)

    programs = held_programs(eqn)
    runs = [functools.partial(run, i, held) for i, held in enumerate(programs)]
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
    body, consts = open_jaxpr(jax.make_jaxpr(runs[0])(draw, *values))
    inputs = [*consts, *jax.tree.leaves(draw), *values]
    return eqn.primitive.bind(*inputs, **with_body(eqn, without_constants(body)))


def _label(eqn: Eqn, number: int) -> str:
    """Below the equation's own: its program's, if that does not tell it from others."""
    if eqn.primitive.name in JITS:
        own = labels_in(module_path(eqn.source_info.name_stack))
        return Label("sharded", own[-1].number if own else 0).component
    return branch_component(number)
