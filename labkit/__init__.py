"""labkit: an experiment lab for distributed deep learning in Jupyter notebooks.

The file `__init__.pyi` lists the public names. Python imports each name at its first use, so that
commands such as `labkit ls` start without TensorFlow.
"""

import copyreg
import importlib
import sys

import lazy_loader

from labkit.common.reads import watch as _watch

__version__ = "0.1.0"
# A notebook may read its data before it uses labkit. The import therefore begins to note files.
_watch()
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    try:
        return _load(name)
    except AttributeError:
        from labkit.common.renamed import missing_attribute

        raise missing_attribute(__name__, name, __all__) from None


# Functions that are pickled and sent to the ranks may refer to the module labkit. Pickle cannot
# serialize the module subclass that lazy_loader creates. The reducer that `copyreg.pickle`
# registers makes pickle import the module labkit by its name.
copyreg.pickle(
    type(sys.modules[__name__]), lambda module: (importlib.import_module, (module.__name__,))
)
