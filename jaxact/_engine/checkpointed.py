"""A call in a checkpoint, which keeps its inputs to compute it again.

The checkpointed call is a program of its own, whose only residuals are the inputs; it
is compressed as any other, and so is the call inside it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxact._engine.seeds import salted
from jaxact._engine.storage import Draw
from jaxact._flat import Flat
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.types import Array


def checkpointed(
    flat: Flat,
    draw: Draw,
    values: Sequence[Array],
    run: Callable[[Draw, Sequence[Array]], list[jax.Array]],
) -> tuple[Flat, list[Any]]:
    """`run(draw, values)`, which evaluates `flat`, in a checkpoint; and its inputs.

    The noise inside is not that of the inputs: equal data may meet there.
    """
    keys, settings = tuple(draw.probe), list(draw.probe.values())
    count = len(values)

    def inside(seed: Array, *inputs: Array) -> list[jax.Array]:
        probe: dict[str, Any] = dict(zip(keys, inputs[count:], strict=True))
        return run(Draw(salted(seed, "checkpoint", 1), probe), inputs[:count])

    inputs = [draw.seed, *values, *settings]
    closed = jax.make_jaxpr(jax.checkpoint(inside))(*inputs)
    jaxpr, consts = open_jaxpr(closed)
    before = [*("closed over" for _ in consts), "seed"]
    outer = flat.among(jaxpr, before, ["probe" for _ in settings])
    return outer, [*consts, *inputs]
