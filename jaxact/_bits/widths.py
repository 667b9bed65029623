"""The widths to choose from, and the action that stores at each."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp

from jaxact._codec import Action, Adaptive, Cast, Dithered, Exact, Quantize, Rotated
from jaxact_kernels.rotated import HALF_BIT

EXACT = 32
# The formats with 1 to 8 bits for each element, the same for all.
FORMATS = (Quantize, Dithered, Rotated, Adaptive)
ACTIONS: Mapping[int, Action] = MappingProxyType(
    {bits: Quantize(bits) for bits in range(1, 9)}
    | {16: Cast(jnp.bfloat16), EXACT: Exact()}
)


def least_bits(measured: Action | None) -> float:
    """The fewest bits that a measured action's format stores an element in."""
    return HALF_BIT if isinstance(measured, Rotated) else 1


def action_of(bits: float, measured: Action | None = None) -> Action:
    """A format up to 8 bits, Cast(bfloat16) up to 16, Exact() beyond.

    Args:
      measured: the action that was measured, whose format is kept if it is one of
        `FORMATS`; else it is `Quantize`, which suits any values.
    """
    if bits <= 8 and isinstance(measured, FORMATS):
        return dataclasses.replace(measured, bits=bits)
    return ACTIONS[next((width for width in ACTIONS if width >= bits), EXACT)]
