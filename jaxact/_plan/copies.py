"""How a residual lies in a GPU's memory, where its variable does not say so.

A kernel reads the array that it packs row by row. XLA writes one for it unless there is
one; and the rest of the backward pass follows the order that the unpacked array has.
Some residuals are in memory, but not as the program has them:

- A float32 softmax in a bfloat16 network is there as its bfloat16 copy alone, which the
  product with the values reads (see `decoded_again.py`). To pack that adds a relative
  error of 2^-9 to an element, as the network's own products have it.
- Axes are in another order (see `order.py`). In that of a value's own product; in the
  next product's where it wastes less: 197 tokens in a row waste 14 % of the words that
  they are packed into, a vision transformer's channels nothing.

Predicted for an H100 at 4 bits, bfloat16: four blocks with
`jax.nn.dot_product_attention` (8 x 2048 tokens, 16 heads), with a float32 softmax, take
38.6 ms instead of 45.7 (uncompressed 37.6); two layers of Qwen3-0.6B (4 x 2048 tokens),
whose scores are transposed too, in a checkpoint 15.3 ms and 1315 MiB instead of 18.6
and 1843 (the checkpoint alone: 14.3 and 1521); four mixtures of 8 experts (16 x 512
tokens) 6.3 ms and 368 MiB instead of 6.8 and 514 (uncompressed 4.9 and 969); four
blocks of two convolutions along three axes with group norms (2 x 48 x 56 x 64) 5.2 ms
and 415 MiB instead of 8.4 and 646 (uncompressed 4.4 and 798).
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxact._codec import Codec, bytes_of
from jaxact._jaxpr.types import Dtype, Env, Jaxpr, Var
from jaxact._plan.decoded_again import decoded_again_p
from jaxact._plan.order import Order, orders, own_order, read_as
from jaxact_kernels.layout import layout_of

_GROUP_SIZE = 256  # the codecs' default
# Types to encode from instead of float32, and with how many bits: more would show it.
_NARROW = frozenset(map(jnp.dtype, (jnp.bfloat16, jnp.float16)))
_MOST_BITS = 8


@dataclasses.dataclass(frozen=True)
class Copy:
    """An array in memory that holds a residual's values.

    Attributes:
      dtype: its own, maybe narrower than the residual's.
      order: the residual's axes, as they follow one another in memory.
    """

    dtype: Dtype
    order: Order

    def apply(self, x: jax.Array, env: Env) -> jax.Array:
        """The array, given the residual; no other value is read."""
        return self.ordered(x.astype(self.dtype))

    def ordered(self, x: jax.Array) -> jax.Array:
        """An array like the residual with its axes in this order."""
        return x.transpose(self.order)

    def restore(self, v: Var, stored: jax.Array, env: Env) -> Env:
        """The residual `v`, given the array."""
        return {v: stored.transpose(np.argsort(self.order)).astype(v.aval.dtype)}

    def like(self, v: Var) -> jax.ShapeDtypeStruct:
        """The array's shape and dtype, for a variable."""
        shape = tuple(v.aval.shape[axis] for axis in self.order)
        return jax.ShapeDtypeStruct(shape, self.dtype)


def copies(jaxpr: Jaxpr, codecs: Mapping[Var, Codec]) -> dict[Var, Copy]:
    """The residuals that are in memory otherwise than as themselves, and how.

    Args:
      jaxpr: the program that makes them.
      codecs: for each residual that is encoded.
    """
    narrow, lying, read = _narrow(jaxpr), orders(jaxpr), read_as(jaxpr)
    found: dict[Var, Copy] = {}
    for v, codec in codecs.items():
        dtype, order = v.aval.dtype, own_order(v)
        if v in narrow and codec.bits is not None and codec.bits <= _MOST_BITS:
            dtype = narrow[v]
        if v in lying and _may_lie(codec, v, lying[v]):
            order = lying[v]
        if v in read and _may_lie(codec, v, read[v]):
            order = _smaller(codec, v, order, read[v])
        if (dtype, order) != (v.aval.dtype, own_order(v)):
            found[v] = Copy(dtype, order)
    return found


def _narrow(jaxpr: Jaxpr) -> dict[Var, Dtype]:
    """The float32 values that are in memory as narrower copies alone: their dtype."""
    return {
        eqn.invars[0]: eqn.params["narrow"]
        for eqn in jaxpr.eqns
        if eqn.primitive is decoded_again_p and eqn.params["narrow"] in _NARROW
    }


def _may_lie(codec: Codec, v: Var, order: Order) -> bool:
    """Whether a codec may get a variable's axes in this order.

    The first axis is in no row: a batch is split over devices along it, and a row that
    is cut finer than its groups would be gathered.
    """
    shape = tuple(v.aval.shape[axis] for axis in order)
    lead = layout_of(shape, _GROUP_SIZE).lead
    return codec.is_free_of_axes and 0 in order[: len(lead)]


def _smaller(codec: Codec, v: Var, first: Order, second: Order) -> Order:
    """The second order where fewer bytes are stored in it, by a twentieth at least."""
    sizes = [
        bytes_of(codec, tuple(v.aval.shape[axis] for axis in order), v.aval.dtype)
        for order in (first, second)
    ]
    return second if sizes[1] <= 0.95 * sizes[0] else first
