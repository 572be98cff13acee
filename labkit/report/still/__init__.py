"""Still pictures of figures, for browsers that do not run the page's scripts."""

from labkit.report.still.picture import picture

__all__ = ["picture"]
