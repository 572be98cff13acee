"""Sphinx configuration of labkit's book; `labkit docs` builds it without a network.

The sources are this folder's notebooks and the pages in `guide`. Notebooks are shown as they are
stored. Sphinx never executes a notebook.
"""

from __future__ import annotations

import re
from typing import Any

import labkit

project = "labkit"
author = "the labkit authors"
copyright = f"2026, {author}"
release = version = labkit.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",  # formulas need no network
    "sphinx_click",
]
exclude_patterns = ["runs", "images", "**/.ipynb_checkpoints"]

nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
# Prompts such as `$ labkit run` and cells with magics are not valid Python.
suppress_warnings = ["misc.highlighting_failure", "mystnb.unknown_mime_type"]

default_role = "code"  # a name in single backticks, as docstrings write it
autodoc_typehints = "none"  # pydantic's annotations are long, and docstrings give types and units
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_use_rtype = False
nitpick_ignore = [("py:exc", "RankError")]  # `labkit.cluster.RankError`, as docstrings name it

html_theme = "pydata_sphinx_theme"
html_title = "labkit"
html_theme_options = {
    "show_prev_next": True,
    "navigation_depth": 3,
    "show_toc_level": 2,
}
html_sidebars = {"**": ["sidebar-nav-bs"]}
html_show_sourcelink = False


# A docstring contains formulas as `\(a\)` and `\[a\]`, as Jupyter renders them.
FORMULA = re.compile(r"\\\[(?P<display>.+?)\\\]|\\\((?P<inline>.+?)\\\)", re.DOTALL)


def prepare_docstring(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Replace formulas and the paragraph `Source:` of a docstring by Sphinx's markup."""
    if what in ("property", "attribute"):  # napoleon takes words before a colon for a type
        lines[:1] = [line.replace(": ", " – ", 1) for line in lines[:1]]
    text, mark, source = "\n".join(lines).partition("\nSource: ")
    if mark:  # one paragraph, although its lines may be indented
        source = " ".join(source.split())
        source = source.replace("Difference from the paper:", "\n\n**Difference from the paper:**")
        text = f"{text}\n**Source:** {source}\n"
    lines[:] = _with_formulas(text).splitlines()


def _with_formulas(text: str) -> str:
    parts, end = [], 0
    for found in FORMULA.finditer(text):
        parts += [_escaped(text[end : found.start()]), _formula(**found.groupdict())]
        end = found.end()
    return "".join([*parts, _escaped(text[end:])])


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")  # `|B|` would be a substitution of docutils


def _formula(display: str | None, inline: str | None) -> str:
    if display is None:
        return f":math:`{' '.join((inline or '').split())}`"
    return f"\n\n.. math::\n\n   {' '.join(display.split())}\n"


def setup(app: Any) -> None:
    """Register the functions that Sphinx calls while it builds the book."""
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)  # before napoleon
