"""A policy chooses, for each residual, the action that keeps it."""

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxact._codec import (
    Action,
    Bias,
    Bitmask,
    DualPrecision,
    Exact,
    Offload,
    PerSample,
    Quantize,
    codec_of,
    is_stored_exactly,
)
from jaxact._decision import Decision, Reason
from jaxact._residual import Residual

# A residual at least this many times smaller than the largest of its call is a
# statistic (a row sum, a maximum, an inverse deviation): keeping it costs under 4 %
# and quantizing it ruins the gradient (relative error 23 instead of 0.19 on an 8-layer
# transformer at two bits).
SMALL_FRACTION = 32
# Below this many elements a group's scale and zero point cost as much as they save.
SMALL_SIZE = 64
# Below this width an exponential, such as the numerators of a softmax, gets one bit
# more: most of them are near zero, far below a step (examples/README.md has what
# training loses).
EXPONENTIAL_BITS = 4


@dataclasses.dataclass(frozen=True)
class Rule:
    """Apply `action` to the residuals that meet every given condition.

    Attributes:
      action: what to do with them.
      key: exactly one residual's, as `Residual.key` and the rows of tables have it.
      name: glob on the `checkpoint_name`, also of what is derived from the residual.
      path: glob on the module path, or on any tail of it: `mlp/*` matches
        `Net/block0/mlp/up`.
      primitive: name of the primitive that computed the residual.
      dtype: of the residual.
      min_bytes: least size, in bytes, of the residual uncompressed.
      where: predicate on a `Residual`.

    Raises:
      TypeError: `action` is not an action such as Quantize(4) or Exact().
    """

    action: Action
    _: dataclasses.KW_ONLY
    key: str | None = None
    name: str | None = None
    path: str | None = None
    primitive: str | None = None
    dtype: Any = None
    min_bytes: int | None = None
    where: Callable[[Residual], bool] | None = None

    def __post_init__(self) -> None:
        _require_action("Rule(action=...)", self.action)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.where is not None and not callable(self.where):
            raise TypeError(
                f"Rule(where={self.where!r}): a function of a Residual is required."
            )

    def matches(self, residual: Residual) -> bool:
        """Whether `residual` meets every condition."""
        r = residual
        return (
            (self.key is None or r.key == self.key)
            and (self.name is None or _matches_any(r, self.name))
            and (self.path is None or _matches_tail(r.path, self.path))
            and (self.primitive is None or r.primitive == self.primitive)
            and (self.dtype is None or r.dtype == self.dtype)
            and (self.min_bytes is None or r.exact_bytes >= self.min_bytes)
            and (self.where is None or bool(self.where(r)))
        )


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which action keeps which residual.

    The first rule that matches decides. A residual that no rule matches goes to
    `default`; without one, floats are quantized to `bits`, booleans take one bit, and
    small statistics, integers, keys and complex numbers stay exact, also from a default
    that would round them.

    Attributes:
      bits: of the default codec, `Quantize(bits)`. Below 4, exponentials (softmax)
        get one more.
      rules: each a `Rule`; the first that matches decides.
      recompute: a `jax.checkpoint` policy. What it saves is stored, through a codec;
        the rest is recomputed in the backward pass. None: jaxact's own choice of what
        to store, small and unbiased (`jaxact._form`); with default=Exact(), every
        residual of `jax.vjp`.
      default: the action for what no rule matches, applied to all that it can store.

    Example:
      >>> import jaxact
      >>> jaxact.Policy(bits=2).action_for_floats
      Quantize(bits=2, group_size=256, stochastic=True)
    """

    bits: int = 4
    _: dataclasses.KW_ONLY
    rules: tuple[Rule, ...] = ()
    recompute: Callable[..., Any] | None = None
    default: Action | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        Quantize(self.bits)  # validates
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(
                    f"Policy(rules=...) takes jaxact.Rule, not {rule!r}. "
                    "Write Rule(Quantize(2), name='mlp_*')."
                )
        if self.default is not None:
            _require_action("Policy(default=...)", self.default)
        if self.recompute is not None and not callable(self.recompute):
            raise TypeError(
                f"Policy(recompute={self.recompute!r}): a jax.checkpoint policy is "
                "required, such as jax.checkpoint_policies.dots_saveable."
            )

    @property
    def action_for_floats(self) -> Action:
        """The action for a large float residual that no rule matches."""
        return Quantize(self.bits) if self.default is None else self.default

    def _action_for(self, residual: Residual) -> Action:
        is_skewed = residual.primitive == "exp" and self.default is None
        if is_skewed and self.bits < EXPONENTIAL_BITS:
            return Quantize(self.bits + 1)
        return self.action_for_floats

    @property
    def chooses_form(self) -> bool:
        """Whether jaxact chooses which values are stored."""
        return self.recompute is None and not isinstance(self.default, Exact)

    def decide(
        self, residual: Residual, *, largest: int, statistic: bool = False
    ) -> Decision:
        """The action for a residual.

        Args:
          largest: elements of the largest residual of its call.
          statistic: keep it exact unless a rule says otherwise.
        """
        for index, rule in enumerate(self.rules):
            if rule.matches(residual):
                return _apply(rule.action, residual, Reason.RULE, index)
        small = residual.size < SMALL_SIZE or residual.size * SMALL_FRACTION <= largest
        is_float = jnp.issubdtype(residual.dtype, jnp.floating)
        spared = is_float and (statistic or small)
        is_mask = residual.dtype == jnp.bool_
        is_lossless = self.default is not None and is_stored_exactly(self.default)
        if self.default is not None and (is_lossless or not (spared or is_mask)):
            return _apply(self.default, residual, Reason.DEFAULT)
        if is_mask:
            on_host = isinstance(self.default, Offload)
            action = Offload(Bitmask()) if on_host else Bitmask()
            return Decision(residual, action, Reason.MASK)
        if not is_float:
            return Decision(residual, Exact(), Reason.NOT_FLOAT)
        if spared:
            reason = Reason.SMALL if small else Reason.STATISTIC
            return Decision(residual, Exact(), reason)
        return _apply(self._action_for(residual), residual, Reason.BITS)


def _apply(
    action: Action, residual: Residual, reason: Reason, rule: int | None = None
) -> Decision:
    declined = action.declines(residual.shape, residual.dtype)
    if declined is None:
        return Decision(residual, action, reason, rule, bias_of(action))
    return Decision(residual, Exact(), reason, rule, declined=declined)


def bias_of(action: Action) -> Bias:
    """What an action leaves of a residual that enters the gradient as a factor."""
    if is_stored_exactly(action):
        return Bias.EXACT
    codec = codec_of(action)
    is_unbiased = isinstance(codec, DualPrecision | PerSample)
    if isinstance(codec, Quantize):
        is_unbiased = codec.stochastic
    return Bias.UNBIASED if is_unbiased else Bias.BIASED


def _matches_any(residual: Residual, pattern: str) -> bool:
    names = (residual.name, *residual.aliases)
    return any(n and fnmatch.fnmatch(n, pattern) for n in names)


def _matches_tail(path: str, pattern: str) -> bool:
    parts = path.split("/")
    tails = ("/".join(parts[i:]) for i in range(len(parts)))
    return any(fnmatch.fnmatch(tail, pattern) for tail in tails)


def _require_action(place: str, action: Any) -> None:
    if not isinstance(action, Action):
        raise TypeError(
            f"{place} takes an action, not {action!r}. Actions are Exact(), "
            "Quantize(bits), DualPrecision(bits), PerSample(bits), Bitmask(), "
            "Cast(dtype), Recompute() and Offload(codec)."
        )
