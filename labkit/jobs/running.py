"""Running jobs: follow their output, and stop them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from labkit.common.errors import InvalidInput, LabkitError
from labkit.jobs.elements import ELSEWHERE, cancel, queued
from labkit.jobs.listing import find
from labkit.jobs.sweep import manifest
from labkit.records import folders, store

# The context manager `following` yields a function of the type `Follow`. The caller passes the
# folder of the runs to the function.
Follow = Callable[[Path], None]


@contextmanager
def following(
    root: Path, mlflow: str | None, tensorboard: Path | None, also: Follow = lambda folder: None
) -> Iterator[Follow]:
    """Export runs to MLflow and TensorBoard in a separate process, while the runs are in progress.

    At the end of the `with` block, the context waits until all runs are exported.

    Args:
        root: Folder of all runs; TensorBoard names runs by their paths below this folder.
        mlflow: Address of an MLflow tracking server, or a SQLite file; None disables the export to
            MLflow.
        tensorboard: Folder for TensorBoard's files; None disables the export to TensorBoard.
        also: Function that also receives the folder of the runs.

    Yields:
        Function that receives the folder of the runs to export.

    Raises:
        LabkitError: MLflow or TensorBoard is unreachable or not installed; this is checked before
            the runs start.
    """
    if mlflow is None and tensorboard is None:
        yield also
        return
    # The export process runs in its own session, so Ctrl-C does not kill it. After Ctrl-C, the
    # export process still exports the final states of the runs.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "labkit.records.live_export", mlflow or "", tensorboard or ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # The assertions tell the type checker that Popen has created pipes.
    assert process.stdin is not None
    assert process.stdout is not None
    pipe = process.stdin

    def follow(folder: Path) -> None:
        also(folder)
        # If the pipe is broken, the export process has already printed why it ended.
        with suppress(BrokenPipeError):
            print(json.dumps({"folder": str(folder), "root": str(root)}), file=pipe, flush=True)

    try:
        answer = json.loads(process.stdout.readline() or '{"error": "the exporter has ended"}')
        if "error" in answer:
            raise (InvalidInput if answer.get("input") else LabkitError)(answer["error"])
        yield follow
    finally:
        with suppress(BrokenPipeError):
            # The message "over" marks the end of the messages, because a forked process may keep
            # the pipe open.
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


# Processes must end within `PATIENCE` seconds; cells may clean up for half of this time.
PATIENCE = 80.0


def stop(root: Path, say: Callable[[str], None]) -> list[Path]:
    """Stop all sweeps and jobs at and below `root`; return the folders of those that still run.

    The process of a sweep stops the jobs of the sweep. Runs of a notebook that is open in
    JupyterLab continue. The process of the open notebook executes the notebook's runs. Only
    processes in this user's registry are stopped. A process that is missing from the registry is
    not stopped. A record in the folder of runs is not sufficient to stop a process.

    Raises:
        LabkitError: The folder is missing.
    """
    jobs, sweeps = find(root)
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        say(line)

    signalled, remaining = _signal_processes(sweeps, manifest.FILE, report)
    # Jobs of stopped sweeps get no signal. The sweep would count a job that receives a signal as
    # failed.
    single_jobs = [job for job in jobs if not any(sweep in job.parents for sweep in signalled)]
    elements = queued(single_jobs, report)
    signalled_jobs, refused = _signal_processes(single_jobs, "status.json", report)
    signalled |= signalled_jobs
    remaining += refused
    if elements:
        try:
            remaining += cancel(elements, report)
        except LabkitError as error:  # Slurm does not answer, but local processes are still stopped
            report(str(error))
            remaining += elements.values()
    remaining += _wait_for_ends(signalled, report)
    if not lines:
        say(f"nothing runs in {root}")
    return remaining


def _signal_processes(
    paths: Iterable[Path], name: str, say: Callable[[str], None]
) -> tuple[dict[Path, store.Record], list[Path]]:
    """Send SIGTERM to the registered process of each job or sweep.

    Args:
        paths: Folders of jobs or sweeps.
        name: Name of the file that records the state in each folder.
        say: Function that prints a message about each running job or sweep that cannot be stopped.

    Returns: A dict from folder to the process that received the signal. The second result lists the
        folders whose processes this user cannot end.
    """
    signalled, refused = {}, []
    for path in sorted(paths):
        process = folders.process(path)
        if process is None:
            # No message is printed about a job whose process has died. The command `labkit ls`
            # shows a job without a live process as interrupted.
            if (record := _running_record(path / name)) and store.is_alive(record):
                say(f"{path} {ELSEWHERE}")
            continue
        if not store.is_alive(process):
            continue
        try:
            psutil.Process(process["pid"]).send_signal(signal.SIGTERM)
        except psutil.NoSuchProcess:  # The process may end between the check and the signal.
            continue
        except psutil.AccessDenied:
            say(f"{path} is not stopped: this user has no right to end process {process['pid']}")
            refused.append(path)
            continue
        signalled[path] = process
    return signalled, refused


def _running_record(path: Path) -> store.Record | None:
    """Return the record of a job or sweep that runs outside Slurm, or None."""
    try:
        record = store.read_json(path)
    except LabkitError:  # the command `labkit ls` reports the damaged record
        return None
    return record if record.get("state") == "running" and "element" not in record else None


def _wait_for_ends(signalled: dict[Path, store.Record], say: Callable[[str], None]) -> list[Path]:
    """Wait up to `PATIENCE` seconds for signalled processes; return the folders of survivors."""
    end = time.monotonic() + PATIENCE
    while signalled:
        for path, process in list(signalled.items()):
            if not store.is_alive(process):
                say(f"stopped: {path}")
                del signalled[path]
        if time.monotonic() > end:
            break
        # The processes are polled, because the operating system reports only the end of child
        # processes.
        time.sleep(0.1)
    for path, process in signalled.items():
        say(f"{path} does not end; its process is {process['pid']}")
    return [*signalled]
