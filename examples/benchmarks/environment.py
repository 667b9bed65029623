"""Where and how numbers were measured."""

import datetime
import os
import platform
import shlex
import sys

import flax
import jax
import numpy

import jaxact


def environment() -> dict[str, str]:
    """The conditions beside every result: device, versions, command and date."""
    return {
        "device": f"{jax.devices()[0].device_kind} ({platform.machine()})",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "jaxact": jaxact.__version__,
        "numpy": numpy.__version__,
        "command": shlex.join(sys.argv),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
