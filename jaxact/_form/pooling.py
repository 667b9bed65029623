"""Max-pooling whose derivative keeps one small integer for each window.

JAX keeps `reduce_window_max`'s whole input to find the maximum again; rounded, it
finds another one. Kept instead is the maximum's index inside its window, which is
exact (the first one in row-major order, as in JAX). So with `reduce_window_min`, for
morphology's erosion. In a larger window than an index is for, the input stays exact.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jaxact._jaxpr.evaluate import bind, traced_at
from jaxact._jaxpr.read import is_float
from jaxact._jaxpr.rewrite import Body, new_equation, with_outputs
from jaxact._jaxpr.types import (
    Axes,
    Eqn,
    Jaxpr,
    Params,
    Predicate,
    Shape,
    Tangent,
)

pool_p = jex.Primitive("jaxact_max_pool")
pool_p.multiple_results = True

MAX_WINDOW = 256  # an index must fit into eight bits

# The pools, and a padding that no element loses against.
_WORST = {"reduce_window_max": -np.inf, "reduce_window_min": np.inf}


def with_pools(jaxpr: Jaxpr, depends: Predicate) -> Jaxpr:
    """`jaxpr` with a pool for every window extreme that is differentiated."""

    def pooled(eqn: Eqn) -> Eqn:
        if eqn.primitive.name not in _WORST or not is_pool(eqn, depends):
            return eqn
        return new_equation(eqn, pool_p, eqn.invars, eqn.outvars, {"eqn": eqn})

    return with_outputs(jaxpr, [*map(pooled, jaxpr.eqns)], jaxpr.outvars)


def is_pool(eqn: Eqn, depends: Predicate) -> bool:
    """Whether a window extreme is differentiated and has few enough elements."""
    params, x = eqn.params, eqn.invars[0]
    plain = all(d == 1 for d in (*params["base_dilation"], *params["window_dilation"]))
    small = np.prod(params["window_dimensions"]) <= MAX_WINDOW
    has_elements = eqn.outvars[0].aval.size > 0
    return bool(plain and small and has_elements and is_float(x) and depends(x))


def pool_body(eqn: Eqn) -> Body | None:
    """The `reduce_window_max` or `reduce_window_min` that a pool evaluates."""
    if eqn.primitive is not pool_p:
        return None
    inner = eqn.params["eqn"]
    return Body(inner.invars, [inner], inner.outvars)


def _differentiate(
    primals: tuple[jax.Array], tangents: tuple[Tangent], *, eqn: Eqn
) -> tuple[list[jax.Array], list[Tangent]]:
    (x,), (t,) = primals, tangents
    out = bind(eqn, primals)[0]
    if isinstance(t, ad.Zero):
        return [out], [ad.Zero(eqn.outvars[0].aval.to_tangent_aval())]
    windows = _windows(eqn.params, x.shape)
    with traced_at(eqn):
        index = windows.index_of(out, x, _WORST[eqn.primitive.name])
    return [out], [pick_p.bind(index, t, windows=windows)]


pool_p.def_abstract_eval(lambda *_, eqn: [v.aval for v in eqn.outvars])
ad.primitive_jvps[pool_p] = _differentiate

# The elements at the extremes; a primitive, so that its residual is one small integer
# for each window, and not a mask for each element in it.
pick_p = jex.Primitive("jaxact_pick")


def _pick(index: jax.Array, t: jax.Array, *, windows: "_Windows") -> jax.Array:
    return windows.pick(index, t)


def _transpose(
    ct: Tangent, index: jax.Array, t: Tangent, *, windows: "_Windows"
) -> tuple[None, Tangent]:
    spread = ad.Zero(t.aval) if isinstance(ct, ad.Zero) else windows.spread(index, ct)
    return None, spread


def _batch(
    args: tuple[jax.Array, ...], dims: Axes, *, windows: "_Windows"
) -> tuple[jax.Array, int]:
    return jax.vmap(windows.pick, in_axes=tuple(dims))(*args), 0


pick_p.def_impl(_pick)
pick_p.def_abstract_eval(lambda index, t, *, windows: t.update(shape=index.shape))
ad.primitive_transposes[pick_p] = _transpose
batching.primitive_batchers[pick_p] = _batch
mlir.register_lowering(pick_p, mlir.lower_fun(_pick, multiple_results=False))


@dataclasses.dataclass(frozen=True, eq=False)
class _Windows:
    """The windows in one pool.

    Attributes:
      shape, padding: the array's, for each axis.
      window, strides: for each axis.
      padded: the shape after padding.
      count: how many windows there are, for each axis.
    """

    shape: Shape
    padding: tuple[tuple[int, int], ...]
    window: Shape
    strides: Shape
    padded: Shape
    count: Shape

    def index_of(self, out: jax.Array, x: jax.Array, padding: float) -> jax.Array:
        """uint8[*count]: where in its window of `x` each extreme in `out` is."""
        padded = self._pad(x, padding)
        index = jnp.zeros(self.count, jnp.uint8)
        for k, offset in reversed(list(self._offsets())):
            hit = self._slice(padded, offset) == out
            index = jnp.where(hit, jnp.uint8(k), index)
        return index

    def pick(self, index: jax.Array, t: jax.Array) -> jax.Array:
        """The elements of `t` at the extremes."""
        padded, out = self._pad(t, 0), jnp.zeros(self.count, t.dtype)
        for k, offset in self._offsets():
            out = jnp.where(index == k, self._slice(padded, offset), out)
        return out

    def spread(self, index: jax.Array, ct: jax.Array) -> jax.Array:
        """The transpose of `pick`.

        Elements whose places are the same modulo the strides are summed together: only
        the offsets with that remainder reach them. ResNet's pool, 3 x 3 with stride 2,
        adds 1 to 4 terms for an element then, not 9.
        """
        rows = tuple(-(-n // s) for n, s in zip(self.padded, self.strides, strict=True))
        x = self._woven(index, ct, (), rows)
        config = [
            (-low, n - high - m * s, 0)
            for (low, high), n, m, s in zip(
                self.padding, self.padded, rows, self.strides, strict=True
            )
        ]
        return lax.pad(x, jnp.zeros((), ct.dtype), config)

    def _woven(
        self, index: jax.Array, ct: jax.Array, remainder: Shape, rows: Shape
    ) -> jax.Array:
        """Elements with this remainder along the first axes, all along the others.

        Args:
          rows: how many elements have one remainder, for each axis.
        """
        axis = len(remainder)
        if axis == len(rows):
            return self._summed(index, ct, remainder, rows)
        stride = self.strides[axis]
        parts = [self._woven(index, ct, (*remainder, r), rows) for r in range(stride)]
        if stride == 1:
            return parts[0]
        x = jnp.stack(parts, axis + 1)
        return lax.collapse(x, axis, axis + 2)

    def _summed(
        self, index: jax.Array, ct: jax.Array, remainder: Shape, rows: Shape
    ) -> jax.Array:
        """The sums of all elements with one remainder, `rows` of them."""
        zero = jnp.zeros((), ct.dtype)
        total = jnp.zeros(rows, ct.dtype)
        for k, offset in self._offsets():
            steps = [divmod(o, s) for o, s in zip(offset, self.strides, strict=True)]
            if any(left != r for (_, left), r in zip(steps, remainder, strict=True)):
                continue
            config = [
                (first, m - first - c, 0)
                for (first, _), m, c in zip(steps, rows, self.count, strict=True)
            ]
            total += lax.pad(jnp.where(index == k, ct, zero), zero, config)
        return total

    def _offsets(self) -> Iterator[tuple[int, Shape]]:
        """Where the windows' k-th elements begin."""
        return enumerate(itertools.product(*map(range, self.window)))

    def _slice(self, padded: jax.Array, offset: Shape) -> jax.Array:
        """The elements at `offset` in each window."""
        stop = [
            o + (n - 1) * s + 1
            for o, n, s in zip(offset, self.count, self.strides, strict=True)
        ]
        return lax.slice(padded, offset, stop, self.strides)

    def _pad(self, x: jax.Array, value: float) -> jax.Array:
        config = [(low, high, 0) for low, high in self.padding]
        return lax.pad(x, jnp.asarray(value, x.dtype), config)


def _windows(params: Params, shape: Shape) -> _Windows:
    """A pool's windows with `params` over `shape`."""
    padding = tuple(params["padding"])
    strides = tuple(params["window_strides"])
    window = tuple(params["window_dimensions"])
    padded = tuple(
        n + low + high for n, (low, high) in zip(shape, padding, strict=True)
    )
    count = tuple(
        (n - w) // s + 1 for n, w, s in zip(padded, window, strides, strict=True)
    )
    return _Windows(shape, padding, window, strides, padded, count)
