"""Export of runs to MLflow and TensorBoard while the runs are in progress."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from labkit.common.errors import InvalidInput, LabkitError

# The function that `following` yields; the caller passes the folder of the runs to it as soon as
# the folder is known.
Follow = Callable[[Path], None]


@contextmanager
def following(root: Path, mlflow: str | None, tensorboard: Path | None) -> Iterator[Follow]:
    """Export runs to MLflow and TensorBoard in a separate process, while the runs are in progress.

    At the end of the `with` block, the context waits until all runs are exported.

    Args:
        root: Folder of all runs; TensorBoard names runs by their paths below this folder.
        mlflow: Address of an MLflow tracking server, or a SQLite file; None: no export to MLflow.
        tensorboard: Folder for TensorBoard's files; None: no export to TensorBoard.

    Yields:
        Function that receives the folder of the runs to export.

    Raises:
        LabkitError: MLflow or TensorBoard is unreachable or not installed; this is checked before
            the runs start.
    """
    if mlflow is None and tensorboard is None:
        yield lambda folder: None
        return
    # In its own session, the export process does not receive Ctrl-C, so that it also exports how
    # the runs ended.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "labkit.records.live_export", mlflow or "", tensorboard or ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None  # for the type checker: Popen has created pipes
    assert process.stdout is not None
    pipe = process.stdin

    def follow(folder: Path) -> None:
        with suppress(BrokenPipeError):  # the export process has already printed why it ended
            print(json.dumps({"folder": str(folder), "root": str(root)}), file=pipe, flush=True)

    try:
        answer = json.loads(process.stdout.readline() or '{"error": "the exporter has ended"}')
        if "error" in answer:
            raise (InvalidInput if answer.get("input") else LabkitError)(answer["error"])
        yield follow
    finally:
        with suppress(BrokenPipeError):
            # The message "over" marks the end, because a forked process may keep the pipe open.
            print("over", file=pipe, flush=True)
        with suppress(BrokenPipeError):
            pipe.close()
        try:
            process.wait()
        except KeyboardInterrupt:  # the user interrupts the wait for the export
            process.terminate()
            raise
        finally:
            process.stdout.close()
