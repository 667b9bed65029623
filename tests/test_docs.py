"""The documentation builds without a warning, with its links and all public names."""

import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import jaxact
import jaxact_kernels

DOCS = Path(__file__).parent.parent / "examples" / "docs"


@pytest.mark.slow
def test_the_reference_has_every_public_name(tmp_path):
    for package in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(package)
    pages = tmp_path / "docs"  # beside it myst-nb keeps a cache
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", DOCS, pages]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    # Four lines of text, then the entries, compressed; a name comes first.
    _, _, _, _, entries = (pages / "objects.inv").read_bytes().split(b"\n", 4)
    found = {line.split()[0] for line in zlib.decompress(entries).decode().splitlines()}
    public = {name for name in vars(jaxact) if not name.startswith("_")}
    wanted = {f"jaxact.{name}" for name in public}
    wanted |= {f"jaxact_kernels.{name}" for name in jaxact_kernels.__all__}
    assert wanted <= found
    assert (pages / "examples.html").exists()
    front = (pages / "index.html").read_text()
    # Files that the README links to, as pages: a guide, a section, the changes.
    for link in "numerics.html#the-label-of-a-residual", "examples.html#on-a-gpu":
        assert f'href="{link}"' in front
    assert re.search(r'href="changelog.html"[^>]*><span class="[^"]*">Changes<', front)
