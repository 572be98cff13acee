"""Interning of code objects on an engine, which prevents a memory leak in TensorFlow.

TensorFlow stores the call stack of each graph operation until the process ends, and stores equal
stacks only once. A call stack consists of Python code objects. Without interning, each call would
create new code objects.
A new code object would represent the line with which ipyparallel calls a function, or a function
that is pickled by value.
"""

from __future__ import annotations

import io
from collections import ChainMap
from functools import lru_cache
from types import CodeType
from typing import Any, ClassVar

SOME = 4096  # maximum number of interned code objects


def intern(code: CodeType) -> CodeType:
    """Return the earliest interned object that equals `code` and has the same file and lines."""
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
        """A kernel like ipyparallel's, in which each function call executes the same line."""

        def do_apply(self, content: Any, buffers: Any, message: str, metadata: Any) -> Any:
            """Call a function; the executed line contains a constant instead of the message id."""
            return super().do_apply(content, buffers, "call", metadata)

    app.Kernel = Kernel
    vars(kernel)["exec"] = execute  # a global of the module, which shadows the builtin `exec`
    codeutil.code_ctor = construct
