"""How a job hears its kernel: all that it says, and as soon as it is there."""

from __future__ import annotations

import math
import time
from queue import Empty

import zmq
import zmq.asyncio
from jupyter_client.asynchronous import AsyncKernelClient

RECONNECTS = 10  # milliseconds between two tries to reach a kernel that comes up
ANSWERS = 1.0  # seconds after which it is asked again
ARRIVES = 0.2  # seconds: what is published before the subscription has come is lost, so ask again


class Client(AsyncKernelClient):
    """A client that is ready as soon as the kernel is.

    jupyter_client's waits until nothing has come for 0.2 s, since other kernels may still say
    something; ours has said all when it has said that it is idle.
    """

    def _context_default(self) -> zmq.asyncio.Context:
        self._created_context = True
        context = zmq.asyncio.Context()
        context.setsockopt(zmq.RCVHWM, 0)  # this end of what labkit.jobs.kernel says about dropping
        # This end comes first: ZeroMQ would try again after 100 ms, when the kernel has long come.
        context.setsockopt(zmq.RECONNECT_IVL, RECONNECTS)
        return context

    async def wait_for_ready(self, timeout: float | None = None) -> None:
        """Wait for an answer, and for what the kernel publishes meanwhile.

        Raises:
            RuntimeError: the kernel has ended, or has not answered within `timeout` seconds.
        """
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while not await self._hears(self.kernel_info()):
            if not await self.is_alive():
                raise RuntimeError("the kernel has ended before it answered")
            if time.monotonic() > end:
                raise RuntimeError(f"the kernel has not answered within {timeout} s")

    async def _hears(self, question: str) -> bool:
        """Whether the answer to this message has come, and then that the kernel is idle."""
        try:
            await self.get_shell_msg(timeout=ANSWERS)
            while True:
                told = await self.get_iopub_msg(timeout=ARRIVES)
                if told["parent_header"].get("msg_id") == question and (
                    told["content"].get("execution_state") == "idle"
                ):
                    return True
        except Empty:
            return False
