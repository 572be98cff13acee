"""All functions and commands that read a folder of runs, under limits of time and memory."""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TypeAlias

from labkit.common.errors import LabkitError, short
from labkit.common.terminal import plain

GOOD = "b"  # name of the valid run that each reader must find
MEMORY = 6 << 30  # bytes of memory that a reader may map, including Python
Reader: TypeAlias = "Callable[[], str]"


class Reading(NamedTuple):
    """The result of a reader: "read", "skipped" or "failed", its message, and its costs.

    Attributes:
        reader: Name of the reader.
        end: how.
        why: Message of the reader, or its error message.
        seconds: Processor time that the reader takes.
        nbytes: Increase of the process's peak memory, bytes.
    """

    reader: str
    end: str
    why: str
    seconds: float
    nbytes: int


def _command(*words: str) -> Reader:
    """Return a reader that is a command of labkit, which must find the valid run."""

    def read() -> str:
        from click.testing import CliRunner

        from labkit.cli.app import app

        done = CliRunner().invoke(app, [*words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code or plain(done.output) != done.output:
            raise AssertionError(f"exit code {done.exit_code}: {done.stderr[-300:]}")
        if GOOD not in done.stdout.split() and words[0] == "ls":
            raise AssertionError(f"the good run is lost: {done.stdout[-200:]!r}")
        return done.stderr

    return read


def _runs() -> str:
    """Read all properties that the Python interface of runs offers."""
    from labkit.records.run import key_metrics, load_runs, to_dataframe

    runs = load_runs("runs")
    if GOOD not in [run.name for run in runs]:
        raise AssertionError("the good run is lost")
    to_dataframe(runs)
    for run in runs:
        tables = (run.history, run.timeline, run.compression_stats, run.update_log, run.layers)
        [len(table) for table in (*tables, run.resources)]
        key_metrics(run), run.memory, run.environment, run.seeds, run._repr_html_()
    return ""


def _traces() -> str:
    from labkit.records.run import load_runs
    from labkit.records.staged_steps import predicted_rows

    for run in load_runs("runs/job"):
        run.export_trace("out/trace.json", predicted_rows(run))
    return ""


def _tables() -> str:
    from labkit.records.export import export
    from labkit.records.run import load_runs

    runs = load_runs("runs")
    for kind in (".csv", ".parquet"):
        export(runs, f"out/t{kind}")
    return ""


def _tensorboard() -> str:
    from labkit.records.export import to_tensorboard
    from labkit.records.run import load_runs

    to_tensorboard(load_runs("runs"), "out/tensorboard")
    return ""


def _mlflow() -> str:
    from labkit.records.export import to_mlflow
    from labkit.records.run import load_runs

    # All cases of a process use one MLflow store, because creating a store takes seconds.
    to_mlflow(load_runs("runs"), Path("..", "mlflow.db"))
    return ""


def _live() -> str:
    from labkit.records.export import TensorBoardStore
    from labkit.records.live_export import RunForwarder

    stores = [TensorBoardStore("out/live")]
    RunForwarder(Path("runs"), Path("runs"), stores, 0.0).forward()
    return ""


def _panel() -> str:
    from labkit.records.stream import StreamReader as Stream

    for folder in Path("runs").glob("**/live"):
        Stream(folder).read()
    return ""


def _gallery() -> str:
    from labkit.jobs.gallery import write_index, write_page
    from labkit.jobs.gallery.index_entry import latest_result
    from labkit.jobs.notebook import JobResult

    notebook, job = Path("n.ipynb"), Path("runs/job")
    latest_result(notebook, Path("site"))
    result = JobResult(job, "completed", None, None)
    write_page(result, Path("out/n.html"))
    write_index([(notebook, result)], Path("out"))
    return ""


def _checkpoint() -> str:
    from labkit.records.checkpoints import newest_checkpoint

    newest_checkpoint(Path("runs/job/a"), lambda manifest: True)
    return ""


def _calibration() -> str:
    from labkit.forecast import Calibration

    Calibration.load("calibration.json")
    return ""


def _parameters() -> str:
    from labkit.jobs.parameters import declared

    declared(Path("n.ipynb"))
    return ""


OUTPUT = ("-o", "out/c.html")
READERS: Mapping[str, Reader] = {
    "ls": _command("ls", "runs"),
    "compare": _command("compare", "runs", *OUTPUT),
    "report": _command("report", "runs", "-o", "out/r.html"),
    "report of a job": _command("report", "runs/job", "-o", "out/j.html"),
    "stop": _command("stop", "runs"),
    "sweep --resume": _command("sweep", "runs/sweep", "--resume", "--check"),
    "run -f": _command("run", "n.ipynb", "-f", "runs/job/params.yaml", "--check"),
    "load_runs": _runs,
    "trace": _traces,
    "export": _tables,
    "to_tensorboard": _tensorboard,
    "to_mlflow": _mlflow,
    "live export": _live,
    "live panel": _panel,
    "gallery": _gallery,
    "checkpoints": _checkpoint,
    "calibration": _calibration,
    "notebook": _parameters,
}
# Each of these readers reads only one file, and must end with a one-line error if the file is
# invalid.
ALONE = {"report of a job", "trace", "checkpoints", "calibration", "notebook"}
ALONE |= {"sweep --resume", "run -f"}
_OF_RUNS = ("ls", "compare", "report", "stop", "load_runs", "trace", "export", "to_tensorboard")
# The readers of a file, by the beginning of its path; the first match counts.
WHO: Mapping[str, Sequence[str]] = {
    "calibration.json": ("calibration",),
    "n.ipynb": ("notebook", "sweep --resume", "run -f"),
    "runs/sweep/": ("ls", "stop", "sweep --resume", "load_runs"),
    "runs/job/output.ipynb": ("report of a job", "gallery"),
    "runs/job/status.json": ("ls", "report", "stop", "gallery"),
    "runs/job/params.yaml": ("ls", "report of a job", "run -f", "gallery"),
    "runs/job/a/live/": ("live panel", "live export", "load_runs"),
    "runs/job/a/checkpoints/": ("checkpoints",),
    "": (*_OF_RUNS, "to_mlflow", "live export"),
}


def readers_of(paths: Iterable[str]) -> list[str]:
    """Return the names of the readers that read any of these files."""
    begins = {next(begin for begin in WHO if path.startswith(begin)) for path in paths}
    return list(dict.fromkeys(name for begin in WHO if begin in begins for name in WHO[begin]))


def _met(name: str) -> tuple[str, str]:
    """Let a reader read; return "read", "skipped" or "failed", and the message."""
    said = io.StringIO()
    with (
        warnings.catch_warnings(record=True) as told,
        redirect_stdout(said),
        redirect_stderr(said),
    ):
        warnings.simplefilter("always", UserWarning)
        try:
            line = READERS[name]()
        except (LabkitError, AssertionError) as error:
            line = " ".join(str(error).split())
            if name not in ALONE or "Traceback" in line or len(line) > 3_000:
                return "failed", line[-400:]
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            return "failed", f"{type(error).__name__} in {where}: {short(str(error))}"
    lines = [*line.splitlines(), *(str(each.message) for each in told)]
    return ("skipped", short(lines[0])) if lines else ("read", "")


def serve(connection: Connection) -> None:
    """Receive folders and readers' names until an empty request; send a reading per reader."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while asked := connection.recv():
        folder, names = asked
        os.chdir(folder)
        for name in names:
            # Processor time excludes other load of the machine.
            before, begin = _most(), time.process_time()
            end, why = _met(name)
            seconds = time.process_time() - begin
            connection.send(Reading(name, end, why, seconds, _most() - before))


def _most() -> int:
    """Return the peak memory of this process, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Readers:
    """A process that runs all readers; another process replaces it if a reader takes too long.

    Args:
        seconds: Timeout of a reader.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._fresh()

    def _fresh(self) -> None:
        # A spawned process inherits no library threads, and has its own peak memory.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._is_warm = False

    def meet(self, folder: Path, names: Sequence[str]) -> Iterator[Reading]:
        """Yield the result of each reader in a folder."""
        waiting = [*names]
        while waiting:
            self._connection.send((str(folder), waiting))
            while waiting:
                # The first reader imports libraries that all readers need, so it has a longer
                # timeout.
                limit = self._seconds + (0 if self._is_warm else 120)
                reading = self._answer(limit)
                yield reading or Reading(waiting[0], "failed", "no end, or killed", limit, 0)
                del waiting[0]
                if reading is None:
                    self.close()
                    self._fresh()
                    break
            else:
                self._is_warm = True

    def _answer(self, limit: float) -> Reading | None:
        try:
            if not self._connection.poll(limit):
                return None
            reading: Reading = self._connection.recv()
            return reading
        except (EOFError, ConnectionError):
            return None

    def close(self) -> None:
        """End the process that runs the readers."""
        self._process.kill()
        self._process.join()
        self._connection.close()
