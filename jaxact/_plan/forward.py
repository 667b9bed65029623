"""The forward program of a call: its outputs and its residuals, in one jaxpr.

`trace_forward` traces `jax.vjp` of the call into one jaxpr whose outputs are the call's
outputs followed by the residuals, so where each residual comes from can be read.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxact._jaxpr.compat import open_jaxpr


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """The traced forward program.

    Attributes:
      jaxpr, consts: inputs are the rounding seed and the call's values; outputs are the
        call's outputs, then the residuals.
      num_outputs: of the call.
      vjp_tree: rebuilds the backward function from the residuals.
    """

    jaxpr: Any
    consts: Sequence[Any]
    num_outputs: int
    vjp_tree: Any

    @property
    def residuals(self) -> list[Any]:
        """One variable (or literal) for each residual, in the order of `vjp_tree`."""
        return list(self.jaxpr.outvars[self.num_outputs :])


def active_of(values: Sequence[Any], is_active: Sequence[bool]) -> list[Any]:
    """The values that are differentiated."""
    return [v for v, a in zip(values, is_active, strict=True) if a]


def with_active(
    values: Sequence[Any], is_active: Sequence[bool], active: Sequence[Any]
) -> list[Any]:
    """`values`, with others in the active places."""
    others = iter(active)
    return [next(others) if a else v for v, a in zip(values, is_active, strict=True)]


def trace_forward(
    run: Callable[..., list[Any]],
    seed: Any,
    values: Sequence[Any],
    is_active: Sequence[bool],
) -> Forward:
    """Trace the vjp of `run(seed, *values)` for the active values."""
    found: dict[str, Any] = {}

    def forward(seed: Any, *values: Any) -> list[Any]:
        def of_active(*xs: Any) -> list[Any]:
            return run(seed, *with_active(values, is_active, xs))

        out, vjp = jax.vjp(of_active, *active_of(values, is_active))
        leaves, found["tree"] = jax.tree.flatten(vjp)
        found["num_outputs"] = len(out)
        return [*out, *leaves]

    closed = jax.make_jaxpr(forward)(seed, *values)
    jaxpr, consts = open_jaxpr(closed)
    return Forward(jaxpr, tuple(consts), found["num_outputs"], found["tree"])
