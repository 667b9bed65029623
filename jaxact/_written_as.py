"""Answer a call whose arguments do not fit with how to write it.

Python says how many arguments are too many, and no more. Where a call takes a step and
the step's arguments, it is JAX that speaks about those, as arguments for its own.
"""

import functools
import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T", bound=Callable[..., Any])


def written_as(example: str) -> Callable[[_T], _T]:
    """A decorator for a function or dataclass; `example` is a call that fits.

    A call that raises no TypeError is as without it. Where one does, and its arguments
    do not fit the signature, or those after a step do not fit the step, the error says
    so in place of Python's or JAX's.
    """

    def decorate(target: _T) -> _T:
        if not isinstance(target, type):
            return _answering(target, target, example)
        init = _answering(target.__init__, target, example)
        setattr(target, "__init__", init)  # noqa: B010, pyright refuses an assignment
        return target  # type: ignore[return-value]

    return decorate


def _answering(f: _T, public: Callable[..., Any], example: str) -> _T:
    """`f`, a function or the `__init__` behind a public name."""

    @functools.wraps(f)
    def call(*args: object, **kwargs: object) -> Any:
        try:
            return f(*args, **kwargs)
        except TypeError:
            given = args if f is public else args[1:]
            problem = _problem(public, given, kwargs)
            if problem is None:
                raise
        called = f"{public.__name__}({_text(given, kwargs)})"
        raise TypeError(f"{called}: {problem}. Write {example}.")

    return call  # type: ignore[return-value]


def _problem(
    f: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> str | None:
    """Why these arguments do not fit, and which do; None: they fit."""
    signature = inspect.signature(f)
    parameters = signature.parameters.values()
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
        return f"{error}; {f.__name__}{inspect.Signature(bare)} is required"
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    rest = {name: value for name, value in kwargs.items() if name not in options}
    for step in _steps(args[0]):
        try:
            inspect.signature(step).bind(*args[1:], **rest)
        except ValueError:  # compiled code has no signature
            continue
        except TypeError as error:
            own = f", and options of {f.__name__}: {', '.join(options)}"
            return (
                f"{error}; the arguments that {_short(step)} takes are required after "
                f"it{own if options else ''}"
            )
    return None


def fits(
    f: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> bool:
    """Whether a function takes these arguments, as far as its signature tells."""
    try:
        inspect.signature(f).bind(*args, **kwargs)
    except ValueError:  # compiled code has no signature
        return True
    except TypeError:
        return False
    return True


def _steps(first: Any) -> list[Callable[..., Any]]:
    """The functions that a report is about: `compare` takes several, by name."""
    several = first.values() if isinstance(first, Mapping) else [first]
    return [f for f in several if inspect.isroutine(f) or hasattr(f, "__wrapped__")]


def _text(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    named = (f"{name}={_short(value)}" for name, value in kwargs.items())
    return ", ".join([*map(_short, args), *named])


def _short(value: object) -> str:
    """A value in few words; an array's numbers would say nothing here."""
    if isinstance(value, str | int | float | Sequence | None):
        return reprlib.repr(value)
    return getattr(value, "__name__", f"<{type(value).__name__}>")
