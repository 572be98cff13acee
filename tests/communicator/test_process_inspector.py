"""Test that another process can see what a process does, even inside a C function."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from labkit.communicator.clock import WALL
from labkit.communicator.status_table import ProcessSnapshot, inspect_processes

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system")

BEGINS = """
import ctypes, sys, time
from labkit.communicator.status_table import install_stack_handler
install_stack_handler()
def stuck(call):
    print("ready", flush=True)
    call()
"""
STUCK = {
    "sleeps": "stuck(lambda: time.sleep(600))",
    # The loop is needed, because a signal ends a sleep in C.
    "holds the lock": "def hold():\n    while True: ctypes.PyDLL(None).sleep(600)\nstuck(hold)",
    "computes": "def spin():\n    while True: pass\nstuck(spin)",
    "stopped": "stuck(lambda: time.sleep(600))",
}


@contextmanager
def running(source: str) -> Iterator[int]:
    """Yield the ID of a process that has reached the last line of a script."""
    words = [sys.executable, "-c", BEGINS + source]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


@pytest.fixture(scope="module")
def seen() -> dict[str, ProcessSnapshot]:
    """Return snapshots of all stuck processes, and of one that has ended."""
    with ExitStack() as stack:
        pids = {name: stack.enter_context(running(source)) for name, source in STUCK.items()}
        os.kill(pids["stopped"], signal.SIGSTOP)
        os.waitid(os.P_PID, pids["stopped"], os.WSTOPPED | os.WNOWAIT)
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        pids["ended"] = ended.pid
        return dict(zip(pids, inspect_processes(list(pids.values()), WALL), strict=True))


def test_the_line_is_told_of_whoever_can_take_a_signal(seen: dict[str, ProcessSnapshot]) -> None:
    assert seen["sleeps"].line == "line 8 of <lambda>"
    assert seen["holds the lock"].line == "line 9 of hold"
    assert seen["computes"].line == "line 9 of spin"
    assert seen["stopped"].line == seen["ended"].line == ""


def test_stalls_are_told_from_death(seen: dict[str, ProcessSnapshot]) -> None:
    assert seen["stopped"].state == "stopped by a signal"
    assert seen["ended"].state == "gone"
    assert seen["sleeps"].state in ("asleep", "idle")  # the process may not sleep yet
    assert seen["holds the lock"].state in ("asleep", "idle")
    assert seen["computes"].state in ("busy", "idle", "without a core")


def test_the_users_line_is_told_beside_the_librarys() -> None:
    with running("import queue\nprint('ready', flush=True)\nqueue.Queue().get()") as pid:
        told = ""
        for _ in range(100):  # the process may not wait yet after its output
            if "threading.py" in (told := inspect_processes([pid], WALL)[0].line):
                break
    assert re.fullmatch(r"\S+/threading.py:\d+ wait, called from line 10 of a cell", told)
