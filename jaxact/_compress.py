"""The transform: `compress` stores what the backward pass needs through codecs."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from jaxact import _adapters
from jaxact._call import Argument, arguments, trace
from jaxact._codec import Exact, Recompute
from jaxact._engine import Engine
from jaxact._policy import Policy
from jaxact._program import OF_PARAMETERS, REFERENCED, STORED_INSIDE, Plan
from jaxact._residual import module_path
from jaxact._typing import C, Compress, Compressed, M, P, R


class CompressionWarning(UserWarning):
    """A policy did less than it says: a rule, or all of it, changed nothing."""


@overload
def compress(
    target: None = None,
    *,
    policy: Policy | None = ...,
    activations: str | int | Sequence[str | int] | None = ...,
    static_argnums: int | Sequence[int] = ...,
) -> Compress: ...
@overload
def compress(
    target: type[C],
    *,
    policy: Policy | None = ...,
    static_argnums: int | Sequence[int] = ...,
) -> type[C]: ...
@overload
def compress(
    target: M,
    *,
    policy: Policy | None = ...,
    static_argnums: int | Sequence[int] = ...,
) -> M: ...
@overload
def compress(
    target: Callable[P, R],
    *,
    policy: Policy | None = ...,
    activations: str | int | Sequence[str | int] | None = ...,
    static_argnums: int | Sequence[int] = ...,
) -> Compressed[P, R]: ...
def compress(
    target: Any = None,
    *,
    policy: Policy | None = None,
    activations: str | int | Sequence[str | int] | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Any:
    """Store the residuals of `target` compressed between forward and backward.

    The value computed is `target`'s own, to the last bit; so are the parameter tree,
    mutable state and RNG counters. Only the arrays that reverse-mode differentiation
    keeps are stored as `policy` says. With Policy(default=Exact()) the gradients are
    JAX's own too, operation by operation; where three or more of them are summed into
    one argument, a compressed call in between may change the order of that sum.
    Reverse mode once only: forward-mode and second-order derivatives raise a TypeError.

    Use as `@compress`, `@compress(policy=...)` or `compress(target, ...)`.

    Args:
      target: a Flax Linen module class (gives a class of the same name and parameters)
        or method, a Flax NNX module class or instance, or a function.
      policy: chooses what becomes of each residual; `Policy()` when None.
      activations: for a function, names or positions of the arguments whose arrays may
        be stored compressed. All others are taken for parameters: referenced, never
        copied, and so are casts and other values made of parameters alone. None: an
        argument that JAX keeps is referenced; one that JAX only computes residuals
        from may be stored compressed in their place. Modules: call arguments are
        activations, variables are not.
      static_argnums: positions of arguments that hold arrays but must stay concrete.
        Arguments that hold no arrays stay Python values anyway.

    Returns:
      The same kind of thing as `target`. A compressed function takes a keyword
      `rounding_key`, a JAX PRNG key for the rounding noise; Flax modules use the RNG
      stream 'jaxact' if there is one. Without a key the noise is derived from the data.

    Raises:
      TypeError: `target` or `policy` is of the wrong kind.
      ValueError: when called, if `activations` names no argument.

    Example:
      >>> import jax, jax.numpy as jnp, jaxact
      >>> def layer(w, x):
      ...     return jnp.tanh(x @ w)
      >>> small = jaxact.compress(layer, activations='x')
      >>> w, x = jnp.ones((64, 64)), jnp.ones((8, 64))
      >>> bool((small(w, x) == layer(w, x)).all())
      True
    """
    policy = Policy() if policy is None else policy
    if not isinstance(policy, Policy):
        raise TypeError(
            f"compress(policy={policy!r}): a jaxact.Policy is required. For bits write "
            "Policy(bits=2), for a jax.checkpoint policy Policy(recompute=...)."
        )
    static = (
        (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    )
    if target is None:
        return lambda target: _compress_target(target, policy, activations, static)
    return _compress_target(target, policy, activations, static)


def _compress_target(
    target: Any, policy: Policy, activations: Any, static_argnums: tuple[int, ...]
) -> Any:
    owner = getattr(target, "__self__", None)
    if _adapters.is_nnx(owner):  # a bound method: its module is an argument
        function = target.__func__
        method = _compress_function(function, policy, activations, static_argnums)
        return functools.partial(method, owner)
    adapter = _adapters.for_target(target)
    if adapter is not None:
        if activations is not None:
            raise ValueError(
                f"compress({target!r}, activations={activations!r}): activations is "
                "for plain functions. The call arguments of a module are its "
                "activations, its variables are not."
            )
        return adapter.compress(target, policy, static_argnums)
    if not callable(target):
        raise TypeError(
            f"compress({target!r}): a Flax module class, an NNX module or a function "
            "is required."
        )
    return _compress_function(target, policy, activations, static_argnums)


def _compress_function(
    f: Callable[..., Any],
    policy: Policy,
    activations: Any,
    static_argnums: tuple[int, ...],
) -> Callable[..., Any]:
    @functools.wraps(f)
    def compressed(*args: Any, rounding_key: Any = None, **kwargs: Any) -> Any:
        adapter = _adapters.for_arguments((*args, *kwargs.values()))
        if adapter is not None:
            method = adapter.compress_call(f, policy, static_argnums)
            return method(*args, rounding_key=rounding_key, **kwargs)
        describe = arguments(f, args, kwargs, activations, static_argnums)
        return call(f, args, kwargs, describe, policy, seed_from(rounding_key))

    return compressed


def call(
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    describe: Sequence[Argument],
    policy: Policy,
    seed: Any,
    *,
    name: Any = None,
) -> Any:
    """Evaluate `f(*args, **kwargs)` with compressed residuals.

    `describe` says what each argument is; `seed` is a uint32 scalar; `name` is what
    the user compressed, for messages.
    """
    name = getattr(name or f, "__qualname__", str(name or f))
    flat, values, rebuild = trace(f, args, kwargs, describe)
    prefix = module_path(source_info_util.current_name_stack())
    report = functools.partial(_warn, policy, name)
    values = [jnp.asarray(v) if isinstance(v, np.ndarray) else v for v in values]
    try:
        return rebuild(Engine(policy, prefix, report)(flat, seed, values))
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "jaxact: forward-mode differentiation (jax.jvp, jax.jacfwd, jax.hessian) "
            f"of the compressed {name}. Compression only changes what reverse mode "
            "keeps: use jax.vjp, jax.grad or jax.jacrev, or call the uncompressed "
            "function."
        ) from error


def seed_from(key: Any) -> Any:
    """The uint32 seed of a JAX PRNG key; 0 without a key."""
    if key is None:
        return np.uint32(0)
    if not isinstance(key, jax.Array):
        raise TypeError(
            f"rounding_key={key!r}: a JAX PRNG key is required, such as "
            "jax.random.key(0)."
        )
    return jax.random.bits(key, (), jnp.uint32)


def _warn(policy: Policy, name: str, plans: Sequence[Plan]) -> None:
    """Warn about rules that matched nothing, and about compressing nothing."""
    decisions = [d for plan in plans for d in plan.all_decisions]
    used = {d.rule for d in decisions}
    for index, rule in enumerate(policy.rules):
        # A path or a key may be of another module with the same policy.
        if index not in used and rule.path is None and rule.key is None:
            warnings.warn(
                f"jaxact: {rule} matched no residual of {name}. See "
                "jaxact.residuals for what there is.",
                CompressionWarning,
                stacklevel=2,
            )
    wanted = policy.rules or not isinstance(policy.default, Exact)
    smaller = any(
        not isinstance(d.action, Exact | Recompute) or d.why == STORED_INSIDE
        for d in decisions
    )
    is_float = lambda d: jnp.issubdtype(d.residual.dtype, jnp.inexact)
    undecided = {d.why for d in decisions if d.rule is None and is_float(d)}
    reasons = sorted(undecided - {REFERENCED, OF_PARAMETERS})
    if wanted and reasons and not smaller:
        warnings.warn(
            f"jaxact: nothing was compressed in {name}; its residuals: "
            f"{'; '.join(reasons)}. See jaxact.residuals for each.",
            CompressionWarning,
            stacklevel=2,
        )
