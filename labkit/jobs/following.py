"""What runs under a command is passed on to other tools while it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from labkit.common.errors import InvalidInput, LabkitError

Follow = Callable[[Path], None]  # told the folder of the runs, once it is known


@contextmanager
def following(root: Path, mlflow: str | None, tensorboard: Path | None) -> Iterator[Follow]:
    """Pass runs on to MLflow and TensorBoard as they go, by a process of its own.

    At the end that process is waited for: it then completes what it has passed on.

    Args:
        root: folder of all runs, from which TensorBoard's names count.
        mlflow: a tracking server's address, or a file (SQLite).
        tensorboard: a folder.

    Raises: LabkitError, before anything starts, where one cannot be reached or is not installed.
    """
    if mlflow is None and tensorboard is None:
        yield lambda folder: None
        return
    # A session of its own: Ctrl-C in a terminal ends what runs, and that is passed on, too.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "labkit.records.export.live", mlflow or "", tensorboard or ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None  # for the type checker: pipes were asked for
    assert process.stdout is not None
    told = process.stdin

    def follow(folder: Path) -> None:
        with suppress(BrokenPipeError):  # it has said why it is gone
            print(json.dumps({"folder": str(folder), "root": str(root)}), file=told, flush=True)

    try:
        answer = json.loads(process.stdout.readline() or '{"error": "its process has ended"}')
        if "error" in answer:
            raise (InvalidInput if answer.get("input") else LabkitError)(answer["error"])
        yield follow
    finally:
        with suppress(BrokenPipeError):
            # A word, and not the end of its input alone: what was forked may hold this pipe, too.
            print("over", file=told, flush=True)
        with suppress(BrokenPipeError):
            told.close()
        try:
            process.wait()
        except KeyboardInterrupt:  # a store that does not answer
            process.terminate()
            raise
        finally:
            process.stdout.close()
