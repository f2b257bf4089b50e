"""Configures the documentation, which ``make docs`` builds offline.

With ``IKKUNA_DOCS_ONLINE=1``, names of torch and numpy link to their documentation.
"""

import os
import sys
from pathlib import Path

from sphinx.ext.napoleon import docstring

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "subscribers"), str(Path(__file__).parent / "_ext")]

import ikkuna  # noqa: E402

project = "ikkuna"
author = "The ikkuna developers"
copyright = author
version = release = ikkuna.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "ikkuna_costs",
    "ikkuna_gallery",
    "ikkuna_life",
    "ikkuna_rules",
    "ikkuna_tables",
    "ikkuna_trial",
]
html_theme = "furo"
html_title = "ikkuna"
templates_path = []
exclude_patterns = ["generated"]

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "both"  # in signatures, and in the sections of parameters
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = False
suppress_warnings = ["ref.python"]  # a word such as "name" in a type may be the name of two attributes

# References to names of ikkuna must resolve; names of other packages are not in the inventory.
nitpick_ignore_regex = [
    ("py:.*", r"(?!ikkuna).*"),
    ("py:class", r".*\.[A-Z]"),  # type variables
    ("py:class", r"ikkuna\.(observation|store\.append_file)\..*"),  # internal classes
    ("py:class", r"ikkuna\..*\._[A-Z].*"),  # private classes
    ("py:obj", r".*"),  # `name` in a docstring may be a parameter
]

intersphinx_mapping = {}
if os.environ.get("IKKUNA_DOCS_ONLINE") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
    }

# A colon in the summary of a property or of a constant does not end a type.
docstring.GoogleDocstring._parse_attribute_docstring = docstring.GoogleDocstring._consume_to_end
