"""Equal Flax Linen blocks one after another, of which XLA compiles one."""

from typing import Any

import flax.linen as nn
import jax


def scanned(block: nn.Module, times: int, x: jax.Array, *args: Any) -> jax.Array:
    """x after `times` blocks of the same shape, each called with `args` too.

    Their parameters and running statistics are arrays with a leading axis of `times`.
    """
    scan = nn.scan(
        lambda block, x, _: (block(x, *args), None),
        variable_axes={"params": 0, "batch_stats": 0},
        split_rngs={"params": True},
        length=times,
    )
    x, _ = scan(block, x, None)
    return x
