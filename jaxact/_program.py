"""The forward program of a call: its outputs, its residuals, and what becomes of each.

`trace_forward` traces `jax.vjp` of the call into one jaxpr whose outputs are the call's
outputs followed by the residuals, so where each residual comes from can be read. A
`Plan` says what of it is stored and how the backward pass has the residuals from that.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxact import _compat
from jaxact._call import Flat, Kind
from jaxact._codec import Action, Exact
from jaxact._flow import union
from jaxact._mark import mark_p
from jaxact._policy import Decision, Policy
from jaxact._surgery import prune

# Equations that move or convert values: recomputing them costs next to nothing.
MOVES = frozenset(
    "reshape transpose broadcast_in_dim squeeze expand_dims convert_element_type "
    "copy copy_p stop_gradient slice rev".split()
)

REFERENCED = "a parameter, referenced in place"
OF_PARAMETERS = "made of parameters alone"
STORED_INSIDE = "stored by a compressed call inside"

UNKNOWN, ACTIVATION, STORED = 1, 2, 4  # facts about a value
_FACTS = {Kind.PARAMETER: 0, Kind.UNKNOWN: UNKNOWN, Kind.ACTIVATION: ACTIVATION}


def input_facts(flat: Flat) -> list[int]:
    """Integers and keys are never parameters: an embedding is an activation."""
    return [
        _FACTS[kind] if is_float(v) or kind is not Kind.PARAMETER else UNKNOWN
        for kind, v in zip(flat.kinds, flat.invars, strict=True)
    ]


def kind_of(facts: int) -> Kind:
    if facts & ACTIVATION:
        return Kind.ACTIVATION
    return Kind.UNKNOWN if facts & UNKNOWN else Kind.PARAMETER


def learn(eqn: Any, facts: Sequence[int], around: tuple[Any, ...]) -> int:
    """What is computed, not just moved, from an unknown argument is an activation."""
    out = union(eqn, facts, around)
    if out & UNKNOWN and eqn.primitive.name not in MOVES:
        out |= ACTIVATION
    return out | (STORED if eqn.primitive is mark_p else 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """The traced forward program.

    Attributes:
      jaxpr, consts: inputs are the rounding seed and the call's values; outputs are the
        call's outputs, then the residuals.
      num_outputs: of the call.
      vjp_tree: rebuilds the backward function from the residuals.
    """

    jaxpr: Any
    consts: Sequence[Any]
    num_outputs: int
    vjp_tree: Any

    @property
    def residuals(self) -> list[Any]:
        """One variable (or literal) for each residual, in the order of `vjp_tree`."""
        return list(self.jaxpr.outvars[self.num_outputs :])


def active_of(values: Sequence[Any], is_active: Sequence[bool]) -> list[Any]:
    """The values that are differentiated."""
    return [v for v, a in zip(values, is_active, strict=True) if a]


def with_active(
    values: Sequence[Any], is_active: Sequence[bool], active: Sequence[Any]
) -> list[Any]:
    """`values`, with others in the active places."""
    others = iter(active)
    return [next(others) if a else v for v, a in zip(values, is_active, strict=True)]


def trace_forward(
    run: Callable[..., list[Any]],
    seed: Any,
    values: Sequence[Any],
    is_active: Sequence[bool],
) -> Forward:
    """Trace the vjp of `run(seed, *values)` for the active values."""
    found: dict[str, Any] = {}

    def forward(seed: Any, *values: Any) -> list[Any]:
        def of_active(*xs: Any) -> list[Any]:
            return run(seed, *with_active(values, is_active, xs))

        out, vjp = jax.vjp(of_active, *active_of(values, is_active))
        leaves, found["tree"] = jax.tree.flatten(vjp)
        found["num_outputs"] = len(out)
        return [*out, *leaves]

    closed = jax.make_jaxpr(forward)(seed, *values)
    jaxpr, consts = _compat.open_jaxpr(closed)
    return Forward(jaxpr, tuple(consts), found["num_outputs"], found["tree"])


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """An equation that the backward pass evaluates.

    Attributes:
      side: for max or min whose first operand is only known rounded: the exact mask of
        where it won, and whether that is where the mask is true.
    """

    eqn: Any
    side: tuple[Any, bool] | None = None

    @property
    def inputs(self) -> list[Any]:
        """The variables that it reads."""
        masks = [] if self.side is None else [self.side[0]]
        return [*_compat.variables(self.eqn.invars), *masks]

    def __call__(self, env: dict[Any, Any]) -> list[Any]:
        """The outputs, given the values of the inputs."""
        values = [_compat.value(v, env) for v in self.eqn.invars]
        if self.side is None:
            return _compat.bind(self.eqn, values)
        mask, on_first = self.side
        out = self.eqn.outvars[0].aval
        first, second = (jnp.asarray(x, out.dtype) for x in values)
        pair = (first, second) if on_first else (second, first)
        return [jnp.where(env[mask], *pair)]


@dataclasses.dataclass(frozen=True, eq=False)
class Normalized:
    """An exact affine map, one for each element of the last axis, to store through.

    Attributes:
      mean, deviation: variables with as many elements as the last axis.
      inverse: whether `deviation` is one over the deviation.
    """

    mean: Any
    deviation: Any
    inverse: bool

    def apply(self, x: jax.Array, env: dict[Any, Any]) -> jax.Array:
        """What is stored for x, in float32 or wider."""
        mean, scale = self._statistics(x, env)
        x = x.astype(mean.dtype) - mean
        return x * scale if self.inverse else x / scale

    def undo(self, stored: jax.Array, env: dict[Any, Any], dtype: Any) -> jax.Array:
        """x, given what was stored for it."""
        mean, scale = self._statistics(stored, env)
        x = stored / scale if self.inverse else stored * scale
        return (x + mean).astype(dtype)

    def stored_dtype(self, dtype: Any) -> Any:
        return jnp.promote_types(dtype, jnp.float32)

    def _statistics(self, x: jax.Array, env: dict[Any, Any]) -> list[jax.Array]:
        shape, dtype = (1,) * (x.ndim - 1) + x.shape[-1:], self.stored_dtype(x.dtype)
        values = (env[self.mean], env[self.deviation])
        return [v.reshape(shape).astype(dtype) for v in values]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What becomes of every residual of a forward program.

    Attributes:
      decisions: for each variable that an action stores.
      kept: variables that are kept as they are, parameters among them.
      replay: the equations that backward evaluates, in order.
      all_decisions: of every residual, for reports.
      policy: that decided.
      normalized: for some of `decisions`, what their variable is stored through.
    """

    forward: Forward
    decisions: dict[Any, Decision]
    kept: tuple[Any, ...]
    replay: tuple[Replay, ...]
    all_decisions: tuple[Decision, ...]
    policy: Policy
    normalized: dict[Any, Normalized] = dataclasses.field(default_factory=dict)

    @property
    def exact(self) -> list[Any]:
        """Variables that are marked and kept exactly."""
        return [v for v, d in self.decisions.items() if isinstance(d.action, Exact)]

    @property
    def packed(self) -> list[Any]:
        """Variables that a codec packs."""
        return [v for v, d in self.decisions.items() if not isinstance(d.action, Exact)]

    @property
    def used_rules(self) -> tuple[int, ...]:
        """Indices of the policy's rules that matched a residual."""
        return tuple(sorted({d.rule for d in self.all_decisions if d.rule is not None}))

    @functools.cached_property
    def program(self) -> Any:
        """The equations for the outputs and for `saved`, with those as outputs."""
        jaxpr = self.forward.jaxpr
        outputs = jaxpr.outvars[: self.forward.num_outputs]
        return prune(jaxpr, [*outputs, *self.saved])

    @functools.cached_property
    def saved(self) -> list[Any]:
        """The variables that outlive the forward pass."""
        return [*self.decisions, *self.kept]


def is_coded(v: Any, action: Action, facts: int, inputs: set[Any]) -> bool:
    """Whether a variable is stored through its action, and marked as such."""
    if facts & STORED:
        return False
    if isinstance(action, Exact):
        # Marking an argument would keep scan from referencing it in place.
        is_key = jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
        return v not in inputs and not is_key
    return True


def is_on_host(v: Any) -> bool:
    return getattr(v.aval, "memory_space", None) == jax.memory.Space.Host


def is_float(v: Any) -> bool:
    """Whether a variable can have a gradient."""
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)
