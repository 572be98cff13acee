"""Notification: a user's command that is executed once when a job or sweep ends."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from labkit.common.errors import InvalidInput
from labkit.common.terminal import one_line, plain, say
from labkit.common.units import duration_text
from labkit.jobs.elements import Elements
from labkit.jobs.listing import Entry, displayed_path, job_entry, sweep_entries
from labkit.jobs.running import Follow
from labkit.jobs.sweep import manifest
from labkit.records import store
from labkit.records.endings import describe_exit

LIMIT = 60.0  # A command that runs for more than LIMIT seconds is killed.
LOOK_EVERY = 0.2  # seconds between two looks at a job whose labkit process was killed


def command_words(command: str) -> list[str]:
    """Return the program and arguments of a command, which no shell interprets.

    Raises:
        InvalidInput: The quotes of the command do not match, or its program does not exist.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidInput(f"--notify {command!r}: {error}; close the quotation") from error
    if not words or shutil.which(words[0]) is None:
        raise InvalidInput(
            f"--notify {command!r}: there is no program {words[0] if words else ''!r}; give a "
            "program, or a command of a shell as \"sh -c '…'\""
        )
    return words


@contextmanager
def notifying(words: Sequence[str], notebook: Path) -> Iterator[Follow]:
    """Execute a user's command once when a job ends, however it ends.

    A separate process executes the command. It therefore also runs if this process is killed. The
    result of the command does not affect the job.

    Args:
        words: Program and arguments; [] for no command.
        notebook: Notebook or experiment file of the job.

    Yields:
        Function that receives the folder of the job or sweep after its start. Without a call, no
            command is executed.
    """
    if not words:
        yield lambda folder: None
        return
    # The process runs in its own session, so that Ctrl-C does not end it. Its stdout is stderr,
    # because the stdout of this process contains results.
    watcher = subprocess.Popen(
        [sys.executable, "-P", "-m", "labkit.jobs.notify", str(notebook), *words],
        stdin=subprocess.PIPE,
        stdout=2,
        text=True,
        start_new_session=True,
    )
    # The assertion tells the type checker that Popen has created a pipe.
    assert watcher.stdin is not None
    pipe = watcher.stdin

    def tell(**message: object) -> None:
        with suppress(BrokenPipeError):
            print(json.dumps(message), file=pipe, flush=True)

    end: dict[str, object] = {"exit_code": 0}
    try:
        yield lambda folder: tell(folder=str(folder.resolve()))
    except BaseException as error:
        end = {"exit_code": exit_code(error), "cause": "" if _is_exit(error) else str(error)}
        raise
    finally:
        # A forked process may keep the pipe open, so a message marks its end.
        tell(**end)
        with suppress(BrokenPipeError):
            pipe.close()
        watcher.wait()


def exit_code(error: BaseException) -> int:
    """Return the exit code of a `labkit` command that ends with an exception."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1 + isinstance(error, InvalidInput)


def _is_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit | KeyboardInterrupt)


def main(notebook: Path, words: Sequence[str]) -> None:
    """Wait until the job's process sends its end or dies, and execute the command.

    The environment of the command describes the job:

    - LABKIT_JOB_STATE: completed, failed, interrupted or pruned.
    - LABKIT_JOB_FOLDER: absolute path of the records.
    - LABKIT_JOB_NOTEBOOK: path of the notebook or experiment file.
    - LABKIT_JOB_EXIT_CODE: exit code of the `labkit` command; empty if a signal killed it.
    - LABKIT_JOB_SUMMARY: one sentence on one line.
    """
    message: dict[str, Any] = {}
    for line in sys.stdin:
        message |= json.loads(line)
        if "exit_code" in message:
            break
    if "folder" not in message:
        return
    folder, code = Path(message["folder"]), message.get("exit_code")
    entry = _ended(folder, notebook, code, message.get("cause", ""))
    variables = {
        "STATE": entry.state,
        "FOLDER": str(folder),
        "NOTEBOOK": str(notebook),
        "EXIT_CODE": "" if code is None else str(code),
        "SUMMARY": summary(entry, notebook, folder),
    }
    _execute(words, {f"LABKIT_JOB_{name}": value for name, value in variables.items()})


def _ended(folder: Path, notebook: Path, code: int | None, cause: str) -> Entry:
    """Return the entry of an ended job or sweep; without a record of the end, use the exit code."""
    entry = _entry(folder)
    # After the death of the `labkit` process, the job's own process still records the end.
    while code is None and entry and entry.state not in store.END_STATES:
        time.sleep(LOOK_EVERY)
        entry = _entry(folder)
    if entry and entry.state in store.END_STATES:
        return entry
    states = {0: "completed", 130: "interrupted", None: "interrupted"}
    return Entry(notebook.name, states.get(code, "failed"), cause=cause)


def _entry(folder: Path) -> Entry | None:
    """Return the entry of a sweep or job; None for the folder of an experiment's runs."""
    if (folder / manifest.FILE).exists():
        return sweep_entries(folder, folder.name, Elements())[str(folder)]
    exists = (folder / "status.json").exists()
    return job_entry(folder, folder.name, Elements()) if exists else None


def summary(entry: Entry, notebook: Path, folder: Path) -> str:
    """Return a sentence about an ended job or sweep on one line, without control characters.

    >>> summary(Entry("001", "failed", cause="no rows", rank=1), Path("a.ipynb"), Path("runs/a"))
    'a.ipynb failed on rank 1: no rows; records: runs/a'
    """
    duration = "" if entry.seconds is None else f" after {duration_text(entry.seconds)}"
    rank = "" if entry.rank is None else f" on rank {entry.rank}"
    cause = f": {entry.cause}" if entry.cause else ""
    records = displayed_path(folder)
    return plain(
        one_line(f"{notebook.name} {entry.state}{duration}{rank}{cause}; records: {records}")
    )


def _execute(words: Sequence[str], variables: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            words, env=os.environ | variables, stdin=subprocess.DEVNULL, timeout=LIMIT, check=False
        )
        problem = describe_exit(words[0], done.returncode).message if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        say(f"labkit: --notify: {one_line(problem)}; the job is unaffected", err=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
