"""`compress` for Flax Linen: a lifted transform, as `nn.remat` is one.

Variables and RNG streams go through the transform as parameters, the call's arguments
as activations. Mutable collections come out as the module left them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import flax.linen as nn
import jax
from flax.core import Scope, lift

from jaxact._engine.call import call_compressed, seed_from
from jaxact._flat import Kind
from jaxact._jaxpr.labels import current_path
from jaxact._jaxpr.types import Array
from jaxact._modules.adapter import NOISE_STREAM, require_call
from jaxact._modules.original import original_of, remember
from jaxact._modules.pickling import make_picklable
from jaxact._policy import Policy
from jaxact._residual import join_paths
from jaxact._trace import Argument, arguments

T = TypeVar("T")


_VARIABLES = [Argument(name, Kind.PARAMETER) for name in ("variables", "rngs")]


class _Place(NamedTuple):
    """Where a compressed module is called.

    Attributes:
      module: its name.
      above: the path above it.
      is_initializing: whether parameters are made, and nothing is differentiated. In a
        lifted scan, as `nn.RNN` has one, they must not depend on the call's arguments,
        as all outputs of a compressed call do.
    """

    module: str
    above: str
    is_initializing: bool


def compress(target: T, policy: Policy, static_argnums: Sequence[str | int]) -> T:
    """A module class with the same name, fields, parameters and submodule names."""
    if not isinstance(target, type):
        raise TypeError(
            f"compress({type(target).__name__}(...)): a Linen module instance. "
            f"Compress its class and make an instance of that: "
            f"compress({type(target).__name__})(...)."
        )
    require_call(target)
    plain = _without_inherited(target)
    lifted = _lift(plain, plain.__call__, policy, static_argnums)
    # Linen names submodules after their class: keep Block_0.
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(lifted, attribute, getattr(target, attribute))
    remember(lifted, target, None, tuple(static_argnums))
    make_picklable(cast(type, lifted), compress, target, policy, static_argnums)
    return cast(T, lifted)


def compress_method(
    f: Callable[..., object],
    policy: Policy,
    static_argnums: Sequence[str | int],
    activations: Sequence[str | int] | None = None,
) -> Callable[..., object]:
    """A method (or function that takes a module) with its residuals compressed."""
    return _lift(f, f, policy, static_argnums, activations)


def takes_part(module: object, position: int) -> bool:
    """A method's own module has variables at hand; any other is a plain value."""
    return position == 0 and getattr(module, "scope", None) is not None


def _without_inherited(target: type) -> type:
    """`target`; if it inherits its `__call__` from a compressed class, the original.

    Or its residuals would be stored as two policies say.
    """
    owner = next(cls for cls in target.__mro__ if "__call__" in vars(cls))
    original = original_of(owner)
    if owner is target or original is None:
        return target
    body = {"__call__": original.target.__call__, "__module__": target.__module__}
    return type(target)(target.__name__, (target,), body)


def _lift(
    target: type | Callable[..., object],
    method: Callable[..., object],
    policy: Policy,
    static_argnums: Sequence[str | int],
    activations: Sequence[str | int] | None = None,
) -> Callable[..., object]:
    def transform(fn: Callable[..., Any], **_: object) -> Callable[..., Any]:
        def body(
            scope_fn: Callable[..., Scope],
            repack: Callable[[Scope], object],
            variables: object,
            rngs: object,
            seed: Array,
            place: _Place,
            *args: object,
            **kwargs: object,
        ) -> Any:
            def pure(
                variables: object, rngs: object, *args: object, **kwargs: object
            ) -> Any:
                scope = scope_fn(variables, rngs)
                y = fn(scope, *args, **kwargs)
                return y, repack(scope)

            if place.is_initializing:
                return pure(variables, rngs, *args, **kwargs)
            own = _describe(method, args, kwargs, activations, static_argnums)
            describe = [*_VARIABLES, *(_in_module(place.module, a) for a in own)]
            return call_compressed(
                pure,
                (variables, rngs, *args),
                kwargs,
                describe,
                policy,
                seed,
                name=target,
                above=place.above,
                path=place.module,
            )

        lift_all = ((True,), (True,), (True,))
        lifted = lift.pack(body, *lift_all, name="compress", enable_kwargs=True)

        # The seed is drawn outside: a lifted function does not return RNG counters.
        def seeded(
            scopes: object,
            *args: object,
            rounding_key: jax.Array | None = None,
            **kwargs: object,
        ) -> Any:
            if not (found := jax.tree.leaves(scopes)):  # not bound: Linen says so
                return fn(scopes, *args, **kwargs)
            key = _stream_key(found) if rounding_key is None else rounding_key
            place = _place_of(found[0], target)
            return lifted(scopes, seed_from(key), place, *args, **kwargs)

        return seeded

    return nn.transforms.lift_transform(transform, target)


def _describe(
    method: Callable[..., object],
    args: Sequence[object],
    kwargs: dict[str, Any],
    activations: Sequence[str | int] | None,
    static_argnums: Sequence[str | int],
) -> list[Argument]:
    """The arguments of a method's call, without the module, which is number 0."""
    every = (*range(1, len(args) + 1), *kwargs)
    wanted = every if activations is None else activations
    return arguments(method, (None, *args), kwargs, wanted, static_argnums)[1:]


def _place_of(scope: Scope, target: type | Callable[..., object]) -> _Place:
    current, is_initializing = current_path(), scope.get_flag("initializing", False)
    if isinstance(target, type):  # Linen's own scope for the outermost module
        module = scope.name or target.__name__
    else:
        module = scope.name or ""
        above, _, last = current.rpartition("/")
        # Around a method Linen has opened the scope that it opens again inside.
        name = getattr(target, "__name__", "")
        if last and last.endswith(module if name == "__call__" else f".{name}"):
            current, module = above, last
    return _Place(module, _path_above(scope.path[:-1], current), is_initializing)


def _path_above(path: Sequence[str], current: str) -> str:
    """JAX's current scopes, completed by the first part of a module's path.

    They start again where JAX traces a function apart, as for `nn.remat`.
    """
    scopes, missing = [p for p in current.split("/") if p], len(path)
    while missing and scopes and scopes[-1] == path[missing - 1]:
        scopes.pop()
        missing -= 1
    is_cut = not scopes and missing
    return join_paths(*path[:missing], current) if is_cut else current


def _in_module(module: str, argument: Argument) -> Argument:
    """A submodule's argument, whose own name scope is not open yet."""
    label = join_paths(module, argument.label)
    return dataclasses.replace(argument, label=label)


def _stream_key(scopes: Sequence[Scope]) -> jax.Array | None:
    """A key from the RNG stream 'jaxact', if the caller supplied one.

    Drawn as Dropout draws its masks, so a module's calls differ.
    """
    for scope in scopes:
        if scope.has_rng(NOISE_STREAM):
            return scope.make_rng(NOISE_STREAM)
    return None
