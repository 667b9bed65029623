"""The README's Python runs as written, from top to bottom in one namespace."""

import re
from pathlib import Path

import jax
import pytest

from support.gpu_target import needs_target

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.unoptimized
@needs_target
@pytest.mark.slow
def test_the_blocks_run(capsys):
    pytest.importorskip("flax")
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.S | re.M)
    assert len(blocks) >= 5
    namespace = {"__name__": "readme"}
    with jax.numpy_dtype_promotion("standard"):  # as Flax asks
        for block in blocks:
            exec(compile(block, README.name, "exec"), namespace)
    printed = capsys.readouterr().out
    assert "residuals: " in printed and " MiB on " in printed
