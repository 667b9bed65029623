"""Sums over rows that take two steps, where XLA:GPU would take one.

A sum for each channel runs on as many cores as there are blocks of 32 channels. XLA:GPU
cuts one with more than 4096 rows in parts. Fewer rows it leaves whole; and since few
cores would then compute the terms, such as a batch norm's input from its packed words,
it writes these to memory in float32 first. Here each sample is summed first, by more
cores, and the samples after it. ResNet-50 (batch 64, 4 bits, compiled for an H100),
whose last stage has 64 x 7 x 7 rows: 781 -> 718 MiB, in predicted 15.7 -> 15.2 ms.
"""

import math

import jax
from jax import lax

from jaxact._jaxpr.compat import barrier
from jaxact._jaxpr.types import Eqn

# XLA cuts longer sums itself: at 32 x 128 rows, a thread's share times a block's.
_MOST_ROWS = 4096
# A sample's sums are a part; a few large samples would be as many parts.
_FEWEST_SAMPLES = 8
# Below it the second step, a kernel of 2 microseconds, costs all that is saved.
_LEAST_SIZE = 2**19
_DTYPES = "float32", "float64"  # a narrower one would round each sample's sum


def is_in_steps(eqn: Eqn) -> bool:
    """Whether an equation sums rows, and few."""
    if eqn.primitive.name != "reduce_sum":
        return False
    x, axes = eqn.invars[0].aval, tuple(eqn.params["axes"])
    if len(x.shape) < 3 or axes != tuple(range(len(x.shape) - 1)):
        return False
    is_short = x.shape[0] >= _FEWEST_SAMPLES and math.prod(x.shape[:-1]) <= _MOST_ROWS
    return is_short and x.size >= _LEAST_SIZE and x.dtype.name in _DTYPES


def sum_in_steps(eqn: Eqn, x: jax.Array) -> jax.Array:
    """The result of such an equation."""
    with eqn.ctx.manager:
        of_samples = lax.reduce_sum(x, tuple(range(1, x.ndim - 1)))
        # XLA would join the two steps.
        return lax.reduce_sum(barrier(of_samples), (0,))
