"""`compress` for Flax NNX: split a call's modules, merge them inside.

All state goes through the transform as parameters; changed state (statistics, RNG
counts, sown values) is written back to the caller's modules, and so is new structure:
submodules and attributes. A module here is any object that NNX updates in place: a
`Variable` and an `Rngs` too, as an argument or in a list, a dict or another pytree.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
from flax import nnx
from flax.errors import TraceContextError

from jaxact._arguments import Argument, arguments
from jaxact._engine.call import call_compressed, seed_from
from jaxact._flat import Kind
from jaxact._jaxpr.evaluate import is_traced
from jaxact._jaxpr.labels import current_path
from jaxact._modules.adapter import NOISE_STREAM, require_call
from jaxact._modules.nnx_paths import place_of, submodules_named
from jaxact._modules.nnx_structure import copies, refuse_references, split, write
from jaxact._modules.nnx_subclass import subclass
from jaxact._modules.original import original_of, remember
from jaxact._modules.pickling import make_picklable
from jaxact._modules.pure import PureCall
from jaxact._policy import Policy
from jaxact._residual import join_paths

T = TypeVar("T")


def compress(target: T, policy: Policy, static_argnums: Sequence[str | int]) -> T:
    """A module class with the same name, or a callable module sharing state."""
    static = tuple(static_argnums)
    if isinstance(target, type):
        return cast(T, _compress_class(target, policy, static))
    original = original_of(type(target))
    cls = type(target) if original is None else original.target
    if original is not None:
        static = static or original.static_argnums
    # One set of attributes: `eval()` or a new submodule is there for both.
    shared = object.__new__(_class_for(cls, policy, static))
    object.__setattr__(shared, "__dict__", vars(target))
    return cast(T, shared)


def compress_method(
    f: Callable[..., object],
    policy: Policy,
    static_argnums: Sequence[str | int],
    activations: Sequence[str | int] | None = None,
) -> Callable[..., object]:
    """A function that takes modules and arrays, with its residuals compressed."""

    @functools.wraps(f)
    def compressed(
        *args: object, rounding_key: jax.Array | None = None, **kwargs: object
    ) -> object:
        every = (*range(len(args)), *kwargs)
        wanted = every if activations is None else activations
        described = arguments(f, args, kwargs, wanted, static_argnums)
        state = Argument("params", Kind.PARAMETER), Argument("state", Kind.PARAMETER)
        pure = _pure(f, args, kwargs, lambda modules: submodules_named(modules, above))
        if rounding_key is None:
            rounding_key = _stream_key(pure.modules)
        place = place_of(pure.modules, is_traced=is_traced((pure.args, pure.kwargs)))
        scope = (
            jax.named_scope(place.scope) if place.scope else contextlib.nullcontext()
        )
        with scope, untouched():
            above = current_path()
            if place.above is not None:
                above = join_paths(place.above, place.scope)
            out = call_compressed(
                pure.fn,
                pure.args,
                pure.kwargs,
                [*state, *described],
                policy,
                seed_from(rounding_key),
                name=f,
                above=above,
            )
        return write_back(pure.modules, out)

    return compressed


def takes_part(value: object) -> bool:
    """Every module does."""
    return bool(_modules_in(value))


def purify(
    f: Callable[..., Any], args: Sequence[object], kwargs: dict[str, object]
) -> PureCall:
    """`f` as a function from state and arrays.

    It takes (parameters, other state, *args, **kwargs), with None for each module, and
    returns f's result and the changes to modules.
    """
    return _pure(f, args, kwargs, lambda _: contextlib.nullcontext())


def _pure(
    f: Callable[..., Any],
    args: Sequence[object],
    kwargs: dict[str, object],
    around: Callable[[Sequence[object]], contextlib.AbstractContextManager[object]],
) -> PureCall:
    """The same, with `around(modules)` entered around f's call with those modules."""
    values = [*args, *kwargs.values()]
    places = [_places(value) for value in values]
    modules = tuple(m for value in values for m in _modules_in(value))
    before = split(modules)
    refuse_references(before[1:])

    def pure(params: object, state: object, *args: object, **kwargs: object) -> Any:
        given = before._replace(params=params, state=state)
        with copies(given) as copied:
            full = _fill([*args, *kwargs.values()], places, copied.modules)
            named = dict(zip(kwargs, full[len(args) :], strict=True))
            with around(copied.modules):
                y = f(*full[: len(args)], **named)
            return y, copied.after()

    others = _fill(values, places, (None,) * len(modules))
    owners = (*range(len(args)), *(-1 for _ in kwargs))
    return PureCall(
        pure,
        (before.params, before.state, *others[: len(args)]),
        dict(zip(kwargs, others[len(args) :], strict=True)),
        modules,
        tuple(
            n
            for n, found in zip(owners, places, strict=True)
            for _ in range(sum(found))
        ),
    )


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """A context for a trace.

    Raises:
      flax.errors.TraceContextError: it changed a module from outside, as NNX says.
    """
    try:
        yield
    except TraceContextError as error:
        notes = getattr(error, "__notes__", ())
        if not any(note.startswith("jaxact") for note in notes):  # one is said once
            error.add_note(
                "jaxact: a function changes a module that is none of its arguments, "
                "such as Dropout's count or BatchNorm's statistics. The module must "
                "be one: give f = lambda module, x: module(x), called as f(module, x)."
            )
        raise


def jit(f: Callable[..., object]) -> Any:
    """`f` jitted, with the state that it changes among its results."""
    return nnx.jit(f)


def write_back(modules: Sequence[object], out: Any) -> object:
    """The call's result from its pure function's; changes go to `modules`."""
    y, after = out
    write(modules, after)
    return y


def _compress_class(
    target: type, policy: Policy, static_argnums: tuple[str | int, ...]
) -> type:
    require_call(target)
    call, activations = target.__call__, None
    original = original_of(call)  # decorated, or inherited from a compressed class
    if original is not None:
        call, activations = original.target, original.activations
        static_argnums = static_argnums or original.static_argnums
    method = compress_method(call, policy, static_argnums, activations)
    remember(method, call, activations, static_argnums)
    body = {
        "__call__": method,
        "__module__": target.__module__,
        "__qualname__": target.__qualname__,
        "__doc__": target.__doc__,
    }
    compressed = subclass(target, body)
    remember(compressed, target, None, static_argnums)
    make_picklable(compressed, compress, target, policy, static_argnums)
    return compressed


# One class for all instances: jit and NNX compare modules by their classes.
_class_for = functools.lru_cache(_compress_class)


def _is_module(value: object) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _is_place(value: object) -> bool:
    """A module, or the None that stands for it while its state travels apart."""
    return value is None or _is_module(value)


def _modules_in(value: object) -> list[Any]:
    """The modules in a pytree, none inside another."""
    return [leaf for leaf in _leaves(value) if _is_module(leaf)]


def _places(value: object) -> list[bool]:
    """For each leaf of a pytree whether it is a module; empty without one."""
    found = [_is_module(leaf) for leaf in _leaves(value)]
    return found if any(found) else []


def _leaves(value: object) -> list[Any]:
    try:
        return jax.tree.leaves(value, is_leaf=_is_place)
    except (TypeError, ValueError):  # a static value: keys that have no order
        return []


def _fill(
    values: Sequence[object], places: Sequence[list[bool]], new: Sequence[object]
) -> list[Any]:
    """The call's arguments with `new` in the modules' places, in order."""
    remaining = iter(new)
    filled = []
    for value, found in zip(values, places, strict=True):
        if found:
            leaves, tree = jax.tree.flatten(value, is_leaf=_is_place)
            pairs = zip(leaves, found, strict=True)
            value = tree.unflatten([next(remaining) if m else x for x, m in pairs])
        filled.append(value)
    return filled


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
