"""What is tested under the newest JAX alone.

Our own arithmetic over many shapes, widths and values: a version of JAX changes how a
program is traced and compiled, which the rest of the same file tests under every one.
"""

import jax
import pytest

newest = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the same under every JAX: see newest.py"
)
