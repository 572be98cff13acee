"""Every method with its paper, its parameters and its notebooks, read from the docstrings."""

from labkit.cli.methods.method import Family, Method, Parameter, families
from labkit.cli.methods.page import page, sources, trying

__all__ = ["Family", "Method", "Parameter", "families", "page", "sources", "trying"]
