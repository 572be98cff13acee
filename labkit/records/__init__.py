"""Records of runs: labkit writes the files atomically, and reports damaged or missing data."""

import lazy_loader

# The lazy import keeps `labkit ls` fast, because `ls` reads only statuses and needs no exporters.
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["export"])
