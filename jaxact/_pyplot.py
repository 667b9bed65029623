"""Matplotlib, imported when a picture is drawn."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]


def new_axis(call: str, width: float, height: float) -> "Axes":
    """An axis to draw on, in a figure so large, in inches.

    Args:
      call: the method that draws, for errors.

    Raises:
      ImportError: matplotlib is missing.
    """
    try:
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"{call} needs matplotlib: pip install 'jaxact[plots]'."
        ) from error
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]
