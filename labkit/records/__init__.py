"""Records of runs: files that are written atomically, with checks for damage and missing data."""

import lazy_loader

# The module `export` is imported lazily, because the command `labkit ls` must be fast and needs no
# exporters.
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["export"])
