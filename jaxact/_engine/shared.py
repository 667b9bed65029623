"""One kernel for the metadata of residuals that are stored alike.

Decoding computes a few numbers for each group. On a GPU XLA does so in a small kernel
for each residual, which takes 2 microseconds whatever its size. It joins the kernels
whose results have equal shapes and that read an array in common. So they are given one
to read, and use a zero in it. Predicted for ViT-B on an H100 (batch 64, 4 bits): 26.53
instead of 26.77 ms, with 1487 instead of 1547 kernels.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jaxact._jaxpr.evaluate import is_in_other_mesh
from jaxact._jaxpr.types import Array, PyTree

# XLA computes numbers that are all alike, or count up, where they are read; and it
# joins no kernels that share a single number.
TABLE = np.array([0, 1, 1, 1], np.uint32)

_shared_p = jex.Primitive("jaxact_shared")


def with_shared_operand(packed: Sequence[PyTree], table: Array) -> list[PyTree]:
    """The stored residuals; their metadata are computed from `table` too.

    Args:
      table: `TABLE`, as a value that XLA does not know.
    """
    return [
        jax.tree.map(lambda x: _shared(x, table), arrays, is_leaf=_has_metadata)
        for arrays in packed
    ]


def _shared(stored: Any, table: Array) -> Any:
    if not _has_metadata(stored) or is_in_other_mesh(stored.metadata):
        return stored
    metadata = _shared_p.bind(stored.metadata, table)
    return stored._replace(metadata=metadata)


def _has_metadata(x: object) -> bool:
    return "metadata" in getattr(x, "_fields", ())


def _or_zero(metadata: jax.Array, table: jax.Array) -> jax.Array:
    zero = lax.index_in_dim(table, 0, keepdims=False)
    return lax.bitwise_or(metadata, lax.broadcast(zero, metadata.shape))


def _batched(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    (metadata, table), (dim, of_table) = args, dims
    if of_table is not None:
        return metadata, dim
    return _shared_p.bind(metadata, table), dim


_shared_p.def_impl(lambda metadata, table: metadata)
_shared_p.def_abstract_eval(lambda metadata, table: metadata)
# Integers have no tangents. JAX 0.10 asks for the rule all the same.
ad.primitive_jvps[_shared_p] = lambda primals, tangents: (
    _shared_p.bind(*primals),
    tangents[0],
)
batching.primitive_batchers[_shared_p] = _batched
mlir.register_lowering(_shared_p, lambda ctx, metadata, table: [metadata])
mlir.register_lowering(
    _shared_p, mlir.lower_fun(_or_zero, multiple_results=False), platform="cuda"
)
