"""What is tested under the newest JAX alone.

Our own arithmetic over many shapes, widths and values, and ways of lifting a module
beyond one of each kind: a version of JAX changes how a program is traced and compiled,
which the rest of the same file tests under every one.
"""

import jax
import pytest

newest = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the same under every JAX: see newest.py"
)


def mostly_newest(values, everywhere):
    """`pytest.param`s: under every version only the values with these names."""
    return [
        pytest.param(v, id=str(v), marks=() if str(v) in everywhere else newest)
        for v in values
    ]
