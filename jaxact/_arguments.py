"""The arguments of a compressed call: how they are named, and for what they count."""

import dataclasses
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from jaxact._flat import Kind

# A call's arguments, by name or position.
Names: TypeAlias = str | int | Sequence[str | int]


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of the call: its label in tables, its kind, whether it is static."""

    label: str
    kind: Kind
    is_static: bool = False


def as_tuple(option: str, names: Names) -> tuple[str | int, ...]:
    """One name or position, or several, as a tuple.

    Args:
      option: the argument that they are given as, for messages.

    Raises:
      TypeError: neither, nor a sequence of them.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        several = (names,)
    else:
        several = tuple(names)
    if isinstance(names, Mapping) or not all(
        isinstance(name, str | Integral) and not isinstance(name, bool)
        for name in several
    ):
        raise TypeError(
            f"compress({option}={reprlib.repr(names)}): a name or position of an "
            f"argument, or several, is required, such as {option}='x'."
        )
    return several


def arguments(
    f: Callable[..., object],
    args: Sequence[object],
    kwargs: dict[str, Any],
    activations: Sequence[str | int] | None,
    static_argnums: Sequence[str | int],
) -> list[Argument]:
    """Describe a plain function call's arguments.

    Args:
      activations, static_argnums: names and positions, see `as_tuple`. The name for
        all further arguments, `xs` or `others` in f(x, *xs, **others), stands for each.

    Raises:
      ValueError: `activations` or `static_argnums` name an argument that the call
        does not have.
    """
    positional, others, keyword, named = _parameters(f)
    unnamed = [f"{others or 'args'}[{i}]" for i in range(len(args) - len(positional))]
    labels = [*(positional + unnamed)[: len(args)], *kwargs]
    known = list(dict.fromkeys([*labels, *positional, *keyword]))
    positions = range(-len(args), len(known))
    known += [name for name in (others, named) if name]
    given = {"activations": activations or (), "static_argnums": static_argnums}
    for option, names in given.items():
        for a in names:
            if a not in known and a not in positions:
                raise ValueError(
                    f"compress({option}=...): {a!r} is no argument of "
                    f"{getattr(f, '__name__', type(f).__name__)}, whose arguments are "
                    f"{known}. "
                    "Give names or positions of its arguments."
                )

    def argument(number: int, label: str) -> Argument:
        position = positional.index(label) if label in positional else number
        names = {label, position}
        if number < len(args):
            names.add(number - len(args))
            if number >= len(positional):
                names.add(others)
        elif label not in positional + keyword:
            names.add(named)
        is_static = not names.isdisjoint(static_argnums)
        if activations is None:
            return Argument(label, Kind.UNKNOWN, is_static)
        kind = Kind.PARAMETER if names.isdisjoint(activations) else Kind.ACTIVATION
        return Argument(label, kind, is_static)

    return [argument(i, label) for i, label in enumerate(labels)]


def _parameters(f: Callable[..., object]) -> tuple[list[str], str, list[str], str]:
    """The names: positional ones, the one for all further ones; the same by keyword."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature
        return [], "", [], ""
    named = lambda *kinds: [p.name for p in parameters if p.kind in kinds]
    kinds = inspect.Parameter
    return (
        named(kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD),
        "".join(named(kinds.VAR_POSITIONAL)),
        named(kinds.KEYWORD_ONLY),
        "".join(named(kinds.VAR_KEYWORD)),
    )
