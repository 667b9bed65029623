"""A plan: what becomes of every residual of a forward program.

It says which values are stored, through which action, and how the backward pass
computes the residuals from those.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxact._codec import Action, Exact
from jaxact._decision import Decision
from jaxact._jaxpr.evaluate import bind, value_of
from jaxact._jaxpr.read import variables_in
from jaxact._jaxpr.rewrite import prune
from jaxact._plan.facts import STORED
from jaxact._plan.forward import Forward
from jaxact._policy import Policy


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
        return [*variables_in(self.eqn.invars), *masks]

    def __call__(self, env: dict[Any, Any]) -> list[Any]:
        """The outputs, given the values of the inputs."""
        values = [value_of(v, env) for v in self.eqn.invars]
        if self.side is None:
            return bind(self.eqn, values)
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
