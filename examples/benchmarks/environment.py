"""Where and how numbers were measured."""

import datetime
import platform
import shlex
import sys

import flax
import jax
import numpy


def environment() -> dict[str, str]:
    """What stands beside every result: device, versions, command and date."""
    return {
        "device": f"{jax.devices()[0].device_kind} ({platform.machine()})",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "numpy": numpy.__version__,
        "command": shlex.join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
