"""`compress` for Flax NNX: split the modules of a call, merge them inside.

All state goes through the transform as parameters; what the call changed (statistics,
RNG counts, sown values) is written back to the caller's modules.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxact._engine.call import call_compressed, seed_from
from jaxact._modules.find import PureCall
from jaxact._policy import Policy
from jaxact._trace import Argument, Kind, arguments

NOISE_STREAM = "jaxact"


def compress(target: Any, policy: Policy, static_argnums: tuple[int, ...]) -> Any:
    """A module class with the same name, or a callable module sharing state."""
    if not isinstance(target, type):
        shared = copy.copy(target)
        shared.__class__ = compress(type(target), policy, static_argnums)
        return shared
    if not callable(getattr(target, "__call__", None)):  # noqa: B004
        raise TypeError(
            f"compress({target.__name__}): the class has no __call__. Decorate the "
            "methods to compress with @jaxact.compress instead."
        )
    body = {
        "__call__": compress_method(target.__call__, policy, static_argnums),
        "__module__": target.__module__,
        "__qualname__": target.__qualname__,
        "__doc__": target.__doc__,
    }
    return type(target)(target.__name__, (target,), body)


def compress_method(
    f: Callable[..., Any], policy: Policy, static_argnums: tuple[int, ...]
) -> Callable[..., Any]:
    """A function of modules and arrays, with its residuals compressed."""

    @functools.wraps(f)
    def compressed(*args: Any, rounding_key: Any = None, **kwargs: Any) -> Any:
        activations = (*range(len(args)), *kwargs)
        described = arguments(f, args, kwargs, activations, static_argnums)
        state = Argument("params", Kind.PARAMETER), Argument("state", Kind.PARAMETER)
        pure = purify(f, args, kwargs)
        first, *_ = pure.modules
        seed = _seed(pure.modules) if rounding_key is None else seed_from(rounding_key)
        given = pure.fn, pure.args, pure.kwargs, [*state, *described]
        with jax.named_scope(type(first).__name__):  # NNX opens no scopes itself
            out = call_compressed(*given, policy, seed, name=f)
        return write_back(pure.modules, out)

    return compressed


def write_back(modules: tuple[Any, ...], out: Any) -> Any:
    """The result of a call, from that of its pure function; changes go to `modules`."""
    y, *after = out
    changed = [s for s in after if s is not None]
    if changed:  # a frozen module may belong to an outer trace
        nnx.update(modules, *changed)
    return y


def purify(f: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> PureCall:
    """`f` as a function of state and arrays.

    It takes (parameters, other state, *args, **kwargs), with None for each module, and
    returns f's result, then parameters and other state if f changed them.
    """
    places = [i for i, a in enumerate(args) if isinstance(a, nnx.Pytree)]
    names = [k for k, a in kwargs.items() if isinstance(a, nnx.Pytree)]
    modules = (*(args[i] for i in places), *(kwargs[k] for k in names))
    graphdef, params, rest = nnx.split(modules, nnx.Param, ...)

    def pure(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
        # Without a copy, tree mode refuses to mutate state of an outer trace.
        inside = nnx.merge(graphdef, params, rest, copy=True)
        full, kwargs = _replace(args, kwargs, places, names, inside)
        y = f(*full, **kwargs)
        _, new_params, new_rest = nnx.split(inside, nnx.Param, ...)
        new_params = None if _same(params, new_params) else new_params
        return y, new_params, None if _same(rest, new_rest) else new_rest

    empty = (None,) * len(modules)
    others, kwargs = _replace(args, kwargs, places, names, empty)
    positions = (*places, *(-1 for _ in names))
    return PureCall(pure, (params, rest, *others), kwargs, modules, positions)


def _replace(
    args: Any, kwargs: Any, places: list[int], names: list[str], values: Any
) -> tuple[list[Any], dict[str, Any]]:
    """The call's arguments with `values` for its modules."""
    args, kwargs, values = list(args), dict(kwargs), list(values)
    for place, value in zip(places, values, strict=False):
        args[place] = value
    for name, value in zip(names, values[len(places) :], strict=True):
        kwargs[name] = value
    return args, kwargs


def _same(a: Any, b: Any) -> bool:
    x, y = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(x) == len(y) and all(i is j for i, j in zip(x, y, strict=True))


def _seed(modules: Any) -> Any:
    """Rounding seed from the first RNG stream named 'jaxact' in the modules, if any.

    The stream moves on by one, as a call of it would. Around a scan or vmap its key is
    stacked; one of the keys decides.
    """
    for _, node in nnx.iter_graph(modules):
        if isinstance(node, nnx.RngStream) and node.tag == NOISE_STREAM:
            key, count = node.key.get_value(), node.count.get_value()
            node.count.set_value(count + 1)
            first = jax.random.fold_in(key.ravel()[0], count.ravel()[0])
            return jax.random.bits(first, (), jnp.uint32)
    return np.uint32(0)
