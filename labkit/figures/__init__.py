"""Figures and text summaries of runs, of their communication, and of schedules.

Python imports each name of `__init__.pyi` at its first use. Live curves in cluster runs therefore
load no modules of other figures.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
