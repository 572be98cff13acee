"""Figures and text summaries of runs, of their communication, and of schedules.

Python imports each name of `__init__.pyi` at its first use. Python therefore loads only the modules
of figures in use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
