"""Still pictures of figures, which browsers show if they do not run the page's scripts."""

from labkit.report.still.picture import picture

__all__ = ["picture"]
