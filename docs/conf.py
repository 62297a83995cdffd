"""How the documentation is built: `make docs`. Nothing is fetched while it is."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import swarm

project = "swarm"
author = "the authors of swarm"
version = release = swarm.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "sphinx.ext.napoleon", "reference"]
exclude_patterns = ["_ext", "_static"]

# pages
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# docstrings: prose with `backticks`, which docstrings.py makes safe to read as reStructuredText
default_role = "literal"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False

# the theme uses the fonts of the reader's system and follows its light or dark mode
html_theme = "furo"
html_title = f"swarm {release}"
html_static_path = ["_static"]
html_css_files = ["pictures.css"]
html_copy_source = False
html_show_sourcelink = False
