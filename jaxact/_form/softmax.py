"""A softmax whose derivative keeps its output alone.

JAX keeps the exponential, the sums along its rows and the quotient. The derivative is a
function of the quotient y alone: dy = y (dt - sum(y dt)). And y is in memory anyway,
for the product with the values: one kernel computes the softmax and another one packs
its output. To store an exponential takes two more (predicted for an H100, ViT-B's first
two layers at batch 64 and 4 bits: 1.23 instead of 1.18 times as long as uncompressed).

In tables and rules the output goes by its exponential's name, as a value that is
skewed like it.
"""

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from jaxact._form.pole_arguments import arguments_near_poles
from jaxact._form.returned import values_returned
from jaxact._form.statistics import contracted_in
from jaxact._jaxpr.evaluate import bind, traced_at, value_of
from jaxact._jaxpr.links import Links
from jaxact._jaxpr.primitives import CASTS, COPIES, LABELS, RESHAPES, WITH_POLES
from jaxact._jaxpr.read import (
    is_literal,
    keeps_elements,
    loses_precision,
    names_inside,
    variables_in,
)
from jaxact._jaxpr.rewrite import Body, new_equation, with_outputs
from jaxact._jaxpr.types import (
    Array,
    Atom,
    Axes,
    Dtype,
    Env,
    Eqn,
    Jaxpr,
    Producers,
    Tangent,
    Var,
)
from jaxact._plan.decoded_again import decoded_again
from jaxact._plan.facts import is_activation
from jaxact._plan.fusion import narrowed
from jaxact._plan.program import Program, found_once

# Of one operand, to one result, with a derivative that does the same.
_MOVES = RESHAPES | {"slice"} | COPIES - LABELS - {"stop_gradient"}

softmax_p = jex.Primitive("jaxact_softmax")
softmax_p.multiple_results = True


@dataclass(frozen=True, eq=False)
class Softmax:
    """The equations of a softmax, from its exponential to its quotient.

    Attributes:
      axes: that it sums along.
      moves: those that the exponential goes through first: heads beside queries.
    """

    eqns: Sequence[Eqn]
    axes: tuple[int, ...]
    moves: Sequence[Eqn] = ()

    @property
    def scores(self) -> Atom:
        """The exponential's operand."""
        return self.eqns[0].invars[0]

    @property
    def exponential(self) -> Var:
        return self.eqns[0].outvars[0]

    @property
    def output(self) -> Var:
        return self.eqns[-1].outvars[0]


@found_once
def softmaxes(program: Program) -> Sequence[Softmax]:
    """The softmaxes in a program of which nothing but the output is read."""
    outputs = set(variables_in(program.jaxpr.outvars))

    def is_apart(softmax: Softmax) -> bool:
        inside = {v for eqn in softmax.eqns[:-1] for v in eqn.outvars}
        own = set(map(id, softmax.eqns))
        readers = (e for v in inside for e in program.readers.get(v, ()))
        return inside.isdisjoint(outputs) and all(id(e) in own for e in readers)

    quotients = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "div"]
    found = [_softmax(eqn, program.producers) for eqn in quotients]
    return [one for one in found if one is not None and is_apart(one)]


def _softmax(quotient: Eqn, producers: Producers) -> Softmax | None:
    """The softmax that ends with an equation, if one does."""
    numerator, divisor = quotient.invars
    back = list(_makers(divisor, producers, CASTS | {"reshape", "broadcast_in_dim"}))
    sums = _maker(back[-1].invars[0], producers, "reduce_sum") if back else None
    moves = list(_makers(numerator, producers, _MOVES))[::-1]
    moved = moves[0].invars[0] if moves else numerator
    exponential = _maker(moved, producers, "exp")
    if sums is None or exponential is None:
        return None
    casts = list(_makers(sums.invars[0], producers, CASTS))
    axes = tuple(sums.params["axes"])
    if [sums, *casts][-1].invars[0] is not numerator:
        return None
    whole = [exponential, *moves][-1].outvars[0]
    if not _puts_back(back[::-1], axes, whole):
        return None
    eqns = (exponential, *moves, *casts[::-1], sums, *back[::-1], quotient)
    # Of integers the sum has no derivative, and of float8 a rounded one.
    if any(map(loses_precision, eqns)):
        return None
    return Softmax(eqns, axes, moves)


def _maker(v: Atom, producers: Producers, name: str) -> Eqn | None:
    """The equation that makes `v`, if it has this name."""
    eqn = None if is_literal(v) else producers.get(v)
    return eqn if eqn is not None and eqn.primitive.name == name else None


def _makers(v: Atom, producers: Producers, names: Collection[str]) -> Iterator[Eqn]:
    """The equations with these names that make `v`, the last one first."""
    while not is_literal(v) and v in producers:
        if producers[v].primitive.name not in names:
            return
        yield producers[v]
        v = producers[v].invars[0]


def _puts_back(eqns: Sequence[Eqn], axes: Sequence[int], whole: Var) -> bool:
    """Whether moves of sums along axes put those back, with one element or repeated."""
    shape = whole.aval.shape
    every = tuple(range(len(shape)))
    others = tuple(i for i in every if i not in axes)
    single = tuple(1 if i in axes else n for i, n in enumerate(shape))
    for eqn in eqns:
        before, after = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))
        if eqn.primitive.name == "broadcast_in_dim":
            placed = others if len(before) < len(shape) else every
            if tuple(eqn.params["broadcast_dimensions"]) != placed:
                return False
        if after not in (before, single, shape):
            return False
    return eqns[-1].outvars[0].aval.shape in (single, shape)


def with_softmaxes(program: Program, links: Links) -> Jaxpr:
    """A program with one equation for every softmax that is differentiated.

    Its derivative takes the cotangent's mean off, but for two kinds. Attention, whose
    output a product contracts with, has no cotangents that are alike and would pay for
    the sums (ViT-B at 4 bits on an H100: predicted 27.9 instead of 27.3 ms, 1277
    instead of 1247 MiB). And where a function with a pole reads it, as in
    log(softmax(x)), the cotangents' mean may be so large that it magnifies the last bit
    in a row's sum.

    Args:
      links: the program's.
    """
    jaxpr = program.jaxpr
    depends = [s for s in softmaxes(program) if is_activation(program.facts, s.output)]
    found = {id(s.eqns[-1]): s for s in depends}
    if not found:
        return jaxpr
    inside = {id(eqn) for s in found.values() for eqn in s.eqns[:-1]}
    plain = contracted_in(jaxpr) | _read_by_poles(jaxpr)
    plain |= arguments_near_poles(program).behind(links.carried, with_sums=True)
    plain |= values_returned(program, links.results)
    narrow = narrowed(jaxpr, jaxpr.outvars)
    eqns = []
    for eqn in jaxpr.eqns:
        if id(eqn) in found:
            one = found[id(eqn)]
            params = {
                "softmax": one,
                "is_plain": one.output in plain,
                "narrow": narrow.get(one.output),
            }
            eqn = new_equation(eqn, softmax_p, [one.scores], eqn.outvars, params)
        if id(eqn) not in inside:
            eqns.append(eqn)
    return with_outputs(jaxpr, eqns, jaxpr.outvars)


def _read_by_poles(jaxpr: Jaxpr) -> set[Var]:
    """Variables that a function with a pole reads, also past elementwise functions."""
    found: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        # Some are called inside custom rules: `jax.scipy.special.rel_entr`.
        has_pole = not WITH_POLES.isdisjoint(names_inside(eqn))
        is_read = keeps_elements(eqn) and not found.isdisjoint(eqn.outvars)
        if has_pole or is_read:
            found.update(variables_in(eqn.invars))
    return found


def softmax_body(eqn: Eqn) -> Body | None:
    """The equations that a softmax evaluates."""
    if eqn.primitive is not softmax_p:
        return None
    one = eqn.params["softmax"]
    return Body([one.scores], one.eqns, [one.output])


def _differentiate(
    primals: tuple[Array],
    tangents: tuple[Tangent],
    *,
    softmax: Softmax,
    is_plain: bool,
    narrow: Dtype | None,
) -> tuple[list[Any], list[Tangent]]:
    """`is_plain`: the cotangent keeps its mean; `narrow`: if only copies with this
    dtype are read, and a sum over a row another decoded copy than the values that it
    scales, see `decoded_again.py`.
    """
    env: Env = {softmax.scores: primals[0]}
    for eqn in softmax.eqns:
        inputs = [value_of(v, env) for v in eqn.invars]
        env.update(zip(eqn.outvars, bind(eqn, inputs), strict=True))
    y, (t,) = env[softmax.output], tangents
    if isinstance(t, ad.Zero):
        return [y], [ad.Zero(softmax.output.aval.to_tangent_aval())]
    with traced_at(softmax.eqns[-1]):
        for eqn in softmax.moves:
            (t,) = bind(eqn, [t])
        summed = y if narrow is None else decoded_again(y, narrow)
        slope = slope_p.bind(y, summed, t, axes=softmax.axes, is_plain=is_plain)
        return [y], [slope]


softmax_p.def_abstract_eval(lambda _, *, softmax, **_params: [softmax.output.aval])
ad.primitive_jvps[softmax_p] = _differentiate

# The derivative at y, times a tangent; a primitive for the sake of its transpose.
slope_p = jex.Primitive("jaxact_softmax_slope")


def _slope(
    y: jax.Array,
    summed: jax.Array,
    t: jax.Array,
    *,
    axes: tuple[int, ...],
    is_plain: bool,
) -> jax.Array:
    return y * (t - jnp.sum(summed * t, axes, keepdims=True))


def _transpose(
    ct: Tangent,
    y: jax.Array,
    summed: jax.Array,
    t: Tangent,
    *,
    axes: tuple[int, ...],
    is_plain: bool,
) -> tuple[None, None, Tangent]:
    """y (ct - sum(y ct)) of the cotangent less its mean, which changes nothing if y
    sums to 1. Rounded it does not quite, and where cotangents are alike, as those of
    probabilities near each other, the mean's part is all the noise: with it
    sum(sin(softmax(x))) erred by 2 gradients at 8 bits.
    """
    if isinstance(ct, ad.Zero):
        return None, None, ad.Zero(t.aval)
    if is_plain:
        return None, None, _slope(y, summed, ct, axes=axes, is_plain=True)
    wide = np.promote_types(y.dtype, np.float32)
    total = functools.partial(jnp.sum, axis=axes, keepdims=True, dtype=wide)
    missing = 1 - total(summed)
    mean = total(ct) * (missing.size / y.size)
    # In a form whose three sums need one pass over y and ct.
    sums = total(summed * ct) + mean * missing
    return None, None, y * (ct - sums.astype(ct.dtype))


def _batch(
    args: tuple[jax.Array, ...], dims: Axes, **params: Any
) -> tuple[jax.Array, int]:
    run = functools.partial(_slope, **params)
    return jax.vmap(run, in_axes=tuple(dims))(*args), 0


slope_p.def_impl(_slope)
slope_p.def_abstract_eval(lambda y, summed, t, **_params: t)
ad.primitive_transposes[slope_p] = _transpose
batching.primitive_batchers[slope_p] = _batch
mlir.register_lowering(slope_p, mlir.lower_fun(_slope, multiple_results=False))
