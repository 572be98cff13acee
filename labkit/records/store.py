"""Run directories on disk: files are written atomically, and records are checked when read."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.common.canonical_json import JSON, NotPlain, read_plain_json
from labkit.common.canonical_json import SCHEMA as SCHEMA
from labkit.common.errors import LabkitError, short
from labkit.common.files import (
    UnsafeFile,
    check_folder,
    make_folder,
    read_file,
    replace_file,
    repository_folder,
    runtime_folder,
)
from labkit.common.privacy import scrub
from labkit.records.parquet import column_problem, read_parquet
from labkit.records.shape import field_problem, with_names_of_today

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

# The environment variable LABKIT_ELEMENT identifies the task of a Slurm job array to which the
# process belongs. An array task may run on another node, and a machine sees only its own processes.
ELEMENT = "LABKIT_ELEMENT"
# The file `.reason` in a job's folder contains the reason why the job was interrupted.
_REASON = ".reason"
# The folder `.earlier` contains earlier attempts of notebook runs and of runs. File searches skip
# the folder, because its name begins with a dot.
EARLIER = ".earlier"
STATES = ("queued", "running", "completed", "failed", "interrupted", "pruned")
END_STATES = STATES[2:]
MAX_RECORD_BYTES = 2**26  # The metrics of 100,000 epochs have about 10 million bytes.
# The constant MAX_TABLE_BYTES is the maximum size of a compressed Parquet file.
MAX_TABLE_BYTES = 2**28
# Two readings of a process's start, relative to the boot, may differ by 0.1 s.
START_TOLERANCE = 0.1
# Names are shorter than the usual limit of 255 bytes, because archives lengthen names.
MAX_NAME_BYTES = 120

_SECONDS = ("seconds", "compute_seconds", "communicate_seconds", "wait_seconds")
HISTORY_COLUMNS = (
    dict.fromkeys(("seed", "epoch", "step", "rank"), "int64")
    | dict.fromkeys(("loss", *_SECONDS), "float64")
    | dict.fromkeys(("payload_bytes", "wire_bytes", "messages", "samples"), "int64")
)

# A `Record` is the content of a JSON file that labkit writes, as a dict. The fields of a record
# depend on the kind of JSON file.
Record: TypeAlias = dict[str, Any]
Fields: TypeAlias = Mapping[str, JSON]
Rows: TypeAlias = Sequence[Fields]


# --- files ---------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes | str) -> Path:
    """Write a file completely or not at all, using a temporary file, fsync and rename."""
    data = content.encode() if isinstance(content, str) else content
    try:
        replace_file(path, data)
    except OSError as error:
        # The operating system's error for a full disk contains no file name.
        error.filename = error.filename or str(path)
        raise
    return path


def write_json(path: Path, record: Mapping[str, Any]) -> Path:
    """Write a record as strict JSON, with its schema version; NaN and infinity become null."""
    return write_atomically(path, json_text(record))


def json_text(record: Mapping[str, Any]) -> str:
    """Return the JSON text of a record, as `write_json` writes it."""
    content = {"schema": SCHEMA} | _plain(dict(record))
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read_json(path: Path | str) -> Record:
    """Return the validated record that a JSON file contains.

    Raises:
        LabkitError: If the file is missing or damaged, or has a newer schema. The error message has
            only one line.
    """
    try:
        return _record(path)
    except FileNotFoundError:
        reason = "is missing"
    except UnsafeFile as error:
        reason = error.strerror or str(error)
    except (_InvalidRecord, NotPlain) as error:
        reason = str(error)
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {scrub(str(error))}"
    raise LabkitError(f"{Path(path).parent.name}/{Path(path).name} {reason}")


class _InvalidRecord(ValueError):
    """An error whose message describes what is invalid in a record."""


def _record(path: Path | str) -> Record:
    record = read_plain_json(read_bytes(path))
    if not isinstance(record, dict):
        raise _InvalidRecord(f"holds a {type(record).__name__}, not a record")
    schema = record.get("schema")
    if not isinstance(schema, int):
        raise _InvalidRecord(f"has no schema version (expected {SCHEMA} or lower)")
    if schema > SCHEMA:
        raise _InvalidRecord(
            f"has schema {short(schema)}, but this labkit reads only up to {SCHEMA}; update labkit"
        )
    file = os.path.basename(path)
    if schema < SCHEMA:
        record = with_names_of_today(file, record)
    if problem := field_problem(file, record):
        raise _InvalidRecord(f"is invalid: {problem}")
    return record


def read_bytes(path: Path | str, last: int | None = None) -> bytes:
    """Return the content of a file, or only its last `last` bytes if `last` is given.

    Raises:
        OSError: If the file cannot be read.
        UnsafeFile: If the path does not name a regular file, or if the file has more than
            MAX_RECORD_BYTES.
    """
    return read_file(path, MAX_RECORD_BYTES, last)


def _plain(value: Any) -> Any:
    """Convert NumPy values, paths and tuples to values that strict JSON allows."""
    # NumPy and pandas values are recognised by their method `tolist`, without an import of NumPy or
    # pandas.
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # Strict JSON has neither NaN nor infinity, and most readers outside of Python reject them.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return value.name if value.is_absolute() else value.as_posix()
    return value


# --- names ---------------------------------------------------------------------------------------


def safe_name(text: str, limit: int = MAX_NAME_BYTES) -> str:
    """Return a valid file name of at most `limit` ASCII bytes, without separators or a leading dot.

    A longer text is cut, and eight hex digits of its SHA-256 are appended. Two long texts that
    differ only at the end get different names.
    """
    name = re.sub(r"[^A-Za-z0-9._=,+@-]+", "_", text).strip("._-") or "unnamed"
    if len(name) <= limit:
        return name
    return f"{name[: limit - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def new_run_directory(parent: Path | str, name: str) -> Path:
    """Create the directory `<name>` in `parent`, or `<name>-2`, `<name>-3`, … if the name exists.

    Two processes cannot create the same directory, because mkdir is atomic.
    """
    base = safe_name(name)
    for number in count(1):
        directory = Path(parent) / (base if number == 1 else f"{base}-{number}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        break
    return directory


def runs_folder() -> Path:
    """Return the folder of all runs: `LABKIT_RUNS`, or `runs` here or in a folder above.

    Executors and editors start kernels in different folders. Only folders of the same git
    repository are searched. If none of them has a folder `runs`, the result is `runs` here.
    """
    if named := os.environ.get("LABKIT_RUNS"):
        return Path(named)
    here = Path.cwd()
    top = repository_folder(here)
    above = [folder for folder in here.parents if top and folder.is_relative_to(top)]
    return next(
        (each / "runs" for each in (here, *above) if (each / "runs").is_dir()), Path("runs")
    )


def run_directory(name: str) -> Path:
    """Create a run directory in this process's job folder, or without one, interactively."""
    interactive = runs_folder() / "interactive"
    job = os.environ.get("LABKIT_JOB")
    folder = Path(job or interactive)
    make_folder(folder, folder if job else folder.parent)
    # The run's path is absolute, so that it remains valid if the notebook changes its working
    # directory.
    return new_run_directory(folder.resolve(), name)


def new_job_directory(root: Path | str, notebook: Path | str, parameters: Fields) -> Path:
    """Create a job's folder `<root>/<notebook>/<NNN>_<k=v,…>/` with the status "queued".

    Args:
        root: Folder that contains all runs.
        notebook: Name or path of the notebook; if the path is absolute, only its last part is
            recorded.
        parameters: Parameters that differ from the notebook's defaults.
    """
    folder = Path(root) / safe_name(Path(notebook).stem)
    make_folder(folder, root)
    with _locked(folder):
        matches = [re.match(r"(\d+)(_|$)", entry.name) for entry in folder.iterdir()]
        number = 1 + max((int(match[1]) for match in matches if match), default=0)
        directory = folder / job_name(number, parameters)
        directory.mkdir()
    mark_queued(directory, notebook, parameters)
    return directory


def unfinished_job(root: Path | str, notebook: Path | str, parameters: Fields) -> Path | None:
    """Return a notebook's newest job with `parameters`, if the job failed or was interrupted.

    The returned job receives the status "queued".

    Args: See `new_job_directory`.

    Raises:
        UnsafeFile: If the job's folder contains anything but files and folders, such as a symbolic
            link.
    """
    folder, words = Path(root) / safe_name(Path(notebook).stem), job_name(0, parameters, 1)[1:]
    jobs = {path.parent for path in folder.glob("*/params.yaml")}
    named = [(re.fullmatch(r"(\d+)(.*)", job.name), job) for job in jobs]
    candidates = [(int(match[1]), path) for match, path in named if match and match[2] == words]
    _, newest = max(candidates, default=(0, None))
    if newest is None or read_status(newest)["state"] not in ("interrupted", "failed"):
        return None
    check_folder(newest, root)
    mark_queued(newest, notebook, parameters)
    return newest


def set_aside(folder: Path) -> None:
    """Move the folder of an earlier attempt into the hidden folder EARLIER beside it."""
    backup = folder.parent / EARLIER / f"{folder.name}.{secrets.token_hex(4)}"
    make_folder(backup.parent, folder.parent)
    # The folder of an earlier attempt is kept. The folder may be the only evidence of why the
    # attempt failed.
    folder.rename(backup)


def job_name(number: int, parameters: Mapping[str, JSON], digits: int = 3) -> str:
    """Return the name of a job's folder: `<NNN>_<k=v,…>`, or `<NNN>` without parameters."""
    words = ",".join(f"{key}={_short(value)}" for key, value in _plain(dict(parameters)).items())
    return f"{number:0{digits}d}_{safe_name(words)}" if words else f"{number:0{digits}d}"


def mark_queued(directory: Path, notebook: Path | str, parameters: Fields, **fields: JSON) -> None:
    """Write a job's file params.yaml, and its status "queued" with the fields `fields`."""
    import yaml

    values = _plain(dict(parameters))
    # The header of params.yaml is a YAML comment, so the command `labkit run -f` accepts the file.
    head = f"# labkit parameters, schema {SCHEMA}\n"
    body = yaml.safe_dump(values, sort_keys=False, allow_unicode=True) if values else "{}\n"
    write_atomically(directory / "params.yaml", head + body)
    _write_status(directory, "queued", notebook=recorded_path(notebook), **fields)


def recorded_path(path: Path | str) -> str:
    """Return a path as records contain it, with only the last part of an absolute path."""
    path = Path(path)
    return path.name if path.is_absolute() else path.as_posix()


def _short(value: JSON) -> str:
    """Return a parameter's value as text for a folder name; of a path, only the last part."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return Path(text).name if text.startswith(("/", "~")) else text


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder in a context, so that no two processes choose the same number."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- status --------------------------------------------------------------------------------------


def start(directory: Path, experiment: Fields, environment: Fields | None = None) -> None:
    """Record the experiment and its environment, and this process as the executor of the run."""
    write_json(directory / "experiment.json", experiment)
    if environment is not None:
        write_json(directory / "environment.json", environment)
    mark_running(directory)


def mark_running(directory: Path, **fields: JSON) -> None:
    """Record that this process now executes the run or job, with the additional fields `fields`."""
    fields_now = {"started": now(), "ended": None, "cause": None, "rank": None}
    _write_status(directory, "running", **fields_now | fields)


def finish(
    directory: Path,
    metrics: Mapping[str, JSON],
    history: Rows | pandas.DataFrame,
    model: bytes | None = None,
    stopped: str | None = None,
    pruned: bool = False,
) -> None:
    """Write the results of a run, then its status "completed", "interrupted" or "pruned".

    Args:
        directory: Directory of the run.
        metrics: Fields of the record in metrics.json.
        history: The history as columns or as a list of rows. Columns are a DataFrame or a mapping
            from names to values. Each row is a mapping. The history must have all columns in
            HISTORY_COLUMNS, and may have more.
        model: Bytes of the trained model's .keras file; None if no model is written.
        stopped: Why the run ended early; None if it completed.
        pruned: Whether a search ended the run, because other trials were better.
    """
    if model is not None:
        write_atomically(directory / "model.keras", model)
    write_results(directory, metrics, history)
    if stopped is None:
        complete(directory)
    else:
        mark = prune if pruned else interrupt
        mark(directory, stopped)


def write_results(
    directory: Path, metrics: Mapping[str, JSON], history: Rows | pandas.DataFrame
) -> None:
    """Write metrics and history like `finish`, but no final status: the run may continue."""
    # The file metrics.json is written last, so that every run with metrics also has a history.
    write_atomically(directory / "history.parquet", _parquet(history))
    write_json(directory / "metrics.json", metrics)


def write_table(path: Path, rows: Rows) -> Path:
    """Write rows to a Parquet file, or no file if there are no rows."""
    import pyarrow as pa

    return write_atomically(path, _compressed(pa.Table.from_pylist(list(rows)))) if rows else path


def read_table(path: Path, columns: Mapping[str, str]) -> pandas.DataFrame:
    """Return a Parquet table, or warn and return an empty table if the file is damaged.

    The table must have each column in `columns` with the specified pandas type. All other columns
    of the table must contain numbers.
    """
    import pyarrow as pa

    try:
        # `pandas.read_parquet` would take three times as long for a short table, and would trust
        # the file's metadata.
        table = read_parquet(read_file(path, MAX_TABLE_BYTES))
        if problem := column_problem(table, columns):
            raise NotPlain(problem)
        return table.to_pandas(ignore_metadata=True)
    except NotPlain as error:
        reason = str(error)
    except UnsafeFile as error:
        reason = error.strerror or str(error)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = f"is damaged ({scrub(str(error))[:100]})"
    place = f"{path.parent.name}/{path.name}"
    warnings.warn(f"{place} {reason}; the run is shown without this table", stacklevel=2)
    return empty_table(columns)


def empty_table(columns: Mapping[str, str]) -> pandas.DataFrame:
    """Return an empty table with the columns and the pandas types in `columns`."""
    import pandas as pd

    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in columns.items()})


def complete(directory: Path) -> None:
    """Record that all files of a run are complete, or that a notebook job's last cell succeeded."""
    _write_status(directory, "completed", ended=now())


def fail(directory: Path, cause: str, rank: int | None = None) -> None:
    """Record a failure and the first failed rank, without local paths and names in the cause."""
    _write_status(directory, "failed", ended=now(), cause=scrub(cause), rank=rank)


def interrupt(
    directory: Path, cause: str = "interrupted by the user", rank: int | None = None
) -> None:
    """Record that a user, a limit or a signal has stopped the run, or one of its ranks."""
    _write_status(directory, "interrupted", ended=now(), cause=scrub(cause), rank=rank)


def prune(directory: Path, cause: str) -> None:
    """Record that a search has ended the run, because other trials were better."""
    _write_status(directory, "pruned", ended=now(), cause=scrub(cause))


def write_reason(directory: Path, cause: str) -> None:
    """Write the reason for an interrupt to a file, which the process of the job reads."""
    # If the reason cannot be written, the record of the interrupt has no reason.
    with suppress(OSError):
        write_atomically(directory / _REASON, cause)


def read_reason(directory: Path) -> str | None:
    """Return the reason for the job's current interrupt, or None if there is no reason."""
    try:
        return read_bytes(directory / _REASON).decode(errors="replace")
    except FileNotFoundError:
        return None


def clear_reason(directory: Path) -> None:
    """Remove the file with an interrupt's reason, which the job's status now contains."""
    with suppress(OSError):
        (directory / _REASON).unlink(missing_ok=True)


def end_orphans(
    job: Path, cause: str, seconds: float = 5.0, record: Callable[[Path, str], None] = fail
) -> None:
    """Record an end for each run of a job whose process ended without a record of the end.

    If the process of a run is still alive, the function waits up to `seconds` until it ends.
    """
    end = time.monotonic() + seconds
    for run in runs_of(job):
        path = run / "status.json"
        status = read_json(path)
        while status["state"] == "running" and is_alive(status) and time.monotonic() < end:
            time.sleep(0.1)
            status = read_json(path)
        if status["state"] == "running" and not is_alive(status):
            record(run, cause)


def runs_of(job: Path) -> list[Path]:
    """Return the runs in a job's folder, but no runs behind symbolic links to other folders."""
    return sorted(path.parent for path in job.glob("*/status.json") if not path.parent.is_symlink())


def read_status(directory: Path) -> Record:
    """Return a run's status, in which "running" without a living process becomes "interrupted"."""
    return checked_status(read_json(directory / "status.json"), directory)


def checked_status(status: Record, directory: Path | str) -> Record:
    """Check and correct the record `status` in the same way as `read_status`."""
    if status.get("state") not in STATES:
        raise LabkitError(
            f"{os.path.basename(directory)}/status.json has the state "
            f"{short(status.get('state'))}; allowed: {', '.join(STATES)}"
        )
    if status["state"] == "running" and (elsewhere := fallback_status(Path(directory), status)):
        return elsewhere
    if status["state"] == "running" and not is_alive(status):
        status |= {"state": "interrupted", "cause": "its process is gone"}
    return status


def fallback_status(directory: Path, status: Record) -> Record | None:
    """Return a run's final status from the runtime folder, or None if no status was written there.

    A final status of an earlier attempt in the same directory is ignored.
    """
    try:
        record = read_json(_fallback_path(directory))
    except LabkitError:  # Most runs have no status file in the runtime folder.
        return None
    return record if record.get("started") == status.get("started") else None


def _write_status(directory: Path, state: str, **fields: JSON) -> None:
    """Update the status record of a run, and keep the values of fields that are not given."""
    # Only one process writes the status of a run, so reading and rewriting the status needs no
    # lock.
    path = directory / "status.json"
    blank = {"state": state, "started": None, "ended": None, "cause": None, "rank": None}
    previous = read_json(path) if path.exists() else blank
    record = previous | this_process() | {"state": state} | fields
    try:
        write_json(path, record)
    except OSError as error:
        if not fields.get("ended"):
            # At the start of a run, the error is raised, because the run has no results to save.
            raise
        _write_fallback_status(directory, record, error)


def _write_fallback_status(directory: Path, record: Record, error: OSError) -> None:
    """Write a final status to the runtime folder, because the run's own folder is not writable."""
    outcome = f"{record['state']}: {record['cause']}" if record.get("cause") else record["state"]
    line = f"labkit: {recorded_path(directory.name)}/status.json: {error.strerror}; {outcome}"
    try:
        written = write_json(_fallback_path(directory), record)
        print(f"{line}; written to {written} instead", file=sys.stderr, flush=True)
    except OSError:
        print(f"{line}; the status could not be written anywhere", file=sys.stderr, flush=True)


def _fallback_path(directory: Path) -> Path:
    """Return the status file's path for a run or job whose own folder is not writable."""
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
    return runtime_folder("records") / f"{name}.json"


def this_process() -> Record:
    """Return status fields that identify this process, even if its pid is reused later."""
    import psutil

    # The boot time is read first, because psutil computes the start times of processes from it.
    boot = psutil.boot_time()
    started = psutil.Process().create_time()
    identity = {"pid": os.getpid(), "process_started": started, "since_boot": started - boot}
    return identity | ({"element": os.environ[ELEMENT]} if ELEMENT in os.environ else {})


def is_alive(status: Record) -> bool:
    """Return whether a recorded process still runs, and its pid does not belong to a newer process.

    A process in another task of a Slurm job array always counts as alive. Only Slurm knows the
    state of another task of the array. Within the same task, the function checks whether the
    recorded process runs.
    """
    import psutil

    if "element" in status and status["element"] != os.environ.get(ELEMENT):
        return True
    pid = status.get("pid")
    # A record from another source may contain invalid process numbers, such as True, -1 and 0.
    if type(pid) is not int or pid <= 0:
        return False
    try:
        boot = psutil.boot_time()
        process = psutil.Process(pid)
        started = process.create_time()
        # The system computes the start of a process from a rounded boot time. The check therefore
        # tolerates a difference of 2 s between two start times. If a user changes the system clock,
        # the boot time changes. The seconds from boot to process start do not change.
        same = abs(started - float(status["process_started"])) < 2.0
        same = same or abs(started - boot - float(status.get("since_boot", -1.0))) < START_TOLERANCE
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def _parquet(history: Rows | pandas.DataFrame) -> bytes:
    """Return the history in Parquet format, with the typed columns of HISTORY_COLUMNS first."""
    import pyarrow as pa

    if isinstance(history, Sequence):
        names = dict.fromkeys(name for row in history for name in row) or HISTORY_COLUMNS
        columns: Record = {name: [row.get(name) for row in history] for name in names}
    else:
        columns = {str(name): history[name] for name in history}
    missing = [name for name in HISTORY_COLUMNS if name not in columns]
    if missing:
        raise LabkitError(
            f"a history without {', '.join(missing)}; required: {', '.join(HISTORY_COLUMNS)}"
        )
    known_columns = {
        name: pa.array(columns[name], type=kind) for name, kind in HISTORY_COLUMNS.items()
    }
    others = {
        name: pa.array(values) for name, values in columns.items() if name not in known_columns
    }
    return _compressed(pa.table(known_columns | others))


def _compressed(table: pa.Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


def now() -> str:
    """Return the current time as records contain it: UTC in ISO 8601 format, with milliseconds."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
