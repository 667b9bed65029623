"""A storage plan: the fate of every residual in a forward program.

It says which values are stored, through which action, and how the backward pass
computes the residuals from those.
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxact._codec import Bitfield, Bitmask, Exact
from jaxact._decision import Decision, Reason
from jaxact._jaxpr.evaluate import bind, value_of
from jaxact._jaxpr.primitives import FUSED
from jaxact._jaxpr.read import variables_in
from jaxact._jaxpr.rewrite import prune
from jaxact._jaxpr.types import Atom, ClosedJaxpr, Env, Eqn, Var
from jaxact._plan.apart import Apart
from jaxact._plan.comparisons import Comparison, comparisons
from jaxact._plan.copies import Copy, copies
from jaxact._plan.forward import Forward
from jaxact._plan.fusion import in_memory
from jaxact._plan.order import Order
from jaxact._plan.products import with_products_apart
from jaxact._plan.terms import with_terms_apart
from jaxact._policy import Policy
from jaxact_kernels.normalization import Normalization, normalized_dtype

# Values are stored through no smaller deviation, and no larger one than its inverse.
_LEAST_SCALE = 1e-30


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """An equation that the backward pass evaluates.

    Attributes:
      side: for max or min whose first operand is only known rounded: the exact mask of
        where it won, and whether that is where the mask is true.
    """

    eqn: Eqn
    side: tuple[Var, bool] | None = None

    @property
    def inputs(self) -> list[Var]:
        """The variables that it reads."""
        masks = [] if self.side is None else [self.side[0]]
        return [*variables_in(self.eqn.invars), *masks]

    def __call__(self, env: Env) -> list[Any]:
        """The outputs, given the inputs' values."""
        values = [value_of(v, env) for v in self.eqn.invars]
        if self.side is None:
            return bind(self.eqn, values)
        mask, on_first = self.side
        out = self.eqn.outvars[0].aval
        first, second = (jnp.asarray(x, out.dtype) for x in values)
        pair = (first, second) if on_first else (second, first)
        with self.eqn.ctx.manager:
            return [jnp.where(env[mask], *pair)]


@dataclasses.dataclass(frozen=True, eq=False)
class Normalized:
    """An exact affine map with few coefficients, to store an array through.

    Attributes:
      mean, deviation: variables with the elements of some of the array's axes; no mean
        for a value that is centered already, or that a norm does not center.
      inverse: whether `deviation` is one over the deviation.
      axes: those of the array, in order; along the others the map is constant.
      order: that the array's axes are in first, where it is not their own.
      may_vanish: whether the program may have rows without a deviation.
      is_gathered: whether the coefficients are those of segments, which the elements
        of the array gather.
      steps: the equations that gather them, where they are not kept themselves.
      sources: variables that `steps` starts from.
      degree: the deviation is the root with this degree: 2 for a sum of squares.
      centered: the variable that the program subtracts the mean for.
      then: another map, by rows along other axes: a matrix has two norms.
    """

    mean: Var | None
    deviation: Var
    inverse: bool
    axes: tuple[int, ...]
    may_vanish: bool
    is_gathered: bool = False
    steps: tuple[Replay, ...] = ()
    sources: tuple[Var, ...] = ()
    degree: float = 1
    centered: Var | None = None
    then: "Normalized | None" = None
    order: Order | None = None

    def lying(self, order: Order) -> "Normalized":
        """The map for an array with its axes in this order, if there is one."""
        axes = tuple(order.index(axis) for axis in self.axes)
        if self.then is not None or list(axes) != sorted(axes):
            return self
        return dataclasses.replace(self, axes=axes, order=order)

    def of_power(self, exponent: float) -> "Normalized":
        """The map for a power with this exponent, if there is no mean."""
        then = self.then and self.then.of_power(exponent)
        return dataclasses.replace(self, degree=self.degree / exponent, then=then)

    @property
    def coefficients(self) -> list[Var]:
        """The mean, if there is one, and the deviation; those in the next map."""
        return self._own + (self.then.coefficients if self.then else [])

    @property
    def _own(self) -> list[Var]:
        """The coefficients without those in the next map."""
        return [v for v in (self.mean, self.deviation) if v is not None]

    @property
    def statistics(self) -> list[Var]:
        """The variables to keep: the coefficients, or their sources."""
        return list(self.sources) if self.is_gathered else self.coefficients

    @property
    def contents(self) -> Hashable:
        """Equal for maps by the same values."""
        own = (self.mean, self.deviation, self.inverse, self.axes, self.degree)
        return own, self.order, self.sources, self.then and self.then.contents

    def ordered(self, x: jax.Array) -> jax.Array:
        """`x` with its axes in the map's order."""
        return x if self.order is None else x.transpose(self.order)

    def apply(self, x: jax.Array, env: Env) -> jax.Array:
        """The normalized array to store for `x`, in float32 or wider."""
        x = self.ordered(x)
        x = self.normalization(x.ndim)(x, *self.operands(x, env))
        return self.then.apply(x, env) if self.then else x

    def normalization(self, rank: int) -> Normalization:
        """The map, without the next, for arrays with so many axes."""
        axes = tuple(axis - rank for axis in self.axes)
        return Normalization(axes, is_centered=self.mean is not None)

    def operands(self, x: jax.Array, env: Env) -> list[jax.Array]:
        """The coefficients of `normalization`, for an array in the map's order."""
        *mean, scale = self._coefficients(x, env)
        # No division for each element: a GPU takes ten instructions for one.
        return [*mean, scale if self.inverse else 1 / scale]

    def restore(self, v: Var, stored: jax.Array, env: Env) -> Env:
        """The variable `v`, and `centered`, given the normalized array.

        Not `centered` from `v`: XLA adds the mean there and subtracts it again, in each
        kernel that reads it (a ResNet-50 step is predicted to take 15.2 instead of 15.0
        ms on an H100). Nor both from one value, which XLA then writes to memory in some
        blocks: that step at 4 bits takes 733 MiB in place of 695, and 13 kernels more.
        """
        centered, mean = self._undo(stored, env)
        x = centered + mean[0] if mean else centered
        found: Env = {v: x.astype(v.aval.dtype)}
        if self.centered is not None:
            centered, _ = self._undo(stored, env)
            found[self.centered] = centered.astype(self.centered.aval.dtype)
        if self.order is not None:
            own = np.argsort(self.order)
            found = {u: value.transpose(own) for u, value in found.items()}
        return found

    def _undo(self, stored: jax.Array, env: Env) -> tuple[jax.Array, list[jax.Array]]:
        """`x` less its mean, and the mean, if there is one."""
        if self.then:  # which has no mean
            stored, _ = self.then._undo(stored, env)
        shape = [n if axis in self.axes else 1 for axis, n in enumerate(stored.shape)]
        coefficients = self._coefficients(stored, env)
        *mean, scale = [c.reshape(shape) for c in coefficients]
        return stored * (1 / scale if self.inverse else scale), mean

    def like(self, v: Var) -> jax.ShapeDtypeStruct:
        """The normalized array's shape and dtype, for a variable."""
        shape = v.aval.shape
        order = self.order or range(len(shape))
        dtype = normalized_dtype(v.aval.dtype)
        return jax.ShapeDtypeStruct(tuple(shape[axis] for axis in order), dtype)

    def _coefficients(self, x: jax.Array, env: Env) -> list[jax.Array]:
        """The mean, if there is one, and the scale; with the sizes of `axes`."""
        dtype = normalized_dtype(x.dtype)
        shape = [x.shape[axis] for axis in self.axes]
        env = dict(env) if self.steps else env
        for step in self.steps:
            env.update(zip(step.eqn.outvars, step(env), strict=True))
        *mean, scale = [env[v].reshape(shape).astype(dtype) for v in self._own]
        if not self.may_vanish:
            return [*mean, scale]
        # A row of zeros has none, in a program that never divides by it.
        is_scale = (scale > _LEAST_SCALE) & (scale < 1 / _LEAST_SCALE)
        scale = jnp.where(is_scale, scale, jnp.ones_like(scale))
        return [*mean, scale if self.degree == 1 else scale ** (1 / self.degree)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Both:
    """A map by rows' sums for an array without the largest element in each row."""

    apart: Apart
    norm: Normalized

    def apply(self, x: jax.Array, env: Env) -> jax.Array:
        """The array to store, given the residual."""
        return self.norm.apply(self.apart.apply(x, env), env)

    def restore(self, v: Var, stored: jax.Array, env: Env) -> Env:
        """The residual `v`, given the stored array."""
        return self.apart.restore(v, self.norm.restore(v, stored, env)[v], env)

    def like(self, v: Var) -> jax.ShapeDtypeStruct:
        """The stored array's shape and dtype, for a variable."""
        return self.norm.like(v)


@dataclasses.dataclass(frozen=True, eq=False)
class StoragePlan:
    """Which values are stored, and how backward has every residual.

    Attributes:
      decisions: for each variable that an action stores.
      kept: variables that are kept as they are, parameters among them.
      replay: the equations that backward evaluates, in order.
      all_decisions: about every residual, for reports.
      policy: that decided.
      normalized: the map that a variable is stored through, for some in `decisions`.
      apart: the map without the largest element in each row, for some; it comes first.
      is_checkpointed: whether the call is in a checkpoint that its policy asked for.
      origin: kept alive, so that equal calls find it.
    """

    forward: Forward
    decisions: dict[Var, Decision]
    kept: tuple[Var, ...]
    replay: tuple[Replay, ...]
    all_decisions: tuple[Decision, ...]
    policy: Policy
    normalized: dict[Var, Normalized] = dataclasses.field(default_factory=dict)
    apart: dict[Var, Apart] = dataclasses.field(default_factory=dict)
    is_checkpointed: bool = False
    origin: object = None

    @property
    def exact(self) -> list[Var]:
        """Variables that are marked and kept exactly."""
        return [v for v, d in self.decisions.items() if isinstance(d.action, Exact)]

    @property
    def of_parameters(self) -> list[Var]:
        """Those among `exact` that are made from parameters alone."""
        reason = Reason.OF_PARAMETERS
        return [v for v in self.exact if self.decisions[v].reason is reason]

    @property
    def packed(self) -> list[Var]:
        """Variables that a codec packs."""
        return [v for v, d in self.decisions.items() if not isinstance(d.action, Exact)]

    @property
    def stored_bits(self) -> float:
        """Bits of all codes and exact values, without scales."""
        return sum(v.aval.size * _bits(v, d) for v, d in self.decisions.items())

    @functools.cached_property
    def used_rules(self) -> tuple[int, ...]:
        """Indices: the policy's rules that matched a residual."""
        return tuple(sorted({d.rule for d in self.all_decisions if d.rule is not None}))

    @property
    def contents(self) -> Hashable:
        """Equal for plans for one forward program that are the same."""
        replay = tuple((id(step.eqn), step.side) for step in self.replay)
        normalized = tuple((v, n.contents) for v, n in self.normalized.items())
        decisions = tuple(self.decisions.items())
        apart = tuple(self.apart.items())
        return decisions, self.kept, replay, self.all_decisions, normalized, apart

    @functools.cached_property
    def fused(self) -> frozenset[Var]:
        """Packed variables that are computed where their encoding reads them."""
        return frozenset(v for v in self.packed if self._is_fused(v))

    def _is_fused(self, v: Var) -> bool:
        norm = self.normalized.get(v)
        # No kernel applies two maps to the elements that it reads.
        if norm is not None and (v in self.apart or norm.then is not None):
            return True
        is_computed = self.decisions[v].residual.primitive in FUSED
        return is_computed and v not in self._in_memory

    @functools.cached_property
    def compared(self) -> dict[Var, Comparison]:
        """The packed masks that are packed from another value."""
        jaxpr = self.forward.jaxpr
        masks = [v for v in self.packed if type(self.decisions[v].codec) is Bitmask]
        if not masks:
            return {}
        # A checkpoint evaluates the call again for its residuals, not for its outputs.
        whole = in_memory(jaxpr, []) if self.is_checkpointed else self._in_memory
        return comparisons(jaxpr, masks, whole)

    def source(self, v: Var) -> Var:
        """The variable from which a residual is packed: itself, or another value."""
        return self.compared[v].source if v in self.compared else v

    @functools.cached_property
    def _in_memory(self) -> frozenset[Var]:
        return in_memory(self.forward.jaxpr, self._outputs)

    @property
    def _outputs(self) -> Sequence[Atom]:
        """Those of the call, among the outputs of `forward`."""
        return self.forward.jaxpr.outvars[: self.forward.num_outputs]

    @functools.cached_property
    def copies(self) -> dict[Var, Copy]:
        """The packed variables that are in memory otherwise than as themselves."""
        whole = [v for v in self.packed if v not in self.apart]
        codecs = {v: self.decisions[v].codec for v in whole}
        return copies(self.forward.jaxpr, codecs)

    @functools.cached_property
    def norms(self) -> dict[Var, Normalized]:
        """Those in `normalized`, of arrays as they lie in memory."""
        moved = self.copies
        return {
            v: norm.lying(moved[v].order) if v in moved else norm
            for v, norm in self.normalized.items()
        }

    @functools.cached_property
    def maps(self) -> dict[Var, Normalized | Copy | Apart | _Both]:
        """What some packed variables are encoded through: a norm, or their copy."""
        both = {
            v: _Both(one, self.normalized[v])
            for v, one in self.apart.items()
            if v in self.normalized
        }
        return {**self.copies, **self.norms, **self.apart, **both}

    @functools.cached_property
    def program(self) -> ClosedJaxpr:
        """The equations for the outputs and `read`, with those as outputs."""
        jaxpr = self.forward.jaxpr
        by_kernels = [v for v in self.packed if v not in self.fused]
        program = prune(jaxpr, [*self._outputs, *self.read])
        program = with_terms_apart(program, len(self._outputs), self.forward.own)
        return with_products_apart(program, by_kernels)

    @functools.cached_property
    def read(self) -> list[Var]:
        """The variables that outlive the forward pass, or are packed instead."""
        return list(dict.fromkeys(map(self.source, self.saved)))

    @functools.cached_property
    def saved(self) -> list[Var]:
        """The variables that outlive the forward pass."""
        return [*self.decisions, *self.kept]


def _bits(v: Var, decision: Decision) -> float:
    """Bits for an element."""
    if isinstance(decision.codec, Bitmask):
        return 1
    if isinstance(decision.codec, Bitfield):
        return decision.codec.width
    return decision.codec.bits or 8 * v.aval.dtype.itemsize
