"""Where and how numbers were measured."""

import datetime
import importlib.metadata
import platform
import shlex
import sys
import tomllib
from pathlib import Path

import flax
import jax
import numpy


def environment() -> dict[str, str]:
    """The conditions beside every result: device, versions, command and date."""
    return {
        "device": f"{jax.devices()[0].device_kind} ({platform.machine()})",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "jaxact": jaxact_version(),
        "numpy": numpy.__version__,
        "command": shlex.join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def jaxact_version() -> str:
    """Of the installed package, or else of the checkout that this file belongs to."""
    try:
        return importlib.metadata.version("jaxact")
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        return tomllib.loads(project.read_text())["project"]["version"]
