"""Max-pooling whose derivative keeps one small integer for each window.

JAX keeps the whole input of `reduce_window_max` to find the maximum again; rounded, it
finds another one. Kept instead is the place of the maximum inside its window, which is
exact (the first one in row-major order, as JAX has it).
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jaxact._jaxpr.evaluate import bind
from jaxact._jaxpr.read import is_float
from jaxact._jaxpr.rewrite import Body, new_equation, with_outputs

pool_p = jex.Primitive("jaxact_max_pool")
pool_p.multiple_results = True

MAX_WINDOW = 256  # places must fit into eight bits


def with_pools(jaxpr: Any, depends: Callable[[Any], bool]) -> Any:
    """`jaxpr` with a pool for every `reduce_window_max` that is differentiated."""

    def pooled(eqn: Any) -> Any:
        if eqn.primitive.name != "reduce_window_max" or not is_pool(eqn, depends):
            return eqn
        return new_equation(eqn, pool_p, eqn.invars, eqn.outvars, {"eqn": eqn})

    return with_outputs(jaxpr, [*map(pooled, jaxpr.eqns)], jaxpr.outvars)


def is_pool(eqn: Any, depends: Callable[[Any], bool]) -> bool:
    params, x = eqn.params, eqn.invars[0]
    plain = all(d == 1 for d in (*params["base_dilation"], *params["window_dilation"]))
    small = np.prod(params["window_dimensions"]) <= MAX_WINDOW
    return bool(plain and small and is_float(x) and depends(x))


def pool_body(eqn: Any) -> Body | None:
    """What a pool evaluates."""
    if eqn.primitive is not pool_p:
        return None
    inner = eqn.params["eqn"]
    return Body(inner.invars, [inner], inner.outvars)


def _differentiate(primals: Any, tangents: Any, *, eqn: Any) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    out = bind(eqn, primals)[0]
    if isinstance(t, ad.Zero):
        return [out], [ad.Zero(eqn.outvars[0].aval.to_tangent_aval())]
    windows = _Windows(eqn.params, x.shape)
    return [out], [pick_p.bind(windows.place_of_maximum(x, out), t, windows=windows)]


pool_p.def_abstract_eval(lambda *_, eqn: [v.aval for v in eqn.outvars])
ad.primitive_jvps[pool_p] = _differentiate

# The elements at the maxima; a primitive, so that its residual is one small integer
# for each window, and not a mask for each place in it.
pick_p = jex.Primitive("jaxact_pick")


def _pick(place: jax.Array, t: jax.Array, *, windows: "_Windows") -> jax.Array:
    return windows.pick(place, t)


def _transpose(ct: Any, place: Any, t: Any, *, windows: "_Windows") -> Any:
    spread = ad.Zero(t.aval) if isinstance(ct, ad.Zero) else windows.spread(place, ct)
    return None, spread


def _batch(args: Any, dims: Any, *, windows: "_Windows") -> Any:
    return jax.vmap(windows.pick, in_axes=dims)(*args), 0


pick_p.def_impl(_pick)
pick_p.def_abstract_eval(lambda place, t, *, windows: t.update(shape=place.shape))
ad.primitive_transposes[pick_p] = _transpose
batching.primitive_batchers[pick_p] = _batch
mlir.register_lowering(pick_p, mlir.lower_fun(_pick, multiple_results=False))


class _Windows:
    """The windows of one pool over an array of the given shape."""

    def __init__(self, params: dict[str, Any], shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.padding = tuple(params["padding"])
        self.strides = tuple(params["window_strides"])
        self.window = tuple(params["window_dimensions"])
        self.padded = tuple(
            n + low + high for n, (low, high) in zip(shape, self.padding, strict=True)
        )
        self.count = tuple(
            (n - w) // s + 1
            for n, w, s in zip(self.padded, self.window, self.strides, strict=True)
        )

    def _offsets(self) -> list[tuple[int, tuple[int, ...]]]:
        return list(enumerate(itertools.product(*map(range, self.window))))

    def _slice(self, padded: jax.Array, offset: tuple[int, ...]) -> jax.Array:
        stop = [
            o + (n - 1) * s + 1
            for o, n, s in zip(offset, self.count, self.strides, strict=True)
        ]
        return lax.slice(padded, offset, stop, self.strides)

    def _pad(self, x: jax.Array, value: float) -> jax.Array:
        config = [(low, high, 0) for low, high in self.padding]
        return lax.pad(x, jnp.asarray(value, x.dtype), config)

    def place_of_maximum(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """uint8 of the windows' shape: where in its window each maximum is."""
        padded = self._pad(x, -jnp.inf)
        place = jnp.zeros(self.count, jnp.uint8)
        for k, offset in reversed(self._offsets()):
            hit = self._slice(padded, offset) == out
            place = jnp.where(hit, jnp.uint8(k), place)
        return place

    def pick(self, place: jax.Array, t: jax.Array) -> jax.Array:
        """The elements of `t` at the maxima."""
        padded, out = self._pad(t, 0), jnp.zeros(self.count, t.dtype)
        for k, offset in self._offsets():
            out = jnp.where(place == k, self._slice(padded, offset), out)
        return out

    def spread(self, place: jax.Array, ct: jax.Array) -> jax.Array:
        """The transpose of `pick`."""
        zero = jnp.zeros((), ct.dtype)
        total = jnp.zeros(self.padded, ct.dtype)
        for k, offset in self._offsets():
            config = [
                (o, n - o - (c - 1) * s - 1, s - 1)
                for o, n, c, s in zip(
                    offset, self.padded, self.count, self.strides, strict=True
                )
            ]
            total += lax.pad(jnp.where(place == k, ct, zero), zero, config)
        inner = [(-low, -high, 0) for low, high in self.padding]
        return lax.pad(total, zero, inner)
