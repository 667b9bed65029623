"""A progress bar where somebody watches."""

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def progress(items: Sequence[T], description: str) -> Iterable[T]:
    """`items`, one by one, with a bar on a terminal, if `rich` is installed.

    `rich` comes with the examples' dependencies; without it there is no bar.
    """
    if not sys.stderr.isatty():
        return items
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    console = Console(stderr=True)
    return track(items, description, console=console, transient=True)
