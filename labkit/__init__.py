"""labkit: an experiment lab for distributed deep learning that lives in Jupyter.

The public names stand in `__init__.pyi`; each is imported when it is first used, so that a command
such as `labkit ls` does not wait for what it does not need.
"""

import copyreg
import importlib
import sys

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# A user's function that names labkit travels to the ranks, where it finds the same module. Pickle
# would do so by itself were it a plain one; lazy_loader gives it a class of its own.
copyreg.pickle(
    type(sys.modules[__name__]), lambda module: (importlib.import_module, (module.__name__,))
)
