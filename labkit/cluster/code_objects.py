"""Interning of code objects on an engine, which prevents a memory leak in TensorFlow.

TensorFlow stores the call stack of each graph operation until the process ends. It stores equal
stacks only once. A call stack consists of Python code objects. Without interning, each call would
create new code objects. The new code objects belong to functions that are pickled by value. Another
new code object is the line with which ipyparallel calls a function.
"""

from __future__ import annotations

import io
from collections import ChainMap
from functools import lru_cache
from types import CodeType
from typing import Any, ClassVar

SOME = 4096  # The constant SOME is the maximum number of interned code objects.


def intern(code: CodeType) -> CodeType:
    """Return the first interned code object with the same code, file and line numbers."""
    return _first(code, code.co_filename, code.co_linetable)


@lru_cache(SOME)
def _first(code: CodeType, file: str, lines: bytes) -> CodeType:
    return code


def construct(*arguments: Any) -> CodeType:
    """Construct a code object from the arguments of `CodeType`; return the interned object."""
    return intern(CodeType(*arguments))


def execute(line: str, *namespaces: dict[str, Any]) -> None:
    """Compile a line of source, and execute its interned code object."""
    exec(intern(compile(line, "<string>", "exec")), *namespaces)


def dumps(value: object) -> bytes:
    """Pickle a value with cloudpickle, except for its code objects, which `reduce_code` pickles."""
    import cloudpickle
    from ipyparallel.serialize.codeutil import reduce_code

    class Pickler(cloudpickle.Pickler):
        dispatch_table: ClassVar = ChainMap(
            {CodeType: reduce_code}, cloudpickle.Pickler.dispatch_table
        )

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def intern_calls() -> None:
    """Make ipyparallel's engine in this process intern the code objects of calls."""
    from ipyparallel.engine import app, kernel
    from ipyparallel.serialize import codeutil

    class Kernel(kernel.IPythonParallelKernel):
        """An ipyparallel kernel whose function calls all execute the same line of source."""

        def do_apply(self, content: Any, buffers: Any, message: str, metadata: Any) -> Any:
            """Call a function with a constant message id, so that the executed line is constant."""
            return super().do_apply(content, buffers, "call", metadata)

    app.Kernel = Kernel
    # The module's new global `exec` shadows the builtin function `exec`.
    vars(kernel)["exec"] = execute
    codeutil.code_ctor = construct
