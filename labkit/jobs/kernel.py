"""The kernel that executes jobs: IPython's, except that it never drops an output."""

from __future__ import annotations

import sys
from typing import Any

import zmq
from ipykernel.kernelapp import IPKernelApp

# A job is not debugged, and the debugger takes longer to import than all else: ipykernel, which
# looks for it once, shall not find it.
if "debugpy" not in sys.modules:
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    import ipykernel.debugger  # noqa: F401

    del sys.modules["debugpy"]


class LosslessKernel(IPKernelApp):
    """IPython's kernel with room for any number of outputs that wait for a slow reader.

    ZeroMQ keeps 1,000 messages for a subscriber and drops what comes after them: outputs of a
    chatty cell, and among them the word that the cell has ended.
    """

    def init_iopub(self, context: Any) -> None:
        """Lift the limit before the socket for outputs is made."""
        context.setsockopt(zmq.SNDHWM, 0)
        super().init_iopub(context)  # type: ignore[no-untyped-call]  # ipykernel gives it none


if __name__ == "__main__":
    LosslessKernel.launch_instance()
