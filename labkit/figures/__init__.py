"""Figures: what runs reached and how fast, and what their communication does and costs.

Each name of `__init__.pyi` is imported when it is first used: a cluster's live curves do not wait
for what draws the others.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
