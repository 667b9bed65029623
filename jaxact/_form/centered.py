"""Products of a softmax's weights, whose derivative sees values less their mean.

The weights' tangents sum to 0 along a row, so an offset that all values have in common
changes no derivative. With rounded weights it does: those tangents do not quite sum to
0, and the rest times the offset reaches the scores, where it meets the keys, and theirs
too. At 4 bits, with keys and values offset by three standard deviations, the gradients
by an attention's queries erred by 1.25 of their norm; by 0.25 without the values' mean,
as with no offset.

So JAX's derivative by the weights is evaluated with values less the mean over a few of
their rows, after they are decoded: nothing more is stored. Any mean would do; the other
rows would cost a pass over all values (an H100: 11 microseconds in a ViT-B layer).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jaxact._form.softmax import softmax_p
from jaxact._jaxpr.axes import Labels, moved
from jaxact._jaxpr.evaluate import bind, placed, traced_at
from jaxact._jaxpr.primitives import MOVES
from jaxact._jaxpr.read import is_float, is_literal, variables_in
from jaxact._jaxpr.rewrite import Body, new_equation, with_outputs
from jaxact._jaxpr.types import Axes, Eqn, Jaxpr, Predicate, Tangent, Var

# Of so many rows the mean is taken: it is off by 1 / 5.7 of a standard deviation.
_ROWS = 32
# Of an axis in a softmax's output, if its elements along that sum to 1.
_ROW = 1
_MOVES = MOVES - {"stop_gradient"}

mix_p = jex.Primitive("jaxact_mix")
mix_p.multiple_results = True


@dataclass(frozen=True, eq=False)
class Mix:
    """A product of a softmax's weights with values.

    Attributes:
      eqn: the `dot_general`.
      side: which of its operands are the values.
      axes: theirs along which it sums.
    """

    eqn: Eqn
    side: int
    axes: tuple[int, ...]


def with_mixes(jaxpr: Jaxpr, depends: Predicate) -> Jaxpr:
    """`jaxpr` with each product between a `softmax_p` and activations as a mix."""
    labels: dict[Var, Labels] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        moves = eqn.primitive.name in _MOVES
        if eqn.primitive is softmax_p:
            (output,) = eqn.outvars
            axes = eqn.params["softmax"].axes
            every = range(output.aval.ndim)
            labels[output] = tuple(_ROW if i in axes else None for i in every)
        elif moves and not labels.keys().isdisjoint(variables_in(eqn.invars)):
            labels[eqn.outvars[0]] = moved(eqn, labels[eqn.invars[0]])
        elif eqn.primitive.name == "dot_general":
            mix = _mix(eqn, labels, depends)
            if mix is not None:
                eqn = new_equation(eqn, mix_p, eqn.invars, eqn.outvars, {"mix": mix})
        eqns.append(eqn)
    return with_outputs(jaxpr, eqns, jaxpr.outvars)


def _mix(eqn: Eqn, labels: dict[Var, Labels], depends: Predicate) -> Mix | None:
    """A product as a mix, if it is one."""
    contracted, _ = eqn.params["dimension_numbers"]
    for side, values in enumerate(eqn.invars):
        weights = eqn.invars[1 - side]
        if is_literal(values) or is_literal(weights) or weights not in labels:
            continue
        rows = [i for i, label in enumerate(labels[weights]) if label == _ROW]
        is_along_rows = rows and set(rows) == set(contracted[1 - side])
        if is_along_rows and depends(values) and _has_mean(values):
            return Mix(eqn, side, tuple(contracted[side]))
    return None


def _has_mean(values: Var) -> bool:
    """Whether values less their mean have their dtype: float8 ones are too coarse."""
    return is_float(values) and jnp.finfo(values.aval.dtype).bits > 8


def mix_body(eqn: Eqn) -> Body | None:
    """The product that a mix evaluates."""
    if eqn.primitive is not mix_p:
        return None
    inner = eqn.params["mix"].eqn
    return Body(inner.invars, [inner], inner.outvars)


def _differentiate(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[Tangent, Tangent], *, mix: Mix
) -> tuple[list[jax.Array], list[Tangent]]:
    (out,) = bind(mix.eqn, primals)
    terms = []
    for side, t in enumerate(tangents):
        if isinstance(t, ad.Zero):
            continue
        other = primals[1 - side]
        if side != mix.side:
            with traced_at(mix.eqn):
                other = centered_p.bind(other, axes=mix.axes)
        pair = (t, other) if side == 0 else (other, t)
        terms += bind(mix.eqn, pair)
    if not terms:
        return [out], [ad.Zero(mix.eqn.outvars[0].aval.to_tangent_aval())]
    return [out], [functools.reduce(ad.add_jaxvals, terms)]


mix_p.def_abstract_eval(lambda *_, mix: [v.aval for v in mix.eqn.outvars])
ad.primitive_jvps[mix_p] = _differentiate

# Values less their mean; a primitive, as what is computed from decoded values alone is
# evaluated anew in the backward pass.
centered_p = jex.Primitive("jaxact_centered")


def _centered(x: jax.Array, *, axes: Sequence[int]) -> jax.Array:
    """`x` less the mean of at most `_ROWS` rows, evenly spaced along the axes."""
    most = int(_ROWS ** (1 / len(axes)))
    strides = [-(-n // most) if i in axes else 1 for i, n in enumerate(x.shape)]
    count = math.prod(-(-x.shape[i] // strides[i]) for i in axes)
    aval = jax.typeof(x)
    if any(aval.sharding.spec[i] is not None for i in axes):
        # The same rows; a slice of an axis that is split over devices may not divide.
        rows = x
        for i in axes:
            number = placed(lax.broadcasted_iota(np.int32, x.shape, i), aval)
            rows = jnp.where(number % strides[i] == 0, rows, jnp.zeros_like(rows))
    else:
        rows = lax.slice(x, (0,) * x.ndim, x.shape, strides)
    total = jnp.sum(rows, axes, dtype=np.promote_types(x.dtype, np.float32))
    return x - jnp.expand_dims(total / count, axes).astype(x.dtype)


def _transpose(ct: Tangent, x: jax.Array, *, axes: Sequence[int]) -> list[Tangent]:
    run = functools.partial(_centered, axes=axes)
    return list(jax.linear_transpose(run, x.aval)(ct))


def _batch(
    args: tuple[jax.Array], dims: Axes, *, axes: Sequence[int]
) -> tuple[jax.Array, int]:
    run = functools.partial(_centered, axes=axes)
    return jax.vmap(run, in_axes=tuple(dims))(*args), 0


centered_p.def_impl(_centered)
centered_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(centered_p, _transpose)
batching.primitive_batchers[centered_p] = _batch
mlir.register_lowering(centered_p, mlir.lower_fun(_centered, multiple_results=False))
