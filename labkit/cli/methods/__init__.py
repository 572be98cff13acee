"""A catalogue of all methods with papers, parameters and notebooks, read from docstrings."""

from labkit.cli.methods.method import Family, Method, Parameter, families, sources, trying
from labkit.cli.methods.page import entries, map_page, page

__all__ = [
    "Family",
    "Method",
    "Parameter",
    "entries",
    "families",
    "map_page",
    "page",
    "sources",
    "trying",
]
