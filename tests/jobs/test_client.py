"""A job hears its kernel: as soon as it is there, and all that it says."""

import asyncio

import pytest
import zmq
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from labkit.jobs import client
from labkit.jobs.client import Client


def manager() -> AsyncKernelManager:
    specifications = KernelSpecManager(kernel_dirs=[])
    return AsyncKernelManager(client_factory=Client, kernel_spec_manager=specifications)


async def ready() -> tuple[bool, int, list[str]]:
    """Whether anything was left to hear at first, the limit of outputs, and what a cell printed."""
    kernel = manager()
    await kernel.start_kernel()
    hearer = kernel.client()
    hearer.start_channels()
    try:
        await hearer.wait_for_ready(timeout=60)
        left = await hearer.iopub_channel.msg_ready()
        heard: list[str] = []

        def hear(message: dict[str, dict[str, str]]) -> None:
            heard.append(message["content"].get("text", ""))

        await hearer.execute_interactive("print('first')", timeout=60, output_hook=hear)
        return left, hearer.iopub_channel.socket.getsockopt(zmq.RCVHWM), heard
    finally:
        hearer.stop_channels()
        await kernel.shutdown_kernel(now=True)


def test_a_kernel_that_is_ready_has_nothing_left_to_say_and_is_heard_from_then_on() -> None:
    left, limit, heard = asyncio.run(ready())
    assert not left
    assert limit == 0  # none: what waits here is never dropped
    assert "first\n" in heard


async def wait_for_none() -> None:
    kernel = manager()
    kernel.write_connection_file()
    hearer = kernel.client()
    hearer.start_channels()
    try:
        await hearer.wait_for_ready(timeout=60)
    finally:
        hearer.stop_channels()
        kernel.cleanup_connection_file()


def test_a_kernel_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWERS", 0.1)
    with pytest.raises(RuntimeError, match="has ended before it answered"):
        asyncio.run(wait_for_none())
