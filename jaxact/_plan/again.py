"""An identity whose result the backward pass decodes anew.

XLA decodes a residual once for all that reads it, and where that is two kernels, a sum
over rows and what the sum scales, it writes the decoded array to memory in float32. A
second decoder costs a second look at the packed words.
"""

import jax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

again_p = jex.Primitive("jaxact_again")


def again(x: jax.Array) -> jax.Array:
    """`x`; another variable, with the same elements."""
    return again_p.bind(x)


again_p.def_impl(lambda x: x)
again_p.def_abstract_eval(lambda x: x)
ad.deflinear2(again_p, lambda ct, x: [ct])
batching.defvectorized(again_p)
mlir.register_lowering(again_p, lambda ctx, x: [x])
