"""`compress` for Flax Linen: a lifted transform, as `nn.remat` is one.

Variables and RNG streams go through the transform as parameters, the call's arguments
as activations. Mutable collections come out as the module left them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import flax.linen as nn
import jax
from flax.core import Scope, lift

from jaxact._arguments import Argument, arguments
from jaxact._engine.call import call_compressed, seed_from
from jaxact._flat import Kind
from jaxact._jaxpr.labels import current_path
from jaxact._jaxpr.types import Array
from jaxact._modules.adapter import NOISE_STREAM, require_call
from jaxact._modules.linen_leaks import untouched
from jaxact._modules.original import original_of, remember
from jaxact._modules.pickling import make_picklable
from jaxact._policy import Policy
from jaxact._residual import join_paths

T = TypeVar("T")


# A call's arguments, by its positional and keyword ones.
_Describe: TypeAlias = Callable[[Sequence[object], dict[str, Any]], list[Argument]]
_NAME = "_jaxact_name"  # a keyword, beside the user's
_EVERYTHING = ((True,), (True,), (True,))  # variables in and out, RNG streams
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
            f"compress({type(target).__name__})(...). Inside another module's call, "
            "compress the method: compress(self.block.__call__)(x)."
        )
    require_call(target)
    plain = _without_inherited(target)
    describe = _method_arguments(plain.__call__, None, static_argnums)
    lifted = _lift(plain, describe, policy)
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
    """A method, or a function that takes bound modules, compressed."""

    @functools.wraps(f)
    def compressed(*args: object, **kwargs: object) -> object:
        if args and _is_bound(args[0]):
            describe = _method_arguments(f, activations, static_argnums)
            return _lift(f, describe, policy)(*args, **kwargs)
        return _call_beside(f, args, kwargs, policy, static_argnums, activations)

    return compressed


def takes_part(value: object) -> bool:
    """A bound module has variables at hand; any other is a plain value."""
    return any(map(_is_bound, _leaves(value)))


def _call_beside(
    f: Callable[..., object],
    args: Sequence[object],
    kwargs: dict[str, Any],
    policy: Policy,
    static_argnums: Sequence[str | int],
    activations: Sequence[str | int] | None,
) -> object:
    """A compressed call with bound modules in other places than its first argument.

    Linen lifts methods, and modules among their arguments too: here it is a method
    whose module, the outermost one, is an argument more.
    """

    bound = [m for x in (*args, *kwargs.values()) for m in _leaves(x) if _is_bound(m)]
    # Linen passes modules that hold others as the first one alone.
    outermost = min(bound, key=lambda module: (len(module.path), not _holds(module)))
    if any(_holds(module) for module in bound if module is not outermost):
        # It may read variables; `untouched` refuses to make or change them.
        rounding_key = kwargs.pop("rounding_key", None)
        described = arguments(f, args, kwargs, activations, static_argnums)
        seed = seed_from(rounding_key)
        with untouched():
            return call_compressed(f, args, kwargs, described, policy, seed)

    def method(module: object, *args: object, **kwargs: object) -> object:
        unnamed.close()
        args, kwargs = _replaced(_MODULE, module, args, kwargs)
        return f(*args, **kwargs)

    def describe(args: Sequence[object], kwargs: dict[str, Any]) -> list[Argument]:
        wanted = (*range(len(args)), *kwargs) if activations is None else activations
        return arguments(f, args, kwargs, wanted, static_argnums)

    functools.update_wrapper(method, f, updated=())
    args, kwargs = _replaced(outermost, _MODULE, args, kwargs)
    with contextlib.ExitStack() as unnamed:
        # The call belongs to none, so it opens no scope with a module's name.
        unnamed.enter_context(nn.override_named_call(False))
        lifted = _lift(method, describe, policy, is_method=False)
        return lifted(outermost, *args, **kwargs)


_MODULE = object()  # in the place that a call's module has among the other arguments


def _replaced(
    old: object, new: object, args: Sequence[object], kwargs: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """The arguments with `new` in place where a leaf is `old`."""

    def fill(value: object) -> object:
        if not any(leaf is old for leaf in _leaves(value)):
            return value
        return jax.tree.map(lambda leaf: new if leaf is old else leaf, value)

    return tuple(map(fill, args)), {name: fill(x) for name, x in kwargs.items()}


def _holds(module: nn.Module) -> bool:
    """Whether a field has a bound module."""
    names = [f.name for f in dataclasses.fields(module) if f.name != "parent"]
    fields = [getattr(module, name, None) for name in names]
    return any(map(_is_bound, _leaves(fields)))


def _is_bound(value: object) -> bool:
    return isinstance(value, nn.Module) and value.scope is not None


def _leaves(value: object) -> list[Any]:
    try:
        return jax.tree.leaves(value)
    except (TypeError, ValueError):  # a static value: keys that have no order
        return []


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
    describe: _Describe,
    policy: Policy,
    *,
    is_method: bool = True,
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
            own = (_in_module(place.module, a) for a in describe(args, kwargs))
            with untouched():
                return call_compressed(
                    pure,
                    (variables, rngs, *args),
                    kwargs,
                    [*_VARIABLES, *own],
                    policy,
                    seed,
                    name=target,
                    above=place.above,
                    path=place.module,
                )

        lifted = lift.pack(body, *_EVERYTHING, name="compress", enable_kwargs=True)

        # The seed is drawn outside: a lifted function does not return RNG counters.
        def seeded(
            scopes: object,
            *args: object,
            rounding_key: jax.Array | None = None,
            **kwargs: Any,
        ) -> Any:
            name = kwargs.pop(_NAME)
            if not (found := jax.tree.leaves(scopes)):  # not bound: Linen says so
                return fn(scopes, *args, **kwargs)
            key = _stream_key(found) if rounding_key is None else rounding_key
            place = _place_of(found[-1], name, target if is_method else None)
            return lifted(scopes, seed_from(key), place, *args, **kwargs)

        return seeded

    return _with_name(nn.transforms.lift_transform(transform, target))


def _with_name(lifted: Any) -> Any:
    """A lifted class or method whose call is told its module's name.

    Scopes need not have it: by `nn.share_scope` modules are in another's.
    """
    call = lifted.__call__ if isinstance(lifted, type) else lifted

    @functools.wraps(call)
    def named(self: nn.Module, *args: object, **kwargs: object) -> object:
        return call(self, *args, **kwargs, **{_NAME: self.name})

    if not isinstance(lifted, type):
        return named
    lifted.__call__ = named
    return lifted


def _method_arguments(
    method: Callable[..., object],
    activations: Sequence[str | int] | None,
    static_argnums: Sequence[str | int],
) -> _Describe:
    """How a method's call is described, without the module, which is number 0."""

    def describe(args: Sequence[object], kwargs: dict[str, Any]) -> list[Argument]:
        every = (*range(1, len(args) + 1), *kwargs)
        wanted = every if activations is None else activations
        return arguments(method, (None, *args), kwargs, wanted, static_argnums)[1:]

    return describe


def _place_of(
    scope: Scope, name: str | None, target: type | Callable[..., object] | None
) -> _Place:
    current, is_initializing = current_path(), scope.get_flag("initializing", False)
    if target is None:
        module = ""
    elif isinstance(target, type):  # Linen's own scope for the outermost module
        module = name or target.__name__
    else:
        module = name or ""
        above, _, last = current.rpartition("/")
        # Around a method Linen has opened the scope that it opens again inside.
        method = getattr(target, "__name__", "")
        if last and last.endswith(module if method == "__call__" else f".{method}"):
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
