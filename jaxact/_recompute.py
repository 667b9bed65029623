"""The calls that the backward pass computes again, by path."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeGuard

from jaxact._jaxpr.labels import visible
from jaxact._residual import call_suffix, is_within
from jaxact._saved import Saved
from jaxact._written_as import fits, written_as

# For messages.
_SUCH_AS = "jax.checkpoint_policies.dots_saveable or save_only_these_names('hidden')"


@written_as("Checkpoint(path='mlp')")
@dataclasses.dataclass(frozen=True)
class Checkpoint(Saved):
    """Keep a compressed call's inputs alone, and compute the call again in backward.

    For `Policy(recompute=...)`. The inputs are stored as the policy says, packed; in
    the backward pass the call is evaluated again from them, and its residuals, one call
    at a time, are stored as the policy says too. Nested wrappers give the same,
    `compress(jax.checkpoint(compress(f)))`, as one value, for the calls that it
    matches. A `jax.checkpoint` that the call contains is kept. Memory falls to the
    inputs of all calls and the residuals of one; the time rises by that of computing
    the calls once more. The gradient is biased, by what the inputs' rounding does to
    the nonlinear functions that are computed again, so inputs take 8 bits unless a rule
    decides.

    Calls are matched by `path` and `key`; a scan inside a compressed call is one too,
    with the path of its operations. A checkpoint that matches no call warns.

    Attributes:
      path: glob on the path of the call, or on parts of it, as `Rule.path`.
      key: the call's: its path, and '@call#1' from the second line on that makes calls
        of that path. It ends the keys of its residuals, or begins them.
      save: a `jax.checkpoint` policy: the values that it saves are stored too, and then
        the others are computed again from their rounded values, as
        `Policy(recompute=save)` does for every call. None: nothing of the call.

    Raises:
      TypeError: `path` or `key` is no str, `save` no function.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> def layer(w, x):
      ...     return jnp.tanh(jnp.tanh(x @ w) @ w)
      >>> policy = jaxact.Policy(bits=2, recompute=jaxact.Checkpoint())
      >>> small = jaxact.compress(layer, policy=policy, activations="x")
      >>> table = jaxact.residuals(small, jnp.ones((64, 64)), jnp.ones((64, 64)))
      >>> [(row.key, row.action.bits) for row in table.rows]
      [('x', 8)]
    """

    path: str | None = None
    _: dataclasses.KW_ONLY
    key: str | None = None
    save: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("path", "key"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(
                    f"Checkpoint({name}={value!r}): a str is required, such as "
                    f"{name}='Net/block0'."
                )
        if self.save is not None and not _is_policy(self.save):
            raise TypeError(
                f"Checkpoint(save={self.save!r}): a jax.checkpoint policy is required, "
                f"such as {_SUCH_AS}."
            )

    def matches(self, prefix: str) -> bool:
        """Whether it is for the call with this path, labels included."""
        path = visible(prefix)
        return (self.path is None or is_within(path, self.path)) and (
            self.key is None or self.key == call_key(prefix)
        )


# A jax.checkpoint policy for all calls; or checkpoints, of which the first that matches
# a call is for it.
Recomputation: TypeAlias = (
    Callable[..., Any] | Checkpoint | tuple[Checkpoint, ...] | None
)


def call_key(prefix: str) -> str:
    """A call's key, from its path with labels; see `Checkpoint.key`."""
    return visible(prefix) + call_suffix(prefix)


def checked(recompute: object) -> Recomputation:
    """A policy's `recompute`, checked.

    Raises:
      TypeError: it is neither a function nor checkpoints.
    """
    if recompute is None or isinstance(recompute, Checkpoint):
        return recompute
    if isinstance(recompute, Iterable) and not isinstance(recompute, str):
        several = tuple(recompute)
        if all(isinstance(one, Checkpoint) for one in several):
            return several or None
    elif _is_policy(recompute):
        return recompute
    raise TypeError(
        f"Policy(recompute={recompute!r}): a jax.checkpoint policy is required, such "
        f"as {_SUCH_AS}, or one or more jaxact.Checkpoint."
    )


def _is_policy(f: object) -> TypeGuard[Callable[..., Any]]:
    """Whether JAX can ask it, with a primitive, the inputs' types and parameters.

    Half of `jax.checkpoint_policies` are no policies, but make one from names.
    """
    if not callable(f) or isinstance(f, type):
        return False
    return fits(f, (None, None), {"parameter": None})


def checkpoints_of(recompute: Recomputation) -> tuple[Checkpoint, ...]:
    """The checkpoints; none where one policy is for all calls."""
    if isinstance(recompute, Checkpoint):
        return (recompute,)
    return recompute if isinstance(recompute, tuple) else ()


def recomputation_of(recompute: Recomputation, prefix: str) -> Recomputation:
    """For one call: a checkpoint policy, a `Checkpoint` that saves nothing, or None."""
    checkpoints = checkpoints_of(recompute)
    if not checkpoints:
        return recompute
    for one in checkpoints:
        if one.matches(prefix):
            return one if one.save is None else one.save
    return None
