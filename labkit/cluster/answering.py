"""A kernel whose cell waits for ranks answers what pages ask of their widgets all the same.

A kernel takes up one message at a time. A page that is loaded anew asks what kernel this is and how
its widgets stand, and would hear nothing before the cell has ended. But ipykernel (7) receives on a
thread of its own; while a cell waits, that thread answers such messages itself.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

from labkit.common.canonical_json import JSON

if TYPE_CHECKING:
    import zmq
    from ipykernel.ipkernel import IPythonKernel

Receive: TypeAlias = "Callable[[list[zmq.Frame]], Awaitable[None]]"

ANSWERED = {"kernel_info_request", "comm_info_request", "comm_open", "comm_msg", "comm_close"}


@contextmanager
def answering() -> Iterator[None]:
    """Wait inside of it; without a kernel, or with an older one, it does nothing."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kernel = cast("IPythonKernel", getattr(shell, "kernel", None))
    if shell is None or getattr(kernel, "shell_channel_thread", None) is None:
        yield
        return

    usual: Receive = kernel.shell_channel_thread_main

    async def take(message: list[zmq.Frame]) -> None:
        if not await _answered(kernel, message, shell.parent_header):
            await usual(message)

    # The thread's own loop calls it: a stream belongs to one thread.
    receive = partial(kernel.shell_channel_thread.io_loop.add_callback, kernel.shell_stream.on_recv)
    receive(take, copy=False)
    try:
        yield
    finally:
        receive(usual, copy=False)


async def _answered(kernel: IPythonKernel, message: list[zmq.Frame], cell: JSON) -> bool:
    """Whether it was one of those; all others keep their turn after the cell."""
    identities, parts = kernel.session.feed_identities(message, copy=False)
    header = kernel.session.deserialize(parts, content=False, copy=False)["header"]
    if header["msg_type"] not in ANSWERED:
        return False
    asked = kernel.session.deserialize(parts, copy=False)
    tell = partial(kernel.session.send, kernel.iopub_socket, "status", ident=b"status")
    tell({"execution_state": "busy"}, parent=asked)
    answer = kernel.shell_handlers[header["msg_type"]](kernel.shell_stream, identities, asked)
    if isinstance(answer, Awaitable):
        await answer
    # Pages wait for an idle kernel after each message; but the cell goes on.
    tell({"execution_state": "idle"}, parent=asked)
    tell({"execution_state": "busy"}, parent=cell)
    return True
