"""A budget as people write it: '12GiB', bytes, or a part of the uncompressed step."""

import dataclasses
import re
from typing import Literal, TypeAlias, cast

import numpy as np

# The memory that a budget limits: temporaries, or arguments and results too.
Limited: TypeAlias = Literal["temp", "device"]
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_TEXT = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)\s*(?:([kmgt])(i?)b|b)\s*", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Size:
    """Bytes, or a part of the uncompressed step's."""

    number: int | None
    ratio: float | None = None

    def of(self, whole: int) -> int:
        """The bytes, given those of the uncompressed step."""
        return int(whole * self.ratio) if self.number is None else self.number  # type: ignore[operator]


def parsed(budget: str | int | float, argument: str, whole: str = "") -> Size:
    """A budget in bytes, or as a ratio.

    Args:
      argument: the call and its argument, for errors.
      whole: whose part a ratio is; "" where none is taken.

    Raises:
      TypeError: neither text nor a number.
      ValueError: text that is no size, a number that is not positive or no ratio.
    """
    wrong = (
        f"{argument}={budget!r}): bytes are required, as an integer or as text such "
        "as '12GB' (10**9) or '12GiB' (2**30)"
    )
    if whole:
        wrong += f"; or a part of {whole}, a float below 1 such as 0.4"
    wrong += "."
    if isinstance(budget, np.integer | np.floating):
        budget = budget.item()
    if isinstance(budget, bool) or not isinstance(budget, str | int | float):
        raise TypeError(wrong)
    if isinstance(budget, str):
        found = _TEXT.fullmatch(budget)
        if found is None:
            raise ValueError(wrong)
        number, unit, binary = found.groups()
        factor = (_BINARY if binary else _UNITS)[(unit or "").lower()]
        budget = int(float(number.replace("_", "")) * factor)
    if isinstance(budget, float):
        if not whole or not 0 < budget < 1:
            raise ValueError(wrong)
        return Size(None, budget)
    if budget < 1:
        raise ValueError(wrong)
    return Size(budget)


def checked_of(call: str, of: object) -> Limited:
    """The memory that a budget limits.

    Args:
      call: the function that it was given to, for errors.

    Raises:
      ValueError: neither 'temp' nor 'device'.
    """
    if of not in ("temp", "device"):
        raise ValueError(
            f"{call}(of={of!r}): 'temp' or 'device' is required: temporaries, or "
            "all that the step takes of the device."
        )
    return cast(Limited, of)
