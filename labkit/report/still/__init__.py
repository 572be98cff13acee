"""Figures as pictures that need no script."""

from labkit.report.still.picture import picture

__all__ = ["picture"]
