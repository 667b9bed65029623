"""A call's forward program: its outputs and its residuals, in one jaxpr.

`trace_forward` traces `jax.vjp` into one jaxpr whose outputs are the call's
outputs followed by the residuals, so where each residual comes from can be read.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.stages import Wrapped

from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.evaluate import trace_jitted
from jaxact._jaxpr.primitives import COPIES, RESHAPES
from jaxact._jaxpr.read import is_literal, is_widened, producers_of, variables_in
from jaxact._jaxpr.rewrite import with_outputs, without_unused
from jaxact._jaxpr.types import (
    Array,
    Atom,
    ClosedJaxpr,
    Dtype,
    Eqn,
    Jaxpr,
    Producers,
    Var,
)
from jaxact._plan.apart import Apart
from jaxact._trace import Static

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Backward:
    """The backward program as it would run on exact residuals.

    Attributes:
      residuals: its variable (or literal) for each residual, in the order of the
        forward program's.
      cotangents: of the outputs that can have one.
      eqns: its computation.
      gradients: its results, one for each active value.
    """

    residuals: tuple[Atom, ...]
    cotangents: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    gradients: tuple[Atom, ...]

    @functools.cached_property
    def gradient_dtypes(self) -> list[Dtype]:
        """For each gradient the narrowest type that holds it without loss.

        The gradient of a weight that the program casts is cast last.
        """
        producers = producers_of(self.eqns)
        return [_narrowest(v, producers) for v in self.gradients]

    @functools.cached_property
    def is_zero(self) -> list[bool]:
        """Whether JAX filled a gradient with zeros, as an unused argument's.

        It would sum them over the devices in a `shard_map` that checks no types. (A
        gradient without a cotangent in it may be a custom rule's, and any number.)
        """
        producers = producers_of(self.eqns)
        return [_is_zero(v, producers) for v in self.gradients]


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """The traced forward program.

    Attributes:
      jaxpr, consts: inputs are the rounding seed and the call's values; outputs are the
        call's outputs, then the residuals.
      num_outputs: how many the call has.
      vjp_tree: rebuilds the backward function from the residuals; None where these are
        others than its own.
      backward: the equations of that function.
      apart: for some residuals the map without the largest element in each row.
      own: the residuals that JAX's own backward function reads.
    """

    jaxpr: Jaxpr
    consts: Sequence[Array]
    num_outputs: int
    vjp_tree: Any
    backward: Backward
    apart: Mapping[Var, Apart] = dataclasses.field(default_factory=dict)
    own: frozenset[Var] = frozenset()

    @property
    def residuals(self) -> list[Atom]:
        """One variable (or literal) for each residual, in the order of `vjp_tree`."""
        return list(self.jaxpr.outvars[self.num_outputs :])

    @property
    def residual_pairs(self) -> list[tuple[Var, Var]]:
        """Each residual's variables, in the forward and in the backward program."""
        pairs = zip(self.residuals, self.backward.residuals, strict=True)
        return [(v, own) for v, own in pairs if not (is_literal(v) or is_literal(own))]

    @functools.cached_property
    def backward_program(self) -> Jaxpr:
        """The backward program, from residuals and cotangents to gradients."""
        backward = self.backward
        known = {*self.jaxpr.constvars, *backward.cotangents}
        known.update(v for eqn in backward.eqns for v in eqn.outvars)
        # Gradients too: where no output has a cotangent, all are zeros made before.
        given = dict.fromkeys(variables_in([*backward.residuals, *backward.gradients]))
        inputs = [v for v in given if v not in known] + [*backward.cotangents]
        info = self.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        return self.jaxpr.replace(
            invars=inputs,
            eqns=list(backward.eqns),
            outvars=list(backward.gradients),
            debug_info=info,
        )

    @functools.cached_property
    def used_backward(self) -> Sequence[Eqn]:
        """The backward program's equations, but those that no gradient needs.

        A custom rule differentiates a softmax's maximum too, and drops it.
        """
        return without_unused(self.backward_program).eqns


def active_of(values: Sequence[T], is_active: Sequence[bool]) -> list[T]:
    """The values that are differentiated."""
    return [v for v, a in zip(values, is_active, strict=True) if a]


def with_active(
    values: Sequence[T], is_active: Sequence[bool], active: Sequence[T]
) -> list[T]:
    """`values`, with others in the active places."""
    others = iter(active)
    return [next(others) if a else v for v, a in zip(values, is_active, strict=True)]


# Stands for the cotangent of an output while the backward program is only traced.
cotangent_p = jex.Primitive("jaxact_cotangent")
cotangent_p.def_abstract_eval(lambda aval: aval)


@dataclasses.dataclass(frozen=True)
class _Counts:
    outputs: int
    residuals: int
    vjp_tree: Any


# Without a repr: JAX takes the text of a function that is traced, for messages, and
# this one's would be all of its latest trace.
@dataclasses.dataclass(eq=False, repr=False)
class ForwardTrace:
    """Traces the vjp of `run(seed, *values)` for the active values, and its use.

    JAX finds an earlier trace by the function that is traced, which is this object,
    and by all that a trace depends on: shapes, meshes, settings.

    Attributes:
      latest: the last trace, and what was made of it.
    """

    run: Callable[..., list[Any]]
    is_active: tuple[bool, ...]
    latest: tuple[ClosedJaxpr, Forward] | None = None

    def trace(self, seed: Array, values: Sequence[Array]) -> Forward:
        """The forward program; the same object if JAX has the same trace."""
        closed, tree = trace_jitted(self._jitted, seed, *values)
        if self.latest is None or self.latest[0] is not closed:
            _, static = jax.tree.unflatten(tree, range(tree.num_leaves))
            self.latest = closed, _forward(closed, static.value)
        return self.latest[1]

    @functools.cached_property
    def _jitted(self) -> Wrapped:
        return jax.jit(self)

    def __call__(self, seed: Array, *values: Array) -> tuple[list[Any], Static]:
        """Outputs, residuals and gradients, and how many there are of each."""

        def of_active(*xs: Array) -> list[Any]:
            return self.run(seed, *with_active(values, self.is_active, xs))

        out, vjp = jax.vjp(of_active, *active_of(values, self.is_active))
        leaves, tree = jax.tree.flatten(vjp)
        gradients = jax.tree.leaves(vjp([_cotangent(x) for x in out]))
        # Python numbers too: an output of a scan, a rule's own zero.
        exist = [g for g in gradients if getattr(g, "dtype", None) != jax.dtypes.float0]
        return [*out, *leaves, *exist], Static(_Counts(len(out), len(leaves), tree))


def trace_forward(
    run: Callable[..., list[Any]],
    seed: Array,
    values: Sequence[Array],
    is_active: Sequence[bool],
) -> Forward:
    """Trace the vjp of `run(seed, *values)` for the active values, and its use."""
    return ForwardTrace(run, tuple(is_active)).trace(seed, values)


def _forward(closed: ClosedJaxpr, counts: _Counts) -> Forward:
    jaxpr, consts = open_jaxpr(closed)
    eqns, outvars = list(jaxpr.eqns), jaxpr.outvars
    is_cotangent = [eqn.primitive is cotangent_p for eqn in eqns]
    end = is_cotangent.index(True) if any(is_cotangent) else len(eqns)
    stop = counts.outputs + counts.residuals
    backward = Backward(
        tuple(outvars[counts.outputs : stop]),
        tuple(v for eqn in eqns if eqn.primitive is cotangent_p for v in eqn.outvars),
        tuple(eqn for eqn in eqns[end:] if eqn.primitive is not cotangent_p),
        tuple(outvars[stop:]),
    )
    jaxpr = with_outputs(jaxpr, eqns[:end], outvars[:stop])
    return Forward(jaxpr, tuple(consts), counts.outputs, counts.vjp_tree, backward)


def _narrowest(v: Atom, producers: Producers) -> Dtype:
    """The narrowest type that `v` has been widened from, and only moved since."""
    dtype, moves = v.aval.dtype, RESHAPES | {"convert_element_type"}
    while not is_literal(v) and v in producers:
        if producers[v].primitive.name not in moves:
            break
        v = producers[v].invars[0]
        if not is_widened(v.aval.dtype, dtype):
            break
        dtype = v.aval.dtype
    return dtype


def _is_zero(v: Atom, producers: Producers) -> bool:
    """Whether `v` is a literal zero, or many."""
    while not is_literal(v) and v in producers:
        if producers[v].primitive.name not in RESHAPES | COPIES:
            return False
        v = producers[v].invars[0]
    return is_literal(v) and not np.any(v.val)


def _cotangent(x: Array) -> Any:
    if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return cotangent_p.bind(x)
    return np.zeros(np.shape(x), jax.dtypes.float0)
