"""Normalized values, which a kernel encodes from a norm's input."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import shapes
from cases import SEED, samples_of, with_special_values

from jaxact_kernels import affine
from jaxact_kernels.dispatch import run
from jaxact_kernels.normalization import Normalization


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
    by_channel = Normalization((-1,), is_centered=True)
    encode = affine.Encode(x.shape, x.dtype, bits, normalization=by_channel)
    seed = jnp.uint32(SEED)
    got = run(encode, x, seed, mean, factor)
    # A program for each step: in one XLA may contract the product with a sum.
    centered = jax.jit(jnp.subtract)(x.astype(np.float32), _spread(mean, x))
    values = jax.jit(jnp.multiply)(centered, _spread(factor, x))
    wanted = affine.encode(values, seed, bits=bits, implementation="reference")
    for name, a, b in zip(wanted._fields, got, wanted, strict=True):
        if places := int(jnp.sum(a != b)):
            sys.exit(f"normalized, {bits} bits, {activation}: {name}: {places} places")


def _spread(coefficient: np.ndarray, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(coefficient, x.shape)
