"""Code objects of calls on an engine: one for all that are equal, however often they arrive.

TensorFlow keeps the stack of each graph operation for as long as a process lives, once for all
equal stacks. A stack consists of code objects, and each call brings new ones: of the line by which
ipyparallel calls a function, and of functions that travel by value.
"""

from __future__ import annotations

import io
from collections import ChainMap
from functools import lru_cache
from types import CodeType
from typing import Any, ClassVar

SOME = 4096  # code objects that are kept, those of the last calls


def intern(code: CodeType) -> CodeType:
    """Return the first code object that equals this one, from the same lines of the same file."""
    return _first(code, code.co_filename, code.co_linetable)


@lru_cache(SOME)
def _first(code: CodeType, file: str, lines: bytes) -> CodeType:
    return code


def construct(*arguments: Any) -> CodeType:
    """Return the interned code object of these arguments of `CodeType`."""
    return intern(CodeType(*arguments))


def execute(line: str, *namespaces: dict[str, Any]) -> None:
    """Execute a line in its interned code object."""
    exec(intern(compile(line, "<string>", "exec")), *namespaces)


def dumps(value: object) -> bytes:
    """Pickle a value like cloudpickle, and its code objects like ipyparallel."""
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
    """Let ipyparallel's engine in this process intern the code objects of calls."""
    from ipyparallel.engine import app, kernel
    from ipyparallel.serialize import codeutil

    class Kernel(kernel.IPythonParallelKernel):
        """ipyparallel's kernel, which calls each function by the same line."""

        def do_apply(self, content: Any, buffers: Any, message: str, metadata: Any) -> Any:
            """Call a function; the line consists of names that contain the message's."""
            return super().do_apply(content, buffers, "call", metadata)

    app.Kernel = Kernel
    vars(kernel)["exec"] = execute  # the module's own name stands before the builtin one
    codeutil.code_ctor = construct
