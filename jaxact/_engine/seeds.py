"""Seeds for the rounding noise: another one for each call, part and residual.

Equal data in two places must not meet equal noise. All parts of a seed but the user's
key are constants of the program. In the seeds themselves XLA may not know them: it
would compile each encoding anew, which differs from another in its seed alone (24 of
one shape: 1.22 s on a CPU, 0.40 s behind a barrier).
"""

import functools
import hashlib
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxact._jaxpr.types import Array
from jaxact_kernels import noise


def salted(seed: Array, kind: str, number: int) -> Array:
    """The seed for one of several parts of a kind; the first one's is `seed`.

    Salts of two kinds combine by exclusive or, so they must not be affine in the text,
    as CRC-32 is: 'call 1' with 'scan 2' would be 'call 2' with 'scan 1'.
    """
    return seed if number == 0 else _salted(seed, f"{kind} {number}")


def seed_at(seed: Array, path: str) -> Array:
    """The seed for the residuals of a call with this module path."""
    return _salted(seed, f"residuals of {path}")


def seed_of_step(seed: Array, step: jax.Array) -> jax.Array:
    """The seed for one step in a scan.

    The chain rule multiplies the steps' residuals. In a gate h -> clip(x) h whose
    groups all span 0 to 1, steps with one seed had one noise: the gradient through 8
    steps at 2 bits was 95 % too large in the mean. No salt: those for nested scans
    would combine in either order.
    """
    return noise.group_key(jax.numpy.uint32(seed), step, jax.numpy.zeros_like(step))


@functools.partial(jax.jit, static_argnums=1)
def seeds_for(seed: Array, count: int) -> list[jax.Array]:
    """Seeds for so many residuals.

    Scalars: of an array, each encoding would read its own by a kernel on a GPU.
    """
    return lax.optimization_barrier(known_seeds(jax.numpy.uint32(seed), count))


def known_seeds(seed: Array, count: int) -> list[Any]:
    """The same, known to XLA where `seed` is: of no mesh where that has none."""
    return [salted(seed, "residual", number) for number in range(count)]


def _salted(seed: Array, text: str) -> Array:
    word = hashlib.blake2b(text.encode(), digest_size=4).digest()
    bits: Any = seed
    return bits ^ np.uint32(int.from_bytes(word, "little"))
