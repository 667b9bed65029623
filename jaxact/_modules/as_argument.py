"""A module that is called, as the first argument in its call.

Its state then travels with the arguments'. A module in a closure may not change.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

from jaxact._modules.find import for_state


def with_module(
    fn: Callable[..., Any], args: Sequence[Any]
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """`fn` and its positional arguments; a module, or its method, is one more there."""
    if isinstance(fn, types.MethodType) and for_state(fn.__self__):
        return fn.__func__, (fn.__self__, *args)
    if callable(fn) and for_state(fn):
        return _call, (fn, *args)
    return fn, args


def _call(module: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)
