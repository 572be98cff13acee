"""Records of runs: files that are written atomically, with checks for damage and missing data."""

import lazy_loader

# The lazy import makes `labkit ls` fast, because `ls` only reads statuses and needs no exporters.
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["export"])
