"""What is kept of a run: written whole or not at all, read with every doubt said aloud."""

import lazy_loader

# `labkit ls` reads statuses; it does not wait for what exports need.
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["export"])
