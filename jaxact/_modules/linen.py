"""`compress` for Flax Linen: a lifted transform, as `nn.remat` is one.

Variables and RNG streams go through the transform as parameters, the call's arguments
as activations. Mutable collections come out as the module left them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import lift

from jaxact._engine.call import call_compressed, seed_from
from jaxact._policy import Policy
from jaxact._residual import join_paths
from jaxact._trace import Argument, Kind, arguments

NOISE_STREAM = "jaxact"


def compress(target: Any, policy: Policy, static_argnums: tuple[int, ...]) -> Any:
    """A module class with the same name, fields, parameters and submodule names."""
    if not isinstance(target, type):
        raise TypeError(
            f"compress({type(target).__name__}(...)): a Linen module instance. "
            f"Compress its class and make an instance of that: "
            f"compress({type(target).__name__})(...)."
        )
    if not callable(getattr(target, "__call__", None)):  # noqa: B004
        raise TypeError(
            f"compress({target.__name__}): the class has no __call__. Decorate the "
            "methods to compress with @jaxact.compress instead."
        )
    lifted = _lift(target, target.__call__, policy, static_argnums)
    # Linen names submodules after their class: keep Block_0.
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(lifted, attribute, getattr(target, attribute))
    return lifted


def compress_method(
    method: Callable[..., Any], policy: Policy, static_argnums: tuple[int, ...]
) -> Callable[..., Any]:
    """A method (or function of a module) with its residuals compressed."""
    return _lift(method, method, policy, static_argnums)


def _lift(target: Any, method: Any, policy: Policy, static: tuple[int, ...]) -> Any:
    def transform(fn: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def inner(
            scope_fn: Any,
            repack: Any,
            variables: Any,
            rngs: Any,
            seed: Any,
            module: str,
            *args: Any,
            **kw: Any,
        ) -> Any:
            def pure(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                scope = scope_fn(variables, rngs)
                y = fn(scope, *args, **kwargs)
                return y, repack(scope)

            described = arguments(method, (None, *args), kw, _all(args, kw), static)
            describe = [
                Argument("variables", Kind.PARAMETER),
                Argument("rngs", Kind.PARAMETER),
                *(_inside(module, argument) for argument in described[1:]),
            ]
            inputs = (variables, rngs, *args)
            return call_compressed(
                pure, inputs, kw, describe, policy, seed, name=target
            )

        lift_all = ((True,), (True,), (True,))
        lifted = lift.pack(inner, *lift_all, name="compress", enable_kwargs=True)

        # The seed is drawn outside: RNG counters do not come out of a lifted function.
        def seeded(scopes: Any, *args: Any, rounding_key: Any = None, **kw: Any) -> Any:
            drawn = _seed(scopes) if rounding_key is None else seed_from(rounding_key)
            module = jax.tree.leaves(scopes)[0].name or ""
            return lifted(scopes, drawn, module, *args, **kw)

        return seeded

    return nn.transforms.lift_transform(transform, target)


def _inside(module: str, argument: Argument) -> Argument:
    """The argument of a submodule, whose own name scope is not open yet."""
    label = join_paths(module, argument.label)
    return dataclasses.replace(argument, label=label)


def _all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Every argument of the call, as `activations` names them; self is number 0."""
    return (*range(1, len(args) + 1), *kwargs)


def _seed(scopes: Any) -> Any:
    """Rounding seed from the RNG stream 'jaxact', if the caller supplied one.

    Drawn as Dropout draws its masks, so two calls of one module differ.
    """
    for scope in jax.tree.leaves(scopes):
        if scope.has_rng(NOISE_STREAM):
            return jax.random.bits(scope.make_rng(NOISE_STREAM), (), jnp.uint32)
    return np.uint32(0)
