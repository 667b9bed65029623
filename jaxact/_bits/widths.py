"""The widths to choose from, and the action that stores at each."""

from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp

from jaxact._codec import Action, Cast, Exact, Quantize

EXACT = 32
ACTIONS: Mapping[int, Action] = MappingProxyType(
    {bits: Quantize(bits) for bits in range(1, 9)}
    | {16: Cast(jnp.bfloat16), EXACT: Exact()}
)


def action_of(bits: int) -> Action:
    """Quantize(bits) up to 8, Cast(bfloat16) up to 16, Exact() beyond."""
    return ACTIONS[next((width for width in ACTIONS if width >= bits), EXACT)]
