"""A call under `jax.vmap`, as one call for the whole batch.

JAX maps a derivative rule example by example, and sums the gradients of arguments that
the examples share at the end, behind the barrier that makes the saving real: those of a
block's weights would exist once for each example, 74 MiB instead of 24 where the
uncompressed step takes 34. Models for one example, as Equinox has them, are mapped so.

Here the mapped program is compressed in place of the program of one example. That is
right where `vmap` comes before differentiation, and JAX evaluates a batching rule in
just that case: under `vmap(grad(f))` each example has its gradient. From 0.12 on it is
the rule of the call itself (`batch_rule.py`), so that a scan, a jit or a checkpoint may
lie between. Before, it is that of a primitive here, for a call right under a `vmap`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax.extend import core as jex
from jax.interpreters import ad, batching

from jaxact._engine.custom_rule import vmap_along
from jaxact._engine.storage import Draw
from jaxact._flat import Flat
from jaxact._jaxpr.compat import HAS_GENERIC_BATCHING, open_jaxpr
from jaxact._jaxpr.types import Array

batch_p = jex.Primitive("jaxact_batch")
batch_p.multiple_results = True


class _OtherTransformation(Exception):
    """Another transformation than `vmap` is the innermost one."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call that may be under `vmap`.

    Attributes:
      run: evaluates a flat function on its draw and its values, compressed.
      settings: keys of the probe, whose values come after the seed.
    """

    flat: Flat
    run: Callable[[Flat, Draw, Sequence[Array]], list[jax.Array]]
    settings: tuple[str, ...]


def on_batch(
    run: Callable[[Flat, Draw, Sequence[Array]], list[jax.Array]],
    flat: Flat,
    draw: Draw,
    values: Sequence[Array],
) -> list[jax.Array] | None:
    """`run` on the function of the whole batch; None where there is none."""
    if HAS_GENERIC_BATCHING or not any(map(_is_mapped, values)):
        return None
    call = _Call(flat, run, tuple(draw.probe))
    try:
        return batch_p.bind(draw.seed, *draw.probe.values(), *values, call=call)
    except _OtherTransformation:
        return None


def _is_mapped(x: Array) -> bool:
    """Whether it is an example in a batch; JAX has no public class for it."""
    return type(x).__name__ == "BatchTracer"


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, call: _Call
) -> tuple[Any, list[int | None]]:
    dims = [d if isinstance(d, int) else None for d in dims]
    if all(d is None for d in dims):  # JAX asks for these too
        outputs = batch_p.bind(*args, call=call)
        return outputs, [None] * len(outputs)
    seed, *others = args
    count = len(call.settings)
    draw = Draw(seed, dict(zip(call.settings, others[:count], strict=True)))
    values, own = others[count:], dims[count + 1 :]
    found = whole_batch(call.run, call.flat, axis, draw, values, dims[: count + 1], own)
    if found is None:
        raise _OtherTransformation
    return found


def whole_batch(
    run: Callable[[Flat, Draw, Sequence[Array]], list[jax.Array]],
    flat: Flat,
    axis: Any,
    draw: Draw,
    values: Sequence[Array],
    draw_dims: Sequence[int | None],
    dims: Sequence[int | None],
) -> tuple[list[jax.Array], list[int | None]] | None:
    """`run` on the function of the batch, and the outputs' batch axes; None: in no way.

    Where examples have noise of their own: their seeds differ. Nor for a batch of a
    size with symbols, as `jax.export` takes it: how residuals are packed depends on
    sizes, and an example's are numbers.

    Args:
      axis: JAX's description: name, size.
      draw_dims: the batch axis of each array in `draw`; None: it has none.
      dims: the same for `values`.
    """
    has_seeds = any(d is not None for d in draw_dims)
    if has_seeds or not isinstance(axis.size, int):
        return None
    batch, consts, out_dims = _over_batch(flat, axis, values, dims)
    return run(batch.first_alike, draw, [*consts, *values]), out_dims


def _over_batch(
    flat: Flat, axis: Any, values: Sequence[Any], dims: Sequence[int | None]
) -> tuple[Flat, Sequence[Array], list[int | None]]:
    """The function of the batch, its constants, and each output's batch axis."""
    out_dims: list[int | None] = [0] * len(flat.jaxpr.outvars)

    def each(*values: Array) -> list[Any]:
        outputs = flat(*values)
        out_dims[:] = [0 if _is_mapped(x) else None for x in outputs]
        return outputs

    def trace(out_axes: Any) -> Any:
        mapped = vmap_along(axis, each, tuple(dims), out_axes)
        return jax.make_jaxpr(mapped)(*values)

    closed = trace(0)
    if None in out_dims:  # such as a penalty of weights
        closed = trace(list(out_dims))
    jaxpr, consts = open_jaxpr(closed)
    batch = flat.among(jaxpr, ["closed over" for _ in consts])
    return batch, consts, out_dims


def _refuse(*args: object, **params: object) -> NoReturn:
    raise _OtherTransformation


batch_p.def_impl(_refuse)
batch_p.def_abstract_eval(_refuse)
ad.primitive_jvps[batch_p] = _refuse
batching.fancy_primitive_batchers[batch_p] = _batch
