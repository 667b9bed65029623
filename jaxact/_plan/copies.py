"""How a residual lies in a GPU's memory, where its variable does not say so.

A kernel reads the array that it packs row by row. XLA writes one for it unless there is
one; and the rest of the backward pass follows the order that the unpacked array has.
Three kinds of residuals are in memory, but not as the program has them:

- A float32 softmax in a bfloat16 network is there as its bfloat16 copy alone, which the
  product with the values reads (see `decoded_again.py`). To pack that adds a relative
  error of 2^-9 to an element, as the network's own products have it.
- What a transposed product makes, such as `einsum("BTNH,BSNH->BTNS")`, stays where the
  product put it, and so do elementwise functions after it. A mixture's experts lie
  before the batch so.
- A value that the next product reads transposed is in memory in that order too, as
  those that a vision transformer's attention mixes. Rows of 197 tokens waste 14 % of
  the words that they are packed into, those of their channels nothing.

Predicted for an H100 at 4 bits, bfloat16: four blocks with
`jax.nn.dot_product_attention` (8 x 2048 tokens, 16 heads), with a float32 softmax, take
38.6 ms instead of 45.7 (uncompressed 37.6); two layers of Qwen3-0.6B (4 x 2048 tokens),
whose scores are transposed too, in a checkpoint 15.3 ms and 1315 MiB instead of 18.6
and 1843 (the checkpoint alone: 14.3 and 1521); four mixtures of 8 experts (16 x 512
tokens) 6.3 ms and 368 MiB instead of 6.8 and 514 (uncompressed 4.9 and 969).
"""

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxact._codec import Codec, bytes_of
from jaxact._jaxpr.primitives import MATMULS
from jaxact._jaxpr.read import is_elementwise, variables_in
from jaxact._jaxpr.types import Dtype, Env, Jaxpr, Var
from jaxact._plan.decoded_again import decoded_again_p
from jaxact_kernels.layout import layout_of

_Order: TypeAlias = tuple[int, ...]
# Results that have no order of their own: they are computed where they are read.
_ANYWHERE = frozenset("broadcast_in_dim iota random_bits".split())
_LOOPS = frozenset(["scan", "while"])
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
    order: _Order

    def apply(self, x: jax.Array, env: Env) -> jax.Array:
        """The array, given the residual; no other value is read."""
        return x.astype(self.dtype).transpose(self.order)

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
    narrow, orders, read_as = _narrow(jaxpr), _orders(jaxpr), _read_as(jaxpr)
    found: dict[Var, Copy] = {}
    for v, codec in codecs.items():
        dtype, order = v.aval.dtype, _own_order(v)
        if v in narrow and codec.bits is not None and codec.bits <= _MOST_BITS:
            dtype = narrow[v]
        if v in orders and _may_lie(codec, v, orders[v]):
            order = orders[v]
        if v in read_as and _may_lie(codec, v, read_as[v]):
            order = _smaller(codec, v, order, read_as[v])
        if (dtype, order) != (v.aval.dtype, _own_order(v)):
            found[v] = Copy(dtype, order)
    return found


def _narrow(jaxpr: Jaxpr) -> dict[Var, Dtype]:
    """The float32 values that are in memory as narrower copies alone: their dtype."""
    return {
        eqn.invars[0]: eqn.params["narrow"]
        for eqn in jaxpr.eqns
        if eqn.primitive is decoded_again_p and eqn.params["narrow"] in _NARROW
    }


def _orders(jaxpr: Jaxpr) -> dict[Var, _Order]:
    """The order in which each variable's axes follow one another in memory.

    It is their own order, unless there is a transposed product before it. Variables
    that XLA computes where they are read have none. A loop reads its steps row by row:
    those of a recurrent network, time first.
    """
    found = {v: _own_order(v) for v in (*jaxpr.constvars, *jaxpr.invars)}
    products: set[Var] = set()
    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, variables_in(eqn.invars)
        if name in _ANYWHERE:
            continue
        if name in MATMULS:
            products.update(eqn.outvars)
        for v in eqn.outvars:
            found[v] = _own_order(v)
        if name == "transpose" and not products.isdisjoint(inputs):
            permutation = eqn.params["permutation"]
            axes = range(len(permutation))
            found[eqn.outvars[0]] = tuple(permutation.index(axis) for axis in axes)
        elif is_elementwise(eqn):
            (v,) = eqn.outvars
            same = [x for x in inputs if x in found and x.aval.shape == v.aval.shape]
            if len(distinct := {found[x] for x in same}) == 1:
                found[v] = distinct.pop()
        elif name in _LOOPS:
            found.update({v: _own_order(v) for v in inputs})
    return found


def _read_as(jaxpr: Jaxpr) -> dict[Var, _Order]:
    """The order in which a matrix product reads a variable that it reads transposed."""
    found: dict[Var, _Order] = {}
    read: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        name, inputs = eqn.primitive.name, variables_in(eqn.invars)
        if name in MATMULS or (name == "reshape" and eqn.outvars[0] in read):
            read.update(inputs)
        elif name == "transpose" and eqn.outvars[0] in read:
            found[inputs[0]] = tuple(eqn.params["permutation"])
    return found


def _may_lie(codec: Codec, v: Var, order: _Order) -> bool:
    """Whether a codec may get a variable's axes in this order.

    The first axis is in no row: a batch is split over devices along it, and a row that
    is cut finer than its groups would be gathered.
    """
    shape = tuple(v.aval.shape[axis] for axis in order)
    lead = layout_of(shape, _GROUP_SIZE).lead
    return codec.is_free_of_axes and 0 in order[: len(lead)]


def _smaller(codec: Codec, v: Var, first: _Order, second: _Order) -> _Order:
    """The second order where fewer bytes are stored in it, by a twentieth at least."""
    sizes = [
        bytes_of(codec, tuple(v.aval.shape[axis] for axis in order), v.aval.dtype)
        for order in (first, second)
    ]
    return second if sizes[1] <= 0.95 * sizes[0] else first


def _own_order(v: Var) -> _Order:
    return tuple(range(len(getattr(v.aval, "shape", ()))))
