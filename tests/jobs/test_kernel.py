"""Test that a job receives all output of its kernel, as soon as the kernel listens."""

import subprocess
import sys
from pathlib import Path

# A separate process forks, because the test process has threads and sockets that a job has not.
BEGINS = """
import asyncio, os, socket
from pathlib import Path
import zmq
os.environ["LABKIT_JOB"] = os.getcwd()
from labkit.jobs.job import Kernel, prepare
prepare()
kernel = Kernel(Path())
kernel.fork()
manager = kernel.manager
"""
HEARS = """
async def act():
    await manager.start_kernel()
    for port in {*manager.ports} - {manager.hb_port}:  # a thread of its own binds that one
        socket.create_connection((manager.ip, port)).close()  # nothing refuses it
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    print("limit", client.iopub_channel.socket.getsockopt(zmq.RCVHWM))
    await client.execute_interactive("print('heard')", timeout=60)
    client.stop_channels()
asyncio.run(act())
kernel.close()
"""
TAKEN = """
taken = socket.create_server((manager.ip, 0))
manager.cache_ports, manager.shell_port = False, taken.getsockname()[1]
async def act():
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
asyncio.run(act())
"""
INTERRUPTED = """
from labkit.jobs.job import _interrupt
async def execute(client, code):
    # Else what comes at once after an error would be told "aborted".
    reply = await client.execute(code, reply=True, timeout=60, stop_on_error=False)
    print(reply["content"].get("ename") or reply["content"]["status"])
async def act():
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    me = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    once = f"{me}; get_ipython().events.callbacks['pre_run_cell'].clear()"
    at = f"get_ipython().events.register('pre_run_cell', lambda _: exec({once!r}))"
    await execute(client, f"{me}; import time; time.sleep(600)")
    await execute(client, "1")
    _interrupt(kernel._pid)  # between two cells
    await execute(client, "1")
    await execute(client, at)
    await execute(client, "1")  # as it is prepared
    await execute(client, f"import asyncio; await asyncio.sleep(0); {me}")
    await execute(client, "1")  # the one before had nothing left to be struck in
    await execute(client, f"{me}; await asyncio.sleep(600)")
    await execute(client, "1")
    client.stop_channels()
asyncio.run(act())
kernel.close()
"""


def run(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", BEGINS + code], cwd=folder, capture_output=True, text=True
    )


def test_a_kernel_that_has_started_listens_and_is_heard_from_then_on(tmp_path: Path) -> None:
    done = run(HEARS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "limit 0\nheard\n"  # there is no limit, so no waiting message is dropped


def test_a_kernel_that_ends_before_it_listens_is_not_waited_for(tmp_path: Path) -> None:
    done = run(TAKEN, tmp_path)
    assert done.returncode != 0
    assert "Address already in use" in done.stderr
    assert done.stderr.endswith("RuntimeError: the kernel has ended before it was ready\n")


def test_an_interrupt_strikes_a_statement_or_the_next_one(tmp_path: Path) -> None:
    done = run(INTERRUPTED, tmp_path)
    assert done.returncode == 0, done.stderr
    struck = "KeyboardInterrupt"
    assert done.stdout.split() == [
        *(struck, "ok", struck, "ok", struck),
        *("ok", struck, "CancelledError", "ok"),
    ]
