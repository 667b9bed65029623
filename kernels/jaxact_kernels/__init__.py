"""Packed storage formats for arrays: what the bits are, and code that makes them.

A format is a folder: `affine` (floats as small codes with a scale per group), `planes`
(the same, with more bits for some samples), `index` (small integers as they are) and
`mask` (booleans and comparisons as bits).
`reference.py` inside defines it in plain JAX. `words` holds the one definition of bit
order, `noise` the one definition of random bits, `layout` where groups lie in an array.
Nothing here knows what the arrays are used for.
"""

from jaxact_kernels import affine, index, mask, planes
from jaxact_kernels.choice import Choice, choose

__all__ = ["Choice", "affine", "choose", "index", "mask", "planes"]
