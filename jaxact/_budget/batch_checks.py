"""Arguments that `max_batch` takes, and the steps that it is given for batches."""

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxact._codec.checks import checked_int
from jaxact._memory.compiling import trace
from jaxact._memory.size import parsed
from jaxact._memory.targets import gpu_of
from jaxact._policy import Policy


def check(step_of_batch: object, policies: object) -> None:
    """Refuse another value than a function, or than a mapping to policies.

    Raises:
      TypeError: it is one.
    """
    if not callable(step_of_batch):
        raise TypeError(
            f"jaxact.max_batch({reprlib.repr(step_of_batch)}): a function from a "
            "batch size to (step, arguments) is required."
        )
    is_mapping = isinstance(policies, Mapping) and policies
    if not is_mapping or not all(
        isinstance(p, Policy | None)
        for p in policies.values()  # type: ignore[attr-defined]
    ):
        raise TypeError(
            f"jaxact.max_batch(policies={reprlib.repr(policies)}): a mapping from "
            "names to policies is required: {'2 bits': jaxact.Policy(bits=2), 'now': "
            "None}."
        )


def checked_count(name: str, count: object) -> int:
    """An integer from 1 on.

    Raises:
      ValueError: it is none.
    """
    return checked_int(
        count,
        range(1, 1 << 31),
        f"jaxact.max_batch({name}={count!r}): an integer of at least 1 is required, "
        f"such as {name}=2.",
    )


def checked_known(known: object) -> Mapping[str, Mapping[int, int]]:
    """Bytes by batch, for each name.

    Raises:
      TypeError: another value.
    """
    is_mapping = isinstance(known, Mapping | None)
    several = dict(known or {}) if is_mapping else {}  # type: ignore[call-overload]
    is_size = lambda x: isinstance(x, int | np.integer) and x is not True and x >= 0
    if not is_mapping or not all(
        isinstance(sizes, Mapping) and all(map(is_size, (*sizes, *sizes.values())))
        for sizes in several.values()
    ):
        raise TypeError(
            f"jaxact.max_batch(known={reprlib.repr(known)}): for names of policies "
            "the bytes by batch are required: {'2 bits': {8: 2**30}}."
        )
    return {
        name: {int(n): int(size) for n, size in sizes.items()}
        for name, sizes in several.items()
    }


def limit_of(
    target: str | None, budget: str | int | None, reserve: str | int | float
) -> int:
    """The bytes that a step may take.

    Raises:
      ValueError: no memory is given, a wrong size, or nothing left beside the reserve.
    """
    if budget is None and target is None:
        raise ValueError(
            "jaxact.max_batch: the memory of the device is required: a target such as "
            "target='h100', or budget='24GiB'."
        )
    whole = gpu_of(str(target)).memory_bytes if budget is None else budget
    device_bytes = parsed(whole, "jaxact.max_batch(budget").of(0)
    kept = 0
    if reserve:
        size = parsed(reserve, "jaxact.max_batch(reserve", "the budget")
        kept = size.of(device_bytes)
    if kept >= device_bytes:
        raise ValueError(
            f"jaxact.max_batch(budget={budget!r}, reserve={reserve!r}): a reserve "
            "below the budget is required, such as reserve=0.05."
        )
    return device_bytes - kept


def step_for(
    step_of_batch: Callable[[int], Any], batch: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step for a batch, and its arguments.

    Raises:
      TypeError: `step_of_batch` gave something else.
    """
    try:
        made = step_of_batch(batch)
    except TypeError as error:  # such as that of a step, in place of the function
        error.add_note(
            f"jaxact.max_batch called step_of_batch({batch}), which has to return "
            "(step, arguments) for a batch of this size."
        )
        raise
    is_pair = isinstance(made, tuple) and len(made) == 2
    if not is_pair or not callable(made[0]) or not isinstance(made[1], tuple | list):
        raise TypeError(
            f"jaxact.max_batch: step_of_batch({batch}) returned {_kinds(made)}; (step, "
            "tuple of its arguments) is required: `return step, (x,)`."
        )
    return made[0], tuple(made[1])


def _kinds(made: object) -> str:
    if not isinstance(made, tuple):
        return f"a value of type {type(made).__name__}"
    return f"({', '.join(type(part).__name__ for part in made)})"


def require_use(step_of_batch: Callable[[int], Any], sizes: Mapping[int, int]) -> None:
    """Refuse a step that is the same for both batches: any other would fit too.

    Args:
      sizes: bytes that two batches take.

    Raises:
      ValueError: they are equal, and so are the programs.
    """
    (first, before), (second, after) = sizes.items()
    if before == after and _program(step_of_batch, first) == _program(
        step_of_batch, second
    ):
        raise ValueError(
            f"jaxact.max_batch: step_of_batch({first}) and step_of_batch({second}) "
            "take the same bytes. Use the batch: return step, (state, "
            "jax.ShapeDtypeStruct((n, 512), jnp.float32))."
        )


def _program(step_of_batch: Callable[[int], Any], batch: int) -> str:
    """A step as text, without the addresses that functions in it have."""
    step, args = step_for(step_of_batch, batch)
    return re.sub("0x[0-9a-f]+", "", str(trace(step, args, {}).jaxpr))
