"""Python in the README and in the guides runs as written, page by page."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
# Blocks in `libraries.md` are parts of programs; test_other_libraries.py has these.
GUIDES = sorted((ROOT / "examples" / "docs").glob("*.md"))
GUIDES = [page for page in GUIDES if page.stem != "libraries"]


def run_blocks(page):
    """Run a page's blocks of Python in one namespace; their number."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
    namespace = {"__name__": page.stem}
    with jax.numpy_dtype_promotion("standard"):  # as Flax asks
        for block in blocks:
            exec(compile(block, page.name, "exec"), namespace)
    return len(blocks)


@pytest.mark.slow
def test_the_blocks_of_the_readme_run(capsys):
    pytest.importorskip("flax")
    assert run_blocks(README) >= 2
    printed = capsys.readouterr().out
    assert "residuals: " in printed


@pytest.mark.unoptimized
@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_blocks_of_a_guide_run(page):
    run_blocks(page)


def test_some_guides_have_blocks():
    pages = {page.stem for page in GUIDES if "```python" in page.read_text()}
    assert {"bits", "composing", "numerics", "extending", "training"} <= pages
