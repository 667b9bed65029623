"""Packed storage formats for arrays: how bits are laid out, and code that packs them.

A format is a folder: `affine` (floats as small codes with a scale per group), `planes`
(the same, with more bits for some samples), `rotated` (floats as codes after a random
rotation), `index` (small integers as they are) and `mask` (booleans and comparisons as
bits).
`reference.py` inside defines it in plain JAX. `words` alone defines bit order, `noise`
alone defines random bits, and `layout` defines where groups lie in an array.
Nothing here knows how the arrays are used.
"""

from jaxact_kernels import affine, index, mask, planes, rotated
from jaxact_kernels.choice import Choice, choose

__all__ = ["Choice", "affine", "choose", "index", "mask", "planes", "rotated"]
