"""Booleans at one bit each, without loss; and comparisons, packed as they are made."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxact_kernels import checks as _checks
from jaxact_kernels.dispatch import run
from jaxact_kernels.mask import reference
from jaxact_kernels.mask.operations import Decode, Encode

__all__ = ["Decode", "Encode", "decode", "encode", "stored_bytes"]


def encode(
    x: jax.Array,
    *,
    above: jax.typing.ArrayLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Pack booleans, or `x > above`, in any shape, into `uint32[*lead, num_words]`.

    `encode(x, above=t)` gives the same bits as `encode(x > t)` and never makes an array
    of booleans. It compares in the dtype that `x` has, to which the threshold is
    converted as `x > t` does, to nearest; NaN is above nothing.

    Args:
        x: booleans; or, with `above`, integers or floating point. Any shape.
        above: a number or a scalar, which may be traced. `x > above` must be a
            comparison in that dtype: no float for integers, no float32 array for
            bfloat16.
        implementation: the only one to use; None leaves it to `choose`.

    Raises:
        ValueError: `x` is not boolean and there is no `above`, or the other way round;
            or `above` is not as described above; when traced.

    Example:
        >>> encode(jnp.arange(64) % 2 == 1)
        Array([         0, 4294967295], dtype=uint32)
        >>> encode(jnp.arange(64.0) - 32, above=-0.5)
        Array([4294901760, 4294901760], dtype=uint32)
    """
    x = jnp.asarray(x)
    operands = (x,) if above is None else (x, _threshold(x, above))
    operation = Encode(x.shape, x.dtype, is_comparison=above is not None)
    return run(operation, *operands, implementation=implementation)


def decode(
    words: jax.Array,
    *,
    shape: tuple[int, ...],
    is_fused: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Return the `bool[shape]` that `encode` packed.

    Args:
        words: the result of `encode`.
        shape: as encoded.
        is_fused: whether elementwise operations read the result, with which XLA can
            fuse the definition: it is then used, not a kernel.
        implementation: the only one to use; None leaves it to `choose`.

    Raises:
        ValueError: `words` are not those that an array with `shape` packs to.
    """
    shape = tuple(shape)
    required = reference.words_shape(shape)
    if words.dtype != np.uint32 or words.shape != required:
        raise ValueError(
            f"got words {_checks.array_text(words.dtype, words.shape)}; a mask of "
            f"shape {shape} requires {_checks.array_text('uint32', required)}; pass "
            "the shape that was encoded"
        )
    operation = Decode(shape, np.dtype(np.bool_), is_fused=is_fused)
    return run(operation, words, implementation=implementation)


def stored_bytes(shape: tuple[int, ...]) -> int:
    """Bytes that `encode` stores for `shape`: 4 for each 32 elements in a row.

    >>> stored_bytes((8, 1024))
    1024
    """
    return reference.stored_bytes(tuple(shape))


def _threshold(x: jax.Array, above: jax.typing.ArrayLike) -> jax.Array:
    """`above` as a scalar with the dtype that `x` has."""
    array = _checks.array_text(x.dtype, x.shape)
    is_integer = jnp.issubdtype(x.dtype, np.integer)
    if not is_integer and not jnp.issubdtype(x.dtype, np.floating):
        raise ValueError(
            f"got {array} and above={above}; a comparison requires integers or "
            "floating point; leave above out for booleans"
        )
    if jnp.shape(above):
        raise ValueError(
            f"got {array} and a threshold of shape {jnp.shape(above)}; it requires a "
            "scalar; compare first (x > thresholds) if each element has its own"
        )
    with jax.numpy_dtype_promotion("standard"):
        common = jnp.result_type(x.dtype, above)
    if common != x.dtype:
        raise ValueError(
            f"got {array} and above={above}; x > above would compare in {common}, and "
            f"the comparison requires {x.dtype}; convert the threshold, with "
            f"jnp.{'floor' if is_integer else 'asarray'}(above).astype(x.dtype)"
        )
    if isinstance(above, int | np.integer):
        limits = jnp.iinfo(x.dtype if is_integer else np.int32)
        if not limits.min <= above <= limits.max:
            raise ValueError(
                f"got {array} and above={above}; an integer threshold requires a value "
                f"from {limits.min} to {limits.max}; pass a float for floating point, "
                "or compare first"
            )
    # Through an array, as x > above does: a Python float becomes float32 before it
    # becomes bfloat16.
    return lax.convert_element_type(jnp.asarray(above), x.dtype)
