"""The transform: `compress` stores what the backward pass needs through codecs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

from jaxact._engine.call import call_compressed, seed_from
from jaxact._modules import find
from jaxact._policy import Policy
from jaxact._trace import arguments
from jaxact._typing import C, Compress, Compressed, M, P, R


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
    if find.is_nnx(owner):  # a bound method: its module is an argument
        function = target.__func__
        method = _compress_function(function, policy, activations, static_argnums)
        return functools.partial(method, owner)
    adapter = find.for_target(target)
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
        adapter = find.for_arguments((*args, *kwargs.values()))
        if adapter is not None:
            method = adapter.compress_method(f, policy, static_argnums)
            return method(*args, rounding_key=rounding_key, **kwargs)
        describe = arguments(f, args, kwargs, activations, static_argnums)
        return call_compressed(
            f, args, kwargs, describe, policy, seed_from(rounding_key)
        )

    return compressed
