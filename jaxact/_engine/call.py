"""Evaluate one call of the user's function with compressed residuals."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from jaxact._engine.vjp import Engine
from jaxact._engine.warnings import warn_if_unused
from jaxact._policy import Policy
from jaxact._residual import module_path
from jaxact._trace import Argument, trace


def call_compressed(
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
    report = functools.partial(warn_if_unused, policy, name)
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
