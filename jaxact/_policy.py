"""A policy chooses, for each residual, the action that keeps it."""

import collections
import dataclasses
import fnmatch
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from jaxact._codec import (
    Action,
    Bitfield,
    Bitmask,
    Exact,
    Offload,
    Quantize,
    Recompute,
)
from jaxact._codec.actions import require_action
from jaxact._codec.checks import checked_bits, checked_dtype, checked_int
from jaxact._decision import Decision, Reason, applied
from jaxact._recompute import Recomputation, checked, recomputation_of
from jaxact._residual import Residual, is_within
from jaxact._saved import Saved
from jaxact._written_as import written_as

# The smallest residuals that together have at most this part of all elements stay
# exact: they cost under 1 % of the uncompressed bytes, and an eighth of those stored at
# 2 bits. A bound on each one alone, relative to the largest, would spare every
# [B, T, D] array of a transformer once its [B, H, T, T] scores are large enough.
SMALL_PART = 128
# Below this many elements a group's scale and zero point cost as much as they save.
SMALL_SIZE = 64
# Below this width an exponential, such as a softmax's numerators, gets one bit more:
# most are near zero, far below a step (examples/README.md has the loss in training).
EXPONENTIAL_BITS = 4
# Fewest bits where a checkpoint or a custom rule computes something nonlinear from the
# rounded value, which biases the gradient. Flash attention by custom_vjp, error of the
# gradient at logits of scale 1 / 9: 0.29 / 266 at 4 bits, 0.016 / 0.16 at 8 bits, 0.009
# / 0.05 in bfloat16 without rounding.
RECOMPUTED_FROM_BITS = 8
# Conditions that are text, with an example for messages.
_EXAMPLES = {
    "key": "Net/block0/mlp_up",
    "name": "mlp_*",
    "path": "mlp/*",
    "primitive": "dot_general",
}


def small_size(sizes: Iterable[int]) -> int:
    """The most elements that a small residual has, given those of all; 0 if none is."""
    count = collections.Counter(sizes)
    total = sum(size * number for size, number in count.items())
    largest = spared = 0
    for size in sorted(count):
        spared += size * count[size]
        if spared * SMALL_PART > total:
            break
        largest = size
    return largest


@written_as("Rule(Exact(), path='mlp')")
@dataclasses.dataclass(frozen=True, repr=False)
class Rule(Saved):
    """Apply `action` to the residuals that meet every given condition.

    Attributes:
      action: the action for them.
      key: `Residual.key`, which a table's rows have too; it names a single residual.
      name: glob on the `checkpoint_name`: the residual's own, or that given to a value
        derived from it.
      path: glob on a module's path, or on the end of it, for all that the module
        keeps: `attn` (or `attn/*`) is for `Net/block0/attn`, `Net/block0/attn/q` and
        `Net/block0/attn/derivative`, `block?/mlp` for two components, '' for
        a value in no module. Not a regular expression.
      primitive: name of the primitive that computed the residual.
      dtype: the residual's, as `jnp.bfloat16` or 'bfloat16'.
      min_bytes: least size, in bytes, of the uncompressed residual.
      recomputed_from: whether a checkpoint or a custom rule computes something
        nonlinear from the residual, see `Residual.is_recomputed_from`.
      where: predicate on a `Residual`.

    A rule that matches nothing in the first program that is differentiated with its
    policy is warned about, with the nearest names or paths that there are, unless its
    path is '*': wherever there is one. The table that `jaxact.residuals` prints lists
    all such rules.

    Raises:
      TypeError: `action` is not an action such as Quantize(4) or Exact(); `key`,
        `name`, `path` or `primitive` is not a str; `dtype` is not a dtype; `where`
        cannot be called; `recomputed_from` is neither a bool nor None.
      ValueError: `min_bytes` is not an integer, or negative.
    """

    action: Action
    _: dataclasses.KW_ONLY
    key: str | None = None
    name: str | None = None
    path: str | None = None
    primitive: str | None = None
    dtype: Any = None
    min_bytes: int | None = None
    recomputed_from: bool | None = None
    where: Callable[[Residual], bool] | None = None

    def __post_init__(self) -> None:
        require_action("Rule(action=...)", self.action)
        for argument, example in _EXAMPLES.items():
            value = getattr(self, argument)
            if value is not None and not isinstance(value, str):
                raise TypeError(
                    f"Rule({argument}={value!r}): a str is required, such as "
                    f"{argument}={example!r}."
                )
        if self.dtype is not None:
            dtype = checked_dtype("Rule(dtype=", self.dtype)
            object.__setattr__(self, "dtype", dtype)
        if self.min_bytes is not None:
            min_bytes = checked_int(
                self.min_bytes,
                range(1 << 62),
                f"Rule(min_bytes={self.min_bytes!r}): a number of bytes is required, "
                "an integer of at least 0. For 1 MiB write min_bytes=2**20.",
            )
            object.__setattr__(self, "min_bytes", min_bytes)
        if not isinstance(self.recomputed_from, bool | None):
            raise TypeError(
                f"Rule(recomputed_from={self.recomputed_from!r}): True, False or None "
                "is required, such as recomputed_from=True."
            )
        if self.where is not None and not callable(self.where):
            raise TypeError(
                f"Rule(where={self.where!r}): a function of a Residual is required."
            )

    def __repr__(self) -> str:
        """As it is written, without the conditions that it does not have."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        given = [
            f"{n}={v!r}" for n, v in values.items() if n != "action" and v is not None
        ]
        return f"Rule({', '.join([repr(self.action), *given])})"

    def matches(self, residual: Residual) -> bool:
        """Whether `residual` meets every condition."""
        r = residual
        return (
            (self.key is None or r.key == self.key)
            and (self.name is None or _matches_any(r, self.name))
            and (self.path is None or is_within(r.path, self.path))
            and (self.primitive is None or r.primitive == self.primitive)
            and (self.dtype is None or r.dtype == self.dtype)
            and (self.min_bytes is None or r.exact_bytes >= self.min_bytes)
            and self.recomputed_from in (None, r.is_recomputed_from)
            and (self.where is None or bool(self.where(r)))
        )


@written_as("Policy(bits=4, rules=(Rule(Exact(), path='mlp'),))")
@dataclasses.dataclass(frozen=True)
class Policy(Saved):
    """Which action keeps which residual.

    The first rule that matches decides. A residual that no rule matches goes to
    `default`; without one, floats are quantized to `bits`, as are a complex number's
    parts, booleans take one bit, and small statistics, integers, keys, and complex
    numbers that others are computed from stay exact, also from a default that would
    round them.

    Attributes:
      bits: for `Quantize(bits)`, where there is no `default`; not read otherwise. Below
        4, exponentials (softmax) get one more; values that a checkpoint or a custom
        rule computes others from (`Residual.is_recomputed_from`) get 8.
      rules: each a `Rule`; the first that matches decides.
      recompute: a `jax.checkpoint` policy. The values that it saves are stored, through
        a codec; the others are recomputed in the backward pass. For some calls, by
        path: a `Checkpoint`, or several; the first that matches a call is for it. None:
        jaxact chooses few values from which the gradient is unbiased, or unbiased to
        first order; with default=Exact(), it stores every residual that `jax.vjp` has,
        and those that rules pack as they are, not through their norms.
      default: the action where no rule matches, for every residual that it can store.

    Raises:
      ValueError: `bits` is not an integer from 1 to 8.
      TypeError: `rules` is not a tuple of rules, `default` no action, or `recompute` no
        function and no checkpoints.

    Example:
      >>> import jaxact
      >>> jaxact.Policy(bits=2).action_for_floats
      Quantize(bits=2, group_size=256, stochastic=True)
    """

    bits: int = 4
    _: dataclasses.KW_ONLY
    rules: tuple[Rule, ...] = ()
    recompute: Recomputation = None
    default: Action | None = None

    def __post_init__(self) -> None:
        advice = " Give an action as Policy(default=...)."
        object.__setattr__(self, "bits", checked_bits("Policy", self.bits, advice))
        is_other = isinstance(self.rules, str | Mapping)
        if is_other or not isinstance(self.rules, Iterable):  # a Rule is none
            raise TypeError(
                f"Policy(rules={self.rules!r}): a tuple of rules is required: "
                "rules=(Rule(...),)."
            )
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(
                    f"Policy(rules=...) takes jaxact.Rule, not {rule!r}. "
                    "Write Rule(Quantize(2), name='mlp_*')."
                )
        if self.default is not None:
            require_action("Policy(default=...)", self.default)
        object.__setattr__(self, "recompute", checked(self.recompute))

    @property
    def action_for_floats(self) -> Action:
        """The action for a large float residual that no rule matches."""
        return Quantize(self.bits) if self.default is None else self.default

    def _action_for(self, residual: Residual) -> Action:
        if self.default is not None:
            return self.default
        # A recompute policy asks for values to compute others from, at these bits.
        if residual.is_recomputed_from and self.recompute is None:
            return Quantize(max(self.bits, RECOMPUTED_FROM_BITS))
        is_skewed = residual.primitive == "exp"
        if is_skewed and self.bits < EXPONENTIAL_BITS:
            return Quantize(self.bits + 1)
        return Quantize(self.bits)

    @property
    def reads_paths(self) -> bool:
        """Whether a decision may depend on the path of a residual's call."""
        return any(
            condition is not None
            for rule in self.rules
            for condition in (rule.key, rule.path, rule.where)
        )

    @property
    def chooses_form(self) -> bool:
        """Whether jaxact chooses which values are stored."""
        return self.recompute is None and not isinstance(self.default, Exact)

    def for_call(self, prefix: str) -> "Policy":
        """The policy with the `recompute` that the call with this path has.

        That is one function, or None; or a `Checkpoint` that saves nothing.
        """
        own = recomputation_of(self.recompute, prefix)
        if own is self.recompute:
            return self
        return dataclasses.replace(self, recompute=own)

    def decide(
        self, residual: Residual, *, small_size: int, statistic: bool = False
    ) -> Decision:
        """The action for a residual.

        Args:
          small_size: the most elements of a small residual in its call.
          statistic: keep it exact unless a rule says otherwise.
        """
        for index, rule in enumerate(self.rules):
            if rule.matches(residual):
                action = _for_residual(rule.action, residual, statistic)
                return applied(action, residual, Reason.RULE, index)
        small = residual.size < SMALL_SIZE or residual.size <= small_size
        is_float = jnp.issubdtype(residual.dtype, jnp.inexact)
        is_replayed = residual.is_complex and residual.is_recomputed_from
        spared = is_replayed or (is_float and (statistic or small))
        few_bits = _few_bits(residual)
        is_lossless = self.default is not None and self.default.is_lossless
        if self.default is not None and (is_lossless or not (spared or few_bits)):
            return applied(self.default, residual, Reason.DEFAULT)
        if few_bits is not None and not small:
            is_mask = residual.dtype == jnp.bool_
            reason = Reason.MASK if is_mask else Reason.INTEGERS
            decision = applied(few_bits, residual, reason)
            if isinstance(self.default, Offload):
                moved = Offload(decision.codec)
                return dataclasses.replace(decision, action=moved)
            return decision
        if is_replayed or not (is_float or few_bits):
            return Decision(residual, Exact(), Reason.NOT_FLOAT)
        if spared or few_bits:
            reason = Reason.SMALL if small else Reason.STATISTIC
            return Decision(residual, Exact(), reason)
        return applied(self._action_for(residual), residual, Reason.BITS)


def _few_bits(residual: Residual) -> Bitmask | Bitfield | None:
    """The lossless codec for booleans, and for integers that the program bounds."""
    if residual.dtype == jnp.bool_:
        return Bitmask()
    return None if residual.width is None else Bitfield(residual.width)


def _for_residual(action: Action, residual: Residual, statistic: bool) -> Action:
    """A rule's action; but few bits, as without a rule, if it is for others.

    A codec of floats declines masks and integers, and what others are computed from is
    not recomputed.
    """
    few_bits = _few_bits(residual)
    is_again = statistic and isinstance(action, Recompute)
    is_declined = action.declines(residual.shape, residual.dtype) is not None
    if few_bits is None or not (is_again or is_declined):
        return action
    return Offload(few_bits) if isinstance(action, Offload) else few_bits


def _matches_any(residual: Residual, pattern: str) -> bool:
    names = (residual.name, *residual.aliases)
    return any(n and fnmatch.fnmatchcase(n, pattern) for n in names)


def checked_policy(argument: str, policy: object) -> Policy:
    """`policy`, if it is one.

    Args:
      argument: for messages, up to the value: "compress(policy=".

    Raises:
      TypeError: it is none.
    """
    if isinstance(policy, Policy):
        return policy
    required = "a jaxact.Policy is required."
    policy = getattr(policy, "__self__", policy)  # of a method that is not called
    held = getattr(policy, "policy", None)
    if isinstance(held, Policy) or callable(held):  # whose own text is long
        name = "allocation.policy()" if callable(held) else "plan.policy"
        written = argument.rpartition("(")[2] + name
        kind = type(policy).__name__
        raise TypeError(f"{argument}<{kind}>): {required} Write {written}.")
    raise TypeError(
        f"{argument}{reprlib.repr(policy)}): {required} For bits write Policy(bits=2), "
        "for a jax.checkpoint policy Policy(recompute=...)."
    )
