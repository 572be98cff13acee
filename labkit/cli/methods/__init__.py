"""A catalogue of all methods with papers, parameters and notebooks, read from docstrings."""

from labkit.cli.methods.map_page import map_page
from labkit.cli.methods.method import Family, Method, Parameter, families
from labkit.cli.methods.page import page
from labkit.cli.methods.trying import sources, trying

__all__ = [
    "Family",
    "Method",
    "Parameter",
    "families",
    "map_page",
    "page",
    "sources",
    "trying",
]
