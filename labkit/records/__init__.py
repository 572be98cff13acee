"""Records of runs: files that are written atomically, with checks for damage and missing data."""

import lazy_loader

# The lazy import keeps the command `labkit ls` fast, which only reads the states of runs and needs
# no exporters.
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["export"])
