"""Reports of the call that a rank's main thread executes, even if MPI blocks the thread."""

from __future__ import annotations

import json
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import FrameType

# A process has 3 s (ANSWER) to report its current call, which is enough even under load.
ANSWER = 3.0
LONGEST = 70  # A report shows at most 70 characters (LONGEST) of the source text of a call.


def start_reporting(folder: Path) -> None:
    """Start a thread that writes the main thread's current call to `folder` upon SIGUSR1.

    One thread waits for the signal SIGUSR1, and all other threads block SIGUSR1. The signal SIGUSR1
    therefore does not interrupt calls of the main thread. Call this function before other threads
    start, because threads inherit the signal mask.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    main = threading.main_thread().ident or 0

    def listen() -> None:
        while True:
            signal.sigwait({signal.SIGUSR1})
            # If the disk is full, the process that requested the report times out.
            with suppress(OSError):
                _write_location(folder, main)

    threading.Thread(target=listen, name="labkit-where", daemon=True).start()


def request_locations(folder: Path, processes: Sequence[int]) -> list[str | None]:
    """Return the current call of each process; None for a process that does not answer in time."""
    files = [_file(folder, process) for process in processes]
    for process, file in zip(processes, files, strict=True):
        file.unlink(missing_ok=True)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    end = time.monotonic() + ANSWER
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(0.01)
    return [_read_and_remove(file) for file in files]


def describe_location(innermost: FrameType) -> str:
    """Return a thread's current call and its location, e.g. "comm.Allreduce(a, b) (cell, line 4)".

    While labkit waits internally, the text names the user's labkit call, such as `barrier`. During
    an internal wait, the text contains the line of the user's call.
    """
    frames = list(_outward(innermost))
    wait = _labkit_wait(frames)
    inner = next((f for f in frames if not (wait and _is_communicator(f))), innermost)
    # For a call inside a library, the report also contains the notebook cell's line.
    cell = next((frame for frame in frames if _is_cell(frame)), inner)
    text = f"{wait or _call(inner)} ({_location(inner)})"
    return text if cell is inner else f"{text}, from line {cell.f_lineno} of the cell"


def _write_location(folder: Path, thread: int) -> None:
    try:
        text = describe_location(sys._current_frames()[thread])
    except Exception as error:  # frames may change while they are read; a later request may succeed
        text = f"an unknown place ({type(error).__name__}: {error})"
    file = _file(folder, os.getpid())
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps(text))
    # The requester reads the file as soon as the file exists. An atomic rename creates the file
    # with its complete content.
    temporary.replace(file)


def _file(folder: Path, process: int) -> Path:
    return folder / f"where-{process}.json"


def _read_and_remove(file: Path) -> str | None:
    if not file.exists():
        return None
    text = str(json.loads(file.read_text()))
    file.unlink(missing_ok=True)
    return text


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _labkit_wait(frames: Sequence[FrameType]) -> str:
    """Return the name of the communicator call that is waiting for other ranks, or ""."""
    # A process that waits for other ranks has already imported the module `wait_policy`.
    wait_policy = getattr(sys.modules.get("labkit.communicator.wait_policy"), "WaitPolicy", ())
    waiting = (frame.f_locals.get("self") for frame in frames if _is_communicator(frame))
    return next((str(owner.call_name) for owner in waiting if isinstance(owner, wait_policy)), "")


def _is_communicator(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("labkit.communicator.")


def _is_cell(frame: FrameType) -> bool:
    """Return whether a frame is the top level of a notebook cell, whose code has no source file."""
    return frame.f_code.co_name == "<module>" and not os.path.exists(frame.f_code.co_filename)


def _location(frame: FrameType) -> str:
    file = Path(frame.f_code.co_filename)
    if file.exists():
        return f"{file.parent.name}/{file.name}:{frame.f_lineno}"
    name = "cell" if _is_cell(frame) else frame.f_code.co_name
    return f"{name}, line {frame.f_lineno}"


def _call(frame: FrameType) -> str:
    """Return the source text of the expression that a frame evaluates, or its function's name."""
    code = frame.f_code
    # `f_lasti` is the byte offset of the current bytecode instruction. Each bytecode instruction
    # has two bytes. The number of the current instruction is `f_lasti // 2`. Column offsets from
    # `co_positions` count UTF-8 bytes, not characters.
    begin, end, left, right = next(islice(code.co_positions(), frame.f_lasti // 2, None))
    if begin is None or end is None or left is None or right is None:
        return code.co_name
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(begin, end + 1)]
    lines[-1] = lines[-1][:right]
    lines[0] = lines[0][left:]
    text = " ".join(b"".join(lines).decode(errors="replace").split()) or code.co_name
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
