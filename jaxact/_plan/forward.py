"""A call's forward program: its outputs and its residuals, in one jaxpr.

`trace_forward` traces `jax.vjp` into one jaxpr whose outputs are the call's
outputs followed by the residuals, so where each residual comes from can be read.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.types import Array, Atom, Jaxpr

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """The traced forward program.

    Attributes:
      jaxpr, consts: inputs are the rounding seed and the call's values; outputs are the
        call's outputs, then the residuals.
      num_outputs: how many the call has.
      vjp_tree: rebuilds the backward function from the residuals.
    """

    jaxpr: Jaxpr
    consts: Sequence[Array]
    num_outputs: int
    vjp_tree: Any

    @property
    def residuals(self) -> list[Atom]:
        """One variable (or literal) for each residual, in the order of `vjp_tree`."""
        return list(self.jaxpr.outvars[self.num_outputs :])


def active_of(values: Sequence[T], is_active: Sequence[bool]) -> list[T]:
    """The values that are differentiated."""
    return [v for v, a in zip(values, is_active, strict=True) if a]


def with_active(
    values: Sequence[T], is_active: Sequence[bool], active: Sequence[T]
) -> list[T]:
    """`values`, with others in the active places."""
    others = iter(active)
    return [next(others) if a else v for v, a in zip(values, is_active, strict=True)]


def trace_forward(
    run: Callable[..., list[Any]],
    seed: Array,
    values: Sequence[Array],
    is_active: Sequence[bool],
) -> Forward:
    """Trace `jax.vjp` for `run(seed, *values)` and its active values."""
    traced: dict[str, Any] = {}

    def forward(seed: Array, *values: Array) -> list[Any]:
        def of_active(*xs: Array) -> list[Any]:
            return run(seed, *with_active(values, is_active, xs))

        out, vjp = jax.vjp(of_active, *active_of(values, is_active))
        leaves, traced["tree"] = jax.tree.flatten(vjp)
        traced["num_outputs"] = len(out)
        return [*out, *leaves]

    closed = jax.make_jaxpr(forward)(seed, *values)
    jaxpr, consts = open_jaxpr(closed)
    return Forward(jaxpr, tuple(consts), traced["num_outputs"], traced["tree"])
