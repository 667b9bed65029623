"""`compress` for Flax NNX: split a call's modules, merge them inside.

All state goes through the transform as parameters; changed state (statistics, RNG
counts, sown values) is written back to the caller's modules.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import jax
from flax import nnx

from jaxact._engine.call import call_compressed, seed_from
from jaxact._modules.adapter import NOISE_STREAM, require_call
from jaxact._modules.pure import PureCall
from jaxact._policy import Policy
from jaxact._trace import Argument, Kind, arguments

T = TypeVar("T")


def compress(target: T, policy: Policy, static_argnums: Sequence[str | int]) -> T:
    """A module class with the same name, or a callable module sharing state."""
    if isinstance(target, type):
        return cast(T, _compress_class(target, policy, tuple(static_argnums)))
    shared = copy.copy(target)
    shared.__class__ = _class_for(type(target), policy, tuple(static_argnums))
    return shared


def compress_method(
    f: Callable[..., object], policy: Policy, static_argnums: Sequence[str | int]
) -> Callable[..., object]:
    """A function that takes modules and arrays, with its residuals compressed."""

    @functools.wraps(f)
    def compressed(
        *args: object, rounding_key: jax.Array | None = None, **kwargs: object
    ) -> object:
        activations = (*range(len(args)), *kwargs)
        described = arguments(f, args, kwargs, activations, static_argnums)
        state = Argument("params", Kind.PARAMETER), Argument("state", Kind.PARAMETER)
        pure = purify(f, args, kwargs)
        if rounding_key is None:
            rounding_key = _stream_key(pure.modules)
        scope = type(pure.modules[0]).__name__
        with jax.named_scope(scope):  # NNX opens no scopes itself
            out = call_compressed(
                pure.fn,
                pure.args,
                pure.kwargs,
                [*state, *described],
                policy,
                seed_from(rounding_key),
                name=f,
            )
        return write_back(pure.modules, out)

    return compressed


def takes_part(module: object, position: int) -> bool:
    """Every module does, as any argument."""
    return True


def purify(
    f: Callable[..., Any], args: Sequence[object], kwargs: dict[str, object]
) -> PureCall:
    """`f` as a function from state and arrays.

    It takes (parameters, other state, *args, **kwargs), with None for each module, and
    returns f's result, then parameters and other state if f changed them.
    """
    positions = [i for i, a in enumerate(args) if isinstance(a, nnx.Pytree)]
    names = [k for k, a in kwargs.items() if isinstance(a, nnx.Pytree)]
    modules = (*(args[i] for i in positions), *(kwargs[k] for k in names))
    graphdef, params, state = nnx.split(modules, nnx.Param, ...)

    def pure(params: object, state: object, *args: object, **kwargs: object) -> Any:
        # Without a copy, tree mode refuses to mutate an outer trace's state.
        merged = nnx.merge(graphdef, params, state, copy=True)
        full, kwargs = _replace(args, kwargs, positions, names, merged)
        y = f(*full, **kwargs)
        _, new_params, new_state = nnx.split(merged, nnx.Param, ...)
        new_params = None if _same(params, new_params) else new_params
        return y, new_params, None if _same(state, new_state) else new_state

    empty = (None,) * len(modules)
    others, kwargs = _replace(args, kwargs, positions, names, empty)
    owners = (*positions, *(-1 for _ in names))
    return PureCall(pure, (params, state, *others), kwargs, modules, owners)


def write_back(modules: Sequence[object], out: Any) -> object:
    """The call's result from its pure function's; changes go to `modules`."""
    y, *after = out
    changed = [state for state in after if state is not None]
    if changed:  # a frozen module may belong to an outer trace
        nnx.update(tuple(modules), *changed)
    return y


def _compress_class(
    target: type, policy: Policy, static_argnums: tuple[str | int, ...]
) -> type:
    require_call(target)
    body = {
        "__call__": compress_method(target.__call__, policy, static_argnums),
        "__module__": target.__module__,
        "__qualname__": target.__qualname__,
        "__doc__": target.__doc__,
    }
    return type(target)(target.__name__, (target,), body)


# One class for all instances: jit and NNX compare modules by their classes.
_class_for = functools.lru_cache(_compress_class)


def _replace(
    args: Sequence[object],
    kwargs: dict[str, object],
    positions: Sequence[int],
    names: Sequence[str],
    values: Iterable[object],
) -> tuple[list[object], dict[str, object]]:
    """The call's arguments with `values` for its modules."""
    replaced, values = list(args), list(values)
    for position, value in zip(positions, values, strict=False):
        replaced[position] = value
    by_name = zip(names, values[len(positions) :], strict=True)
    return replaced, {**kwargs, **dict(by_name)}


def _same(a: object, b: object) -> bool:
    x, y = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(x) == len(y) and all(i is j for i, j in zip(x, y, strict=True))


def _stream_key(modules: object) -> jax.Array | None:
    """A key from the first RNG stream named 'jaxact' in the modules, if any.

    The stream moves on by one, as when it is called. Around a scan or vmap its key is
    stacked; the first decides.
    """
    for _, node in nnx.iter_graph(modules):
        if isinstance(node, nnx.RngStream) and node.tag == NOISE_STREAM:
            key, count = node.key.get_value(), node.count.get_value()
            node.count.set_value(count + 1)
            return jax.random.fold_in(key.ravel()[0], count.ravel()[0])
    return None
