"""An identity whose result the backward pass decodes anew.

XLA decodes a residual once for all its readers. Where these are two kernels, a sum over
rows and the values that the sum scales, it writes the decoded array to memory. A second
decoder costs a second look at the packed words. Four blocks with
`jax.nn.dot_product_attention` (8 x 2048 tokens, 16 heads, bfloat16, 4 bits), compiled
for an H100, take 39.6 ms (predicted) and 5.3 GiB with one decoder, 38.6 and 5.6 with
two; uncompressed 37.6 and 15.8.

The softmax that this reads has copies in a narrower dtype, and is encoded from those:
see `copies.py`.
"""

import jax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jaxact._jaxpr.types import Dtype

decoded_again_p = jex.Primitive("jaxact_decoded_again")


def decoded_again(x: jax.Array, narrow: Dtype) -> jax.Array:
    """`x`; another variable, with the same elements.

    Args:
      narrow: the dtype that the copies have which are read, and are in memory.
    """
    return decoded_again_p.bind(x, narrow=narrow)


decoded_again_p.def_impl(lambda x, **_: x)
decoded_again_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(decoded_again_p, lambda ct, x, **_: [ct])
batching.defvectorized(decoded_again_p)
mlir.register_lowering(decoded_again_p, lambda ctx, x, **_: [x])
