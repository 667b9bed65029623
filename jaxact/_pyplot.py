"""Matplotlib, imported when a picture is drawn."""

from typing import Any


def pyplot(call: str) -> Any:
    """`matplotlib.pyplot`, for a method with this name.

    Raises:
      ImportError: matplotlib is missing.
    """
    try:
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"{call} needs matplotlib: pip install 'jaxact[plots]'."
        ) from error
    return pyplot
