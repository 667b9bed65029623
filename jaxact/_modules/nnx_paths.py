"""Paths for NNX modules, which know neither their names nor their parents.

Above a compressed call, the modules that hold its module are on the Python stack: their
methods call it. Below, submodules open a scope with their attribute path while the call
is traced. For that time their classes have another `__call__`; the modules keep their
classes, which a call may ask for, and two equal layers have equal graphs as before.
"""

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxact._engine.number import scope_in_trace
from jaxact._modules.original import original_of
from jaxact._residual import join_paths

# A submodule's path below the module of the compressed call that is being traced.
_PATH = "_jaxact_path"


@dataclasses.dataclass(frozen=True)
class _Path:
    """Equal to each other one: a layer is the same anywhere."""

    text: str = dataclasses.field(compare=False)


class Place(NamedTuple):
    """Where a compressed call is.

    Attributes:
      scope: to open around it.
      above: the path that starts with that scope; None: JAX's current scopes.
    """

    scope: str
    above: str | None = None


class _Opened(NamedTuple):
    """A module that is being called.

    Attributes:
      call: the path of the compressed call that it is called in.
      path: the module's, below that.
    """

    call: str
    path: str


class _Stack(threading.local):
    """The modules that are being called inside compressed calls, innermost last."""

    def __init__(self) -> None:
        self.opened: list[_Opened] = []


_stack = _Stack()


class _Scoped(NamedTuple):
    """A class whose `__call__` opens scopes.

    Attributes:
      call: that method.
      own: the one that the class itself had; None: it inherits one.
      count: the traces that need it, in all threads.
    """

    call: Callable[..., object]
    own: object
    count: int


_scoped: dict[type, _Scoped] = {}
_lock = threading.Lock()


def place_of(modules: Sequence[object], *, is_traced: bool) -> Place:
    """The place of a compressed call with these modules; the first one names it.

    Args:
      is_traced: whether the call is part of a trace. One that is evaluated at once has
        no derivative, so nobody reads its path.
    """
    module = next((m for m in modules if isinstance(m, nnx.Module)), None)
    if module is None:
        return Place("")
    path = vars(module).get(_PATH)
    if path is not None and _stack.opened:
        call, outer = _stack.opened[-1]
        scope = _below(outer, path.text)
        whole = join_paths(call, path.text)
        return Place(scope, whole.removesuffix(scope).strip("/"))
    above = _path_in_holder(module) if is_traced else None
    return Place(scope_in_trace(type(module).__name__) if above is None else above)


@contextlib.contextmanager
def submodules_named(modules: Sequence[object], call: str) -> Iterator[None]:
    """A context in which the modules' submodules open scopes when they are called.

    Args:
      call: the path of the compressed call.
    """
    named: dict[int, Any] = {}
    outer: dict[int, _Path | None] = {}
    classes: dict[type, None] = {}
    for number, module in enumerate(modules):
        top = (type(module).__name__,) if number else ()
        for keys, node in list(nnx.iter_graph(module)):
            is_root = not (top or keys)
            # A shared module belongs to its first holder.
            if is_root or id(node) in named or not isinstance(node, nnx.Module):
                continue
            named[id(node)] = node
            outer[id(node)] = vars(node).get(_PATH)
            vars(node)[_PATH] = _Path("/".join(map(str, (*top, *keys))))
            # A compressed method opens its scope itself.
            if callable(node) and original_of(type(node).__call__) is None:
                classes[type(node)] = None
    _stack.opened.append(_Opened(call, ""))
    _open_scopes(classes)
    try:
        yield
    finally:
        _close_scopes(classes)
        _stack.opened.pop()
        for number, node in named.items():
            vars(node).pop(_PATH, None)
            # The call that this one is in has its paths in the copies too.
            if outer[number] is not None:
                vars(node)[_PATH] = outer[number]


def _open_scopes(classes: Iterable[type]) -> None:
    """Let the classes' calls open scopes."""
    with _lock:
        for cls in classes:
            entry = _scoped.get(cls)
            if entry is None:
                own = vars(cls).get("__call__")
                entry = _Scoped(_with_scope(cls.__call__), own, 0)
                type.__setattr__(cls, "__call__", entry.call)
            _scoped[cls] = entry._replace(count=entry.count + 1)


def _close_scopes(classes: Iterable[type]) -> None:
    """Give the classes their calls back, once no trace needs the others."""
    with _lock:
        for cls in classes:
            entry = _scoped[cls] = _scoped[cls]._replace(count=_scoped[cls].count - 1)
            if entry.count:
                continue
            del _scoped[cls]
            if vars(cls).get("__call__") is not entry.call:
                continue  # somebody gave it another one meanwhile
            if entry.own is None:
                type.__delattr__(cls, "__call__")
            else:
                type.__setattr__(cls, "__call__", entry.own)


def _with_scope(call: Callable[..., object]) -> Callable[..., object]:
    """A module's `__call__` in a scope with the module's path."""

    @functools.wraps(call)
    def scoped(self: object, *args: object, **kwargs: object) -> object:
        path = vars(self).get(_PATH)
        # It may be the call of a base class, from a scope of its own.
        if path is None or not _stack.opened or path.text == _stack.opened[-1].path:
            return call(self, *args, **kwargs)
        opened = _stack.opened[-1]
        _stack.opened.append(_Opened(opened.call, path.text))
        try:
            with jax.named_scope(_below(opened.path, path.text)):
                return call(self, *args, **kwargs)
        finally:
            _stack.opened.pop()

    return scoped


def _below(outer: str, path: str) -> str:
    """`path` from `outer` on; all of it if it is elsewhere, as for shared modules."""
    return path.removeprefix(f"{outer}/") if outer else path


def _path_in_holder(module: nnx.Module) -> str | None:
    """The path from the outermost module on the Python stack that holds this one.

    It starts with the holder's class, as 'GPT/blocks/0'. Frames beyond JAX's own belong
    to another trace, with other copies of the modules; they are not looked at, because
    that would keep a training loop's old values alive.
    """
    found: dict[int, nnx.Module] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (package := _package(frame)) != "jax":
        if package not in ("jaxact", "flax"):
            for value in list(frame.f_locals.values()):
                if isinstance(value, nnx.Module) and value is not module:
                    found[id(value)] = value
        frame = frame.f_back
    for holder in reversed(found.values()):  # the outermost first
        for keys, node in nnx.iter_graph(holder):
            if node is module:
                return "/".join(map(str, (type(holder).__name__, *keys)))
    return None


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
