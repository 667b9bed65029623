"""Which actions there are, and whether a value is one that keeps the contract."""

import dataclasses
import inspect

from jaxact import _codec
from jaxact._codec import Action, Bias, Bitfield


def require_action(argument: str, action: object) -> None:
    """Refuse all but an action that keeps the contract.

    Raises:
      TypeError: not an action, or one without a bias, bits or a hash.
    """
    name = type(action).__name__
    if not isinstance(action, Action):
        raise TypeError(
            f"{argument} takes an action, not {action!r}. {_as_action(action)}"
            f"Actions are {_actions()}; to write another, see jaxact.Codec."
        )
    if not isinstance(getattr(action, "bias", None), Bias):
        raise TypeError(
            f"{argument} takes an action that says how its rounding biases a gradient, "
            f"and {name} does not. Write `bias = jaxact.Bias.UNBIASED` (or BIASED, or "
            "EXACT) in the class."
        )
    if not hasattr(action, "bits"):
        raise TypeError(
            f"{argument} takes an action with the bits of a stored element, and {name} "
            "has none. Write `bits = 8`, or `bits = None` if it does not round."
        )
    try:
        hash(action)
    except TypeError:
        raise TypeError(
            f"{argument} takes an action that can be hashed, and {name} cannot. Write "
            "@dataclasses.dataclass(frozen=True) above the class, with fields that are "
            "hashable too."
        ) from None


def _as_action(value: object) -> str:
    """How to write a value that is no action as one; '' for others."""
    if isinstance(value, type) and issubclass(value, Action):
        return f"Write {value.__name__}(...), which makes one. "
    is_bits = type(value) is int and value in range(1, 9)
    return f"For bits write Quantize({value}). " if is_bits else ""


def _actions() -> str:
    """Every public action, with its first field: 'Exact(), Quantize(bits) and ...'."""
    calls = []
    for value in vars(_codec).values():
        is_action = isinstance(value, type) and issubclass(value, Action)
        if is_action and not inspect.isabstract(value) and value is not Bitfield:
            fields = [f.name for f in dataclasses.fields(value)]  # type: ignore[arg-type]
            calls.append(f"{value.__name__}({', '.join(fields[:1])})")
    return f"{', '.join(calls[:-1])} and {calls[-1]}"
