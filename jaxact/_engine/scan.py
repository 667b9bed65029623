"""Scans with compressed bodies.

The residuals in a scan are stacked by the scan itself, so compressing them afterwards
would need all layers' at once. The body's parameters stay where the scan keeps them.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact._engine.seeds import seed_of_step
from jaxact._engine.storage import Draw
from jaxact._flat import Flat, Kind
from jaxact._jaxpr.compat import open_jaxpr, scan_counts
from jaxact._jaxpr.evaluate import traced_at
from jaxact._jaxpr.flow import scan_facts
from jaxact._jaxpr.labels import module_path, numbered, scan_inputs, with_labels
from jaxact._jaxpr.types import Array, Eqn
from jaxact._plan.facts import kind_of, learn

# (flat function, draw, values, the scan's scope) -> outputs
CompressBody: TypeAlias = Callable[[Flat, Draw, Sequence[Array], str], list[jax.Array]]
_Arrays: TypeAlias = tuple[Any, ...]


def evaluate_scan(
    eqn: Eqn,
    facts: Sequence[int],
    draw: Draw,
    values: Sequence[Array],
    compress: CompressBody,
) -> list[jax.Array]:
    """A scan with its body compressed, given facts about its operands."""
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
        is_inside=True,
        is_step=eqn.params["unroll"] == 1,
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
