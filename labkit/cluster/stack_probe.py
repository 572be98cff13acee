"""Where a rank's main thread is: told by another thread, so even while it is stuck in MPI."""

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

ANSWER = 3.0  # seconds in which a process whose threads can run has answered, under load too
LONGEST = 70  # letters that are shown of a call


def answer(folder: Path) -> None:
    """From now on SIGUSR1 lets this process write into a folder where its main thread is.

    One thread waits for the signal, all others block it: nothing is polled, and the main thread's
    call goes on undisturbed. To be called before other threads start, which inherit the block.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    main = threading.main_thread().ident or 0

    def listen() -> None:
        while True:
            signal.sigwait({signal.SIGUSR1})
            with suppress(OSError):  # such as a full disk: the one who asks hears nothing this time
                _tell(folder, main)

    threading.Thread(target=listen, name="labkit-where", daemon=True).start()


def ask(folder: Path, processes: Sequence[int]) -> list[str | None]:
    """Where the main threads of processes are that `answer`; None for one that does not."""
    files = [_file(folder, process) for process in processes]
    for process, file in zip(processes, files, strict=True):
        file.unlink(missing_ok=True)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    end = time.monotonic() + ANSWER
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(0.01)
    return [_taken(file) for file in files]


def place(innermost: FrameType) -> str:
    """The call that a thread is in, and where it stands: "comm.Allreduce(a, b) (cell, line 4)".

    A wait of labkit's own is told by its name, at the line that asked labkit for it.
    """
    frames = list(_outward(innermost))
    wait = _labkit_wait(frames)
    inner = next((f for f in frames if not (wait and _is_communicator(f))), innermost)
    # The user's own line, however deep in a library the call is.
    cell = next((frame for frame in frames if _is_cell(frame)), inner)
    text = f"{wait or _call(inner)} ({_location(inner)})"
    return text if cell is inner else f"{text}, from line {cell.f_lineno} of the cell"


def _tell(folder: Path, thread: int) -> None:
    try:
        told = place(sys._current_frames()[thread])
    except Exception as error:  # frames go on while they are read; the next answer may be right
        told = f"an unknown place ({type(error).__name__}: {error})"
    file = _file(folder, os.getpid())
    whole = file.with_suffix(".part")
    whole.write_text(json.dumps(told))
    # Renamed when it is whole: who waits for it reads as soon as it is there.
    whole.replace(file)


def _file(folder: Path, process: int) -> Path:
    return folder / f"where-{process}.json"


def _taken(file: Path) -> str | None:
    if not file.exists():
        return None
    told = str(json.loads(file.read_text()))
    file.unlink(missing_ok=True)
    return told


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _labkit_wait(frames: Sequence[FrameType]) -> str:
    """The name of the call in which a WaitPolicy waits; empty where none does."""
    # Who has not imported it does not wait in it, and must not import it from this thread.
    patience = getattr(sys.modules.get("labkit.communicator.wait_policy"), "WaitPolicy", ())
    waiting = (frame.f_locals.get("self") for frame in frames if _is_communicator(frame))
    return next((str(each.place) for each in waiting if isinstance(each, patience)), "")


def _is_communicator(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("labkit.communicator.")


def _is_cell(frame: FrameType) -> bool:
    """Whether it is the top level of a cell, whose code lies in no file."""
    return frame.f_code.co_name == "<module>" and not os.path.exists(frame.f_code.co_filename)


def _location(frame: FrameType) -> str:
    file = Path(frame.f_code.co_filename)
    if file.exists():
        return f"{file.parent.name}/{file.name}:{frame.f_lineno}"
    name = "cell" if _is_cell(frame) else frame.f_code.co_name
    return f"{name}, line {frame.f_lineno}"


def _call(frame: FrameType) -> str:
    """The source of the expression that a frame evaluates, or the name of its function."""
    code = frame.f_code
    # Two bytes an instruction; columns are those of UTF-8.
    begin, end, left, right = next(islice(code.co_positions(), frame.f_lasti // 2, None))
    if begin is None or end is None or left is None or right is None:
        return code.co_name
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(begin, end + 1)]
    lines[-1] = lines[-1][:right]
    lines[0] = lines[0][left:]
    text = " ".join(b"".join(lines).decode(errors="replace").split()) or code.co_name
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
