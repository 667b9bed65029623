"""Normalized values, which a kernel encodes from a norm's input."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import shapes
from cases import SEED, samples_of, with_special_values

from jaxact_kernels import affine, rotated
from jaxact_kernels.dispatch import run
from jaxact_kernels.normalization import Normalization

BY_CHANNEL = Normalization((-1,), is_centered=True)


def check_normalized(activation: shapes.Activation, bits: int) -> None:
    """Compare the words of the implementation that runs here with the definition's.

    Raises:
      SystemExit: they differ.
    """
    [x] = samples_of(activation, 1)
    x = with_special_values(x)
    rng = np.random.default_rng(SEED)
    mean, deviation = rng.normal(size=(2, x.shape[-1])).astype(np.float32)
    factor = np.exp(deviation)
    # A program for each step: in one XLA may contract the product with a sum.
    centered = jax.jit(jnp.subtract)(x.astype(np.float32), _spread(mean, x))
    values = jax.jit(jnp.multiply)(centered, _spread(factor, x))
    adaptive = {"group_size": 256, "is_adaptive": True}
    for format, options in (affine, {}), (rotated, adaptive):
        encode = format.Encode(
            x.shape, x.dtype, bits, **options, normalization=BY_CHANNEL
        )
        seed = jnp.uint32(SEED)
        got = run(encode, x, seed, mean, factor)
        options |= {"bits": bits, "implementation": "reference"}
        wanted = format.encode(values, seed, **options)
        for name, a, b in zip(wanted._fields, got, wanted, strict=False):
            if places := int(jnp.sum(a != b)):
                where = f"{bits} bits, {activation}, {encode.scope}: {name}"
                sys.exit(f"normalized, {where}: {places} places")


def _spread(coefficient: np.ndarray, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(coefficient, x.shape)
