"""Guides and API reference: python -m sphinx -W -b html examples/docs build/docs.

Needs the extra `docs`. Signatures and docstrings are read from the checkout that this
file lies in, or from the installed jaxact.
"""

import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

DOCS = Path(__file__).parent
ROOT = DOCS.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import jaxact  # noqa: E402  # from this checkout

# Sphinx reads files beside this one: the notebooks are copied there.
shutil.rmtree(DOCS / "notebooks", ignore_errors=True)
(DOCS / "notebooks").mkdir()
for notebook in DOCS.parent.glob("notebooks/*.ipynb"):
    shutil.copy2(notebook, DOCS / "notebooks")

project = "jaxact"
release = jaxact.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]
html_theme = "furo"
html_title = f"jaxact {release}"

nb_execution_mode = "off"  # notebooks are committed with their outputs
myst_heading_anchors = 3

default_role = "py:obj"  # `names` link to their entry, and are code without one
add_module_names = False
maximum_signature_line_length = 72
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Without the types, which signatures have.
napoleon_custom_sections = [("Attributes", "params_style")]


# The page of a file or folder, where it is not a page itself.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "examples": "examples.md",
    "examples/README.md": "examples.md",
    "examples/docs": "how_it_works.md",  # the first guide
    "examples/notebooks": "notebooks/quickstart.ipynb",  # the first notebook
}
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\(([^\s()#]+)(#[^\s()]*)?\)")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT.get("urls", {}).get("Repository")


def links(text, folder):
    """The text of a file in `folder`, with links to pages in place of those to files.

    A file without a page is linked in the repository, and is plain text if the project
    names none. A link to a file that does not exist stays, and fails the build.
    """

    def replaced(match):
        words, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        file = Path(os.path.normpath(folder / target))
        if not (file.exists() and file.is_relative_to(ROOT)):
            return match.group()
        path = file.relative_to(ROOT).as_posix()
        page = file.name if file.parent == DOCS else PAGES.get(path)
        if page is None and REPOSITORY is None:
            return words
        return f"[{words}]({page or f'{REPOSITORY}/blob/HEAD/{path}'}{anchor})"

    return LINK.sub(replaced, text)


def read_page(app, page, source):
    if Path(app.env.doc2path(page)).suffix == ".md":
        source[0] = links(source[0], DOCS)


def read_included(app, path, page, source):
    source[0] = links(source[0], (DOCS / path).parent)


def setup(app):
    # One signature of compress reads better than one for each kind of target.
    analyzer = ModuleAnalyzer.for_module("jaxact._compress")
    analyzer.analyze()
    analyzer.overloads.clear()
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
