"""The user's line that a call comes from."""

import sys
from typing import Any, NamedTuple

from jaxact._jaxpr.source import LIBRARIES


class Line(NamedTuple):
    """A line in the user's program.

    Attributes:
      instruction: the offset of the call in its function's byte code, which tells apart
        the calls of one line.
      names: its module's global names.
    """

    filename: str
    number: int
    instruction: int
    names: dict[str, Any]


def user_line() -> Line:
    """The innermost line outside the libraries."""
    # `skip_file_prefixes` of `warnings.warn` exists from Python 3.12 on.
    innermost = frame = sys._getframe(1)
    while frame is not None and _package(frame.f_globals) in LIBRARIES:
        frame = frame.f_back
    frame = frame or innermost
    code = frame.f_code
    return Line(code.co_filename, frame.f_lineno, frame.f_lasti, frame.f_globals)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
