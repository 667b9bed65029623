"""Count the residuals that a program's backward pass has rounded."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxact._bits.cost import Cost, levels_variance
from jaxact._bits.widths import least_bits
from jaxact._codec import Action
from jaxact._codec.parts import Parts
from jaxact._flat import Flat
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.primitives import CHECKPOINTS
from jaxact._jaxpr.read import programs_in
from jaxact._jaxpr.rewrite import without_unused
from jaxact._jaxpr.types import Array, Eqn, Jaxpr, PyTree
from jaxact._plan.forward import active_of, with_active
from jaxact._plan.mark import copies_of, mark_p
from jaxact._trace import is_inexact


class Rounded(NamedTuple):
    """The residuals that share a key.

    Attributes:
      size: elements, over all copies; a complex one counts as two real ones.
      itemsize: bytes of an element when exact.
      bits: an element's as stored, to the nearest from 1 on.
      action: that stores it.
      is_linear: as in `Cost`.
    """

    key: str
    size: int
    itemsize: int
    bits: float
    action: Action
    is_linear: bool

    def cost(self, error: float, signal: float) -> Cost:
        """The cost of rounding it, given the squared error at its bits."""
        variance = error / levels_variance(self.bits, self.action)
        stored = self.size, self.itemsize, variance, signal, self.bits, self.action
        return Cost(self.key, *stored, self.is_linear)


def census(
    flat: Flat, values: Sequence[Array], active: Sequence[bool]
) -> tuple[Rounded, ...]:
    """The residuals rounded for the derivative with respect to the active values.

    Also those inside `jax.checkpoint`, which exist only in the backward pass.
    """

    def derivative(values: Sequence[jax.Array]) -> PyTree:
        def of_active(weights: Sequence[jax.Array]) -> list[jax.Array]:
            inputs = with_active(values, active, weights)
            return [x for x in flat(*inputs) if is_inexact(x)]

        out, vjp = jax.vjp(of_active, active_of(values, active))
        return vjp([jnp.ones_like(x) for x in out])

    jaxpr, _ = open_jaxpr(jax.make_jaxpr(derivative)(list(values)))
    rounded: dict[str, Rounded] = {}
    # A checkpoint's forward pass also marks residuals that it does not keep.
    for eqn, copies in _marks(without_unused(jaxpr)):
        decision = eqn.params["decision"]
        action, parts, key = decision.action, 1, decision.residual.key
        if isinstance(action, Parts):
            action, parts = action.codec, 2
        bits = _bits(action)
        if bits is not None:
            size = math.prod(eqn.params["shape"]) * copies * parts
            is_linear = decision.bias.is_noise
            if key in rounded:
                size += rounded[key].size
                is_linear = is_linear and rounded[key].is_linear
            itemsize = decision.residual.dtype.itemsize // parts
            facts = size, itemsize, bits, action, is_linear
            rounded[key] = Rounded(key, *facts)
    return tuple(rounded.values())


def _marks(jaxpr: Jaxpr, around: tuple[Eqn, ...] = ()) -> Iterator[tuple[Eqn, int]]:
    """The marks in the order of the forward pass, with the copies of each."""
    recomputed: list[Iterator[tuple[Eqn, int]]] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CHECKPOINTS:  # the last one's backward pass is first
            recomputed.append(_marks_inside(eqn, around))
        else:
            yield from _marks_inside(eqn, around)
    for marks in reversed(recomputed):
        yield from marks


def _marks_inside(eqn: Eqn, around: tuple[Eqn, ...]) -> Iterator[tuple[Eqn, int]]:
    if eqn.primitive is mark_p:
        yield eqn, copies_of(eqn, around)
    for body in programs_in(eqn):
        yield from _marks(body, (*around, eqn))


def _bits(action: Action) -> float | None:
    """An element's, to the nearest from 1 on; None where nothing is rounded."""
    if action.is_lossless or action.bits is None or action.bits >= 32:
        return None
    return max(least_bits(action), round(action.bits))
