"""Replies to messages of a Jupyter front end while a cell blocks the kernel.

A Jupyter kernel handles one message at a time. A browser page that is reloaded asks for the
kernel's info and for the state of its widgets. Without this module, the page would get no reply
before the running cell ends. ipykernel 7 receives messages on a separate thread, which can reply
while a cell waits for ranks.
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
    """Reply to front-end messages until the context ends; do nothing before ipykernel 7."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kernel = cast("IPythonKernel", getattr(shell, "kernel", None))
    if shell is None or getattr(kernel, "shell_channel_thread", None) is None:
        yield
        return

    usual: Receive = kernel.shell_channel_thread_main

    async def handle(message: list[zmq.Frame]) -> None:
        if not await _reply(kernel, message, shell.parent_header):
            await usual(message)

    # Only the event loop of the receiving thread may call `on_recv`, because a ZMQ stream belongs
    # to one thread.
    receive = partial(kernel.shell_channel_thread.io_loop.add_callback, kernel.shell_stream.on_recv)
    receive(handle, copy=False)
    try:
        yield
    finally:
        receive(usual, copy=False)


async def _reply(kernel: IPythonKernel, message: list[zmq.Frame], cell: JSON) -> bool:
    """Reply to a message and return True, or return False if the message must wait for the cell."""
    identities, parts = kernel.session.feed_identities(message, copy=False)
    header = kernel.session.deserialize(parts, content=False, copy=False)["header"]
    if header["msg_type"] not in ANSWERED:
        return False
    request = kernel.session.deserialize(parts, copy=False)
    publish = partial(kernel.session.send, kernel.iopub_socket, "status", ident=b"status")
    publish({"execution_state": "busy"}, parent=request)
    answer = kernel.shell_handlers[header["msg_type"]](kernel.shell_stream, identities, request)
    if isinstance(answer, Awaitable):
        await answer
    # A page waits for the status "idle" after each of its messages. The status "idle" is published
    # for the page although the cell is still running, and then "busy" again.
    publish({"execution_state": "idle"}, parent=request)
    publish({"execution_state": "busy"}, parent=cell)
    return True
