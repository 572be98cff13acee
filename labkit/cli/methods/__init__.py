"""A catalogue of all methods with papers, parameters and notebooks, read from docstrings."""

from labkit.cli.methods.method import Family, Method, Parameter, families
from labkit.cli.methods.page import map_page, page
from labkit.cli.methods.places import sources, trying

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
