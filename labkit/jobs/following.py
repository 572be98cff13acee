"""Live export of runs to MLflow and TensorBoard."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from labkit.common.errors import InvalidInput, LabkitError

Follow = Callable[[Path], None]  # to be called with the folder of the runs once it is known


@contextmanager
def following(root: Path, mlflow: str | None, tensorboard: Path | None) -> Iterator[Follow]:
    """Export runs to MLflow and TensorBoard while they run, in a separate process.

    On exit, the context waits until the export process has exported all runs.

    Args:
        root: Folder of all runs; in TensorBoard, runs are named by their paths below this folder.
        mlflow: Address of a tracking server, or a SQLite file; None: no export to MLflow.
        tensorboard: Folder for TensorBoard's files; None: no export to TensorBoard.

    Yields:
        Function that receives the folder of the runs to export.

    Raises:
        LabkitError: Before the runs start: MLflow or TensorBoard is unreachable or not installed.
    """
    if mlflow is None and tensorboard is None:
        yield lambda folder: None
        return
    # In a separate session, the process does not receive Ctrl-C, so it also exports how the runs
    # ended.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "labkit.records.export.live", mlflow or "", tensorboard or ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None  # for the type checker: the call requests pipes
    assert process.stdout is not None
    pipe = process.stdin

    def follow(folder: Path) -> None:
        with suppress(BrokenPipeError):  # the process has printed why it ended
            print(json.dumps({"folder": str(folder), "root": str(root)}), file=pipe, flush=True)

    try:
        answer = json.loads(process.stdout.readline() or '{"error": "the exporter has ended"}')
        if "error" in answer:
            raise (InvalidInput if answer.get("input") else LabkitError)(answer["error"])
        yield follow
    finally:
        with suppress(BrokenPipeError):
            # A message marks the end, because a forked process may keep this pipe open.
            print("over", file=pipe, flush=True)
        with suppress(BrokenPipeError):
            pipe.close()
        try:
            process.wait()
        except KeyboardInterrupt:  # the user does not wait longer for the export
            process.terminate()
            raise
        finally:
            process.stdout.close()
