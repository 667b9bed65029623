"""Guides and API reference: python -m sphinx -W -b html examples/docs build/docs.

Needs the extra `docs`. Signatures and docstrings are read from the checkout that this
file lies in, or from the installed jaxact.
"""

import shutil
import sys
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
suppress_warnings = ["myst.xref_missing"]  # a README's links to files without a page

default_role = "py:obj"  # `names` link to their entry, and are code without one
add_module_names = False
maximum_signature_line_length = 72
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Without the types, which signatures have.
napoleon_custom_sections = [("Attributes", "params_style")]


def setup(app):
    # One signature of compress reads better than one for each kind of target.
    analyzer = ModuleAnalyzer.for_module("jaxact._compress")
    analyzer.analyze()
    analyzer.overloads.clear()
