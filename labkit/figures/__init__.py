"""Figures of runs, of their communication, and of schedules, with their summaries in sentences.

Each name of `__init__.pyi` is imported at its first use, so that the live curves of a cluster do
not wait for the modules of other figures.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
