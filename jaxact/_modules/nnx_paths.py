"""Paths for NNX modules, which know neither their names nor their parents.

Above a compressed call, the modules that hold its module are on the Python stack: their
methods call it. Below, submodules open a scope with their attribute path while the call
is traced.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxact._engine.number import scope_in_trace
from jaxact._modules.original import original_of
from jaxact._residual import join_paths

# A submodule's path below the module of the compressed call that is being traced.
_PATH = "_jaxact_path"
_OPENS_SCOPE = "_jaxact_opens_scope"


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
        scope = _below(outer, path)
        return Place(scope, join_paths(call, path).removesuffix(scope).strip("/"))
    path = _path_in_holder(module) if is_traced else None
    return Place(scope_in_trace(type(module).__name__) if path is None else path)


@contextlib.contextmanager
def submodules_named(modules: Sequence[object], call: str) -> Iterator[None]:
    """A context in which the modules' submodules open scopes when they are called.

    Args:
      call: the path of the compressed call.
    """
    named: dict[int, tuple[Any, type]] = {}
    for number, module in enumerate(modules):
        top = (type(module).__name__,) if number else ()
        for keys, node in list(nnx.iter_graph(module)):
            is_root = not (top or keys)
            # A shared module belongs to its first holder.
            if is_root or id(node) in named or not isinstance(node, nnx.Module):
                continue
            named[id(node)] = node, type(node)
            vars(node)[_PATH] = "/".join(map(str, (*top, *keys)))
            # A compressed method opens its scope itself.
            if callable(node) and original_of(type(node).__call__) is None:
                node.__class__ = _with_scope(type(node))
    _stack.opened.append(_Opened(call, ""))
    try:
        yield
    finally:
        _stack.opened.pop()
        for node, cls in named.values():
            node.__class__ = cls
            vars(node).pop(_PATH, None)


@functools.cache
def _with_scope(cls: type) -> type:
    """A subclass whose `__call__` opens a scope with the module's path."""
    call: Any = cls.__call__
    if hasattr(call, _OPENS_SCOPE):
        return cls

    @functools.wraps(call)
    def scoped(self: object, *args: object, **kwargs: object) -> object:
        path = vars(self).get(_PATH)
        if path is None or not _stack.opened:
            return call(self, *args, **kwargs)
        opened = _stack.opened[-1]
        _stack.opened.append(_Opened(opened.call, path))
        try:
            with jax.named_scope(_below(opened.path, path)):
                return call(self, *args, **kwargs)
        finally:
            _stack.opened.pop()

    setattr(scoped, _OPENS_SCOPE, True)
    body = {"__call__": scoped, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), body | {"__qualname__": cls.__qualname__})


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
