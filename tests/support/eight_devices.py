"""Tests on eight CPU devices, and what their programs exchange."""

import os
import re
import subprocess
import sys

COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
TIMEOUT = 900  # seconds: for a script that waits, many times what any takes


def run_on_eight_devices(script, *words):
    """Run a file with arguments where there are eight devices, and fail if it does.

    In a process of its own: the number of devices is fixed when the backend starts.
    """
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # LLVM's: XLA partitions as it does
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, script, *words]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def collectives(compiled):
    """The collectives that a compiled program names, wherever it does."""
    return re.findall(COLLECTIVES, str(compiled.as_text()))
