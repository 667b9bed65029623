"""One call of the user's function, as a function from flat arrays to flat arrays.

The function is traced exactly once. Values that it closes over, outer transformations'
tracers included, become explicit arguments, because `custom_vjp` refuses
closures over tracers. Values that are not arrays stay the Python values they are.
"""

import collections
import dataclasses
import re
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.stages import Wrapped

from jaxact._arguments import Argument
from jaxact._flat import Flat, Kind
from jaxact._jaxpr.compat import open_jaxpr
from jaxact._jaxpr.evaluate import trace_jitted
from jaxact._jaxpr.labels import numbered
from jaxact._jaxpr.source import code_of
from jaxact._jaxpr.types import Array
from jaxact._read_values import are_same, read_values, written_in

# From a function's flat outputs to its result.
Rebuild: TypeAlias = Callable[[Sequence[Array]], Any]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A pytree without leaves: carries a Python value past a transformation.

    Two are equal if their values are one object.
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.value is other.value

    def __hash__(self) -> int:
        return hash((Static, id(self.value)))


def is_array(x: object) -> TypeGuard[jax.Array | np.ndarray | jax.ShapeDtypeStruct]:
    """Whether a leaf is traced; Python scalars stay the constants they are.

    As do NumPy's arrays of text, dates and objects.
    """
    if isinstance(x, np.ndarray):
        return x.dtype == np.bool_ or jnp.issubdtype(x.dtype, np.number)
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def is_inexact(x: Array) -> bool:
    """Whether a value can have a gradient."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


class TraceCache:
    """The traces of one function, by the structure of the call.

    JAX has the traces themselves, by the jitted function that it was given.
    """

    def __init__(self) -> None:
        # Each of its operations is one for other threads too.
        self._entries: collections.OrderedDict[
            Hashable, tuple[Wrapped, tuple[object, ...]]
        ] = collections.OrderedDict()

    def find(self, on_arrays: "_OnArrays") -> Wrapped:
        """The jitted function of an equal call, if all that it reads is the same."""
        earlier, values = self._entries.get(on_arrays.key(), (None, None))
        if earlier is not None and are_same(values, on_arrays.values()):
            return earlier
        return jax.jit(on_arrays)

    def keep(self, on_arrays: "_OnArrays", jitted: Wrapped) -> None:
        """Remember a function after its trace, which may count in a closure."""
        key, values = on_arrays.key(), on_arrays.values()
        if key is None or values is None:
            return
        self._entries.pop(key, None)
        self._entries[key] = jitted, values
        if len(self._entries) > _SIGNATURES:
            self._entries.popitem(last=False)


# Signatures that are remembered for each compressed function.
_SIGNATURES = 32


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _OnArrays:
    """`f` as a function of its call's arrays alone.

    Attributes:
      leaves: the call's other leaves, None in place of the arrays.
      dynamic: the arrays' numbers among all leaves.
      tree: of [*args, *kwargs.values()], static ones wrapped.
      num_args, names: of positional arguments, and of keywords.
      static: arguments in the tree that are not leaves of it.
      title: the function or class that the user compressed.
    """

    f: Callable[..., Any]
    leaves: tuple[object, ...]
    dynamic: tuple[int, ...]
    tree: Any
    num_args: int
    names: tuple[str, ...]
    static: tuple[object, ...]
    title: Callable[..., Any]

    # By these two JAX says in errors which function is traced.
    @property
    def __name__(self) -> str:
        return getattr(self.title, "__name__", type(self.title).__name__)

    @property
    def __code__(self) -> types.CodeType:
        return code_of(self.title)

    def __call__(self, *arrays: jax.Array) -> tuple[list[Any], Static]:
        """The result's arrays, and beside them what else it takes to rebuild it."""
        full = list(self.leaves)
        for i, array in zip(self.dynamic, arrays, strict=True):
            full[i] = array
        values = [
            v.value if isinstance(v, Static) else v
            for v in jax.tree.unflatten(self.tree, full)
        ]
        args, others = values[: self.num_args], values[self.num_args :]
        out = self.f(*args, **dict(zip(self.names, others, strict=True)))
        out, tree = jax.tree.flatten(out)
        for x in out:
            _check_output(x)
        static = [None if is_array(x) else (x,) for x in out]
        return [x for x in out if is_array(x)], Static((tree, static))

    def values(self) -> tuple[object, ...] | None:
        """The constants that the trace depends on, see `read_values`."""
        fields = _static_fields(self.tree)
        return read_values(self.f, *self.leaves, *self.static, *fields)

    def key(self) -> Hashable | None:
        """The same for calls whose traces may be the same; None: it has none.

        A user's pytree may hold values that have no hash beside its arrays.
        """
        others = tuple((type(x), repr(x)) for x in self.leaves)
        key = others, self.dynamic, self.tree, self.num_args, self.names
        try:
            hash(key)
        except TypeError:
            return None
        return key


def _check_output(x: object) -> None:
    """Refuse an output that belongs to one call, where another uses its trace again.

    Raises:
      TypeError: an iterator, a mutable value, or an object that holds a traced array.
    """
    if is_array(x):
        return
    fields = getattr(x, "__dict__", {}).values()
    holds_arrays = any(isinstance(v, Tracer) for v in fields)
    if holds_arrays or isinstance(x, Iterator) or not isinstance(x, Hashable):
        raise TypeError(
            f"an output of a compressed function is of type {type(x).__name__}: arrays "
            "and constants are required, in tuples, lists, dicts or other pytrees. "
            "Register the class by jax.tree_util.register_dataclass, or return its "
            "fields in a dict."
        )


# Whose pytrees hold nothing but keys beside their leaves.
_CONTAINERS = frozenset({"builtins", "collections", "jaxact"})
# Whose own methods read no values that change.
_LIBRARIES = _CONTAINERS | {"flax", "jax", "optax"}


def _static_fields(tree: Any) -> Iterator[object]:
    """Values that pytrees hold beside their leaves, and those of their classes.

    A training state holds its `apply_fn`, a NamedTuple's methods may read anything.
    """
    node = tree.node_data()
    if node is None:
        return
    kind, fields = node
    library = kind.__module__.partition(".")[0]
    if library not in _CONTAINERS:
        yield fields
    if library not in _LIBRARIES:
        yield from written_in(kind)
    for child in tree.children():
        yield from _static_fields(child)


_NOT_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _make_jaxpr(
    jitted: Wrapped, arrays: Sequence[Any], labels: Sequence[str], names: Sequence[str]
) -> tuple[Any, Any]:
    """The program, and its result's tree.

    For messages: the arrays' `labels`, and the `names` of their arguments.
    """
    try:
        return trace_jitted(jitted, *arrays)
    except _NOT_CONCRETE as error:
        # JAX knows an array by its number among them alone.
        found = dict.fromkeys(map(int, re.findall(r"\barrays\[(\d+)]", str(error))))
        meant = "".join(f"arrays[{i}] is {labels[i]}. " for i in found)
        error.add_note(
            f"jaxact: {meant}A compressed call traces the arrays in its arguments, as "
            f"jax.jit does: {', '.join(names)}. Name an argument whose values must be "
            "known, such as the shape of another, in static_argnums."
        )
        raise


def trace(
    f: Callable[..., Any],
    args: Sequence[object],
    kwargs: dict[str, Any],
    describe: Sequence[Argument],
    cache: TraceCache | None = None,
    title: Callable[..., Any] | None = None,
) -> tuple[Flat, list[jax.Array], Rebuild]:
    """Trace `f(*args, **kwargs)` once.

    Args:
      describe: an `Argument` for each in `args`, then for each in `kwargs`.
      cache: of `f`'s earlier traces.
      title: for messages, in place of `f`.

    Returns:
      The flat function, its inputs' values, and a function from its outputs to the
      result of `f`.
    """
    values = [
        Static(v) if d.is_static else v
        for d, v in zip(describe, [*args, *kwargs.values()], strict=True)
    ]
    leaves, tree = jax.tree.flatten(values)
    labels, kinds, owners = _label(values, describe)
    dynamic = tuple(i for i, leaf in enumerate(leaves) if is_array(leaf))
    others = tuple(None if is_array(leaf) else leaf for leaf in leaves)
    static = tuple(v.value for v in values if isinstance(v, Static))
    on_arrays = _OnArrays(
        f, others, dynamic, tree, len(args), tuple(kwargs), static, title or f
    )
    jitted = jax.jit(on_arrays) if cache is None else cache.find(on_arrays)
    arrays: list[Any] = [leaves[i] for i in dynamic]
    names = dict.fromkeys(describe[owners[i]].label for i in dynamic)
    own_labels = [labels[i] for i in dynamic]
    closed, result = _make_jaxpr(jitted, arrays, own_labels, list(names))
    _, rest = jax.tree.unflatten(result, range(result.num_leaves))
    if cache is not None:
        cache.keep(on_arrays, jitted)
    jaxpr, consts = open_jaxpr(closed)
    given = tuple(kinds[i] for i in dynamic)
    # A loss whose arguments are modules alone closes over its batch: usual in NNX.
    has_data = any(kind is not Kind.PARAMETER for kind in given)
    closed_over = Kind.PARAMETER if has_data else Kind.UNKNOWN
    flat = Flat(
        jaxpr,
        (closed_over,) * len(consts) + given,
        numbered(["closed over"] * len(consts) + own_labels),
        (-1,) * len(consts) + tuple(owners[i] for i in dynamic),
    )

    def rebuild(outputs: Sequence[Array]) -> Any:
        arrays = iter(outputs)
        out_tree, static = rest.value
        out = [next(arrays) if s is None else s[0] for s in static]
        return jax.tree.unflatten(out_tree, out)

    inputs: list[Any] = [*consts, *arrays]
    return flat, inputs, rebuild


def _label(
    values: Sequence[object], describe: Sequence[Argument]
) -> tuple[list[str], list[Kind], list[int]]:
    """Every leaf's label, kind and argument number."""
    labels, kinds, owners = [], [], []
    for number, (argument, value) in enumerate(zip(describe, values, strict=True)):
        for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]:
            labels.append(argument.label + jax.tree_util.keystr(path))
            kinds.append(argument.kind)
            owners.append(number)
    return labels, kinds, owners
