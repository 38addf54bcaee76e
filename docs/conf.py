"""Sphinx's settings for the documentation: `make docs` builds it into build-cache/site."""

import sys
from pathlib import Path

from kvexport.version import __version__

sys.path.insert(0, str(Path(__file__).parent / "_extension"))

project = "kvexport"
copyright = "the kvexport authors, Apache-2.0"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "reference_pages"]
exclude_patterns = ["_*"]
html_theme = "furo"
html_title = "kvexport"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 4
# Files of the repository that pages link to are not part of the site.
suppress_warnings = ["myst.header"]
highlight_language = "none"
# Options begin with two hyphens, which must not become a dash.
smartquotes = False

# Docstrings write names in single back quotes.
default_role = "code"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
