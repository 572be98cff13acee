"""Run directories on disk: written whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError, short
from labkit.common.paths import runtime_folder
from labkit.common.privacy import scrub
from labkit.common.safe_files import (
    UnsafeFile,
    check_folder,
    make_folder,
    read_file,
    replace_file,
)
from labkit.common.safe_json import NotPlain, read_plain_json
from labkit.records.parquet import read_parquet, wrong_column
from labkit.records.shape import wrong_field

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

SCHEMA = 1
# Names the element of a job array of Slurm's in which a process runs: on a node whose processes
# this machine does not know.
ELEMENT = "LABKIT_ELEMENT"
_REASON = ".reason"  # in a job's folder, while it is interrupted
STATES = ("queued", "running", "completed", "failed", "interrupted", "pruned")
ENDED = STATES[2:]
LONGEST_RECORD = 2**26  # bytes; metrics of a hundred thousand epochs have some ten millions
LONGEST_TABLE = 2**28  # bytes, packed
SAME = 0.1  # seconds between a process's start as told twice
LONGEST_NAME = 120  # bytes; file systems allow 255, and archives and mounts eat some of it

_SECONDS = ("seconds", "compute_seconds", "communicate_seconds", "wait_seconds")
HISTORY_COLUMNS = (
    dict.fromkeys(("seed", "epoch", "step", "rank"), "int64")
    | dict.fromkeys(("loss", *_SECONDS), "float64")
    | dict.fromkeys(("payload_bytes", "wire_bytes", "messages", "samples"), "int64")
)

# What a file of ours holds. Who reads one knows what stands in it.
Record: TypeAlias = dict[str, Any]
Fields: TypeAlias = Mapping[str, JSON]
Rows: TypeAlias = Sequence[Fields]


# --- files ---------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes | str) -> Path:
    """Write the whole content or nothing: a temporary name in the same folder, fsync, replace."""
    data = content.encode() if isinstance(content, str) else content
    try:
        replace_file(path, data)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names none
        raise
    return path


def write_json(path: Path, record: Mapping[str, Any]) -> Path:
    """Write a record with its schema version as strict JSON; NaN and infinity become null."""
    return write_atomically(path, json_text(record))


def json_text(record: Mapping[str, Any]) -> str:
    """A record as `write_json` writes it."""
    content = {"schema": SCHEMA} | _plain(dict(record))
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read_json(path: Path | str) -> Record:
    """Read a record; a missing, broken or newer one raises LabkitError with one line."""
    try:
        return _record(path)
    except FileNotFoundError:
        reason = "is missing"
    except UnsafeFile as error:
        reason = error.strerror or str(error)
    except (_Odd, NotPlain) as error:
        reason = str(error)
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {scrub(str(error))}"
    raise LabkitError(f"{Path(path).parent.name}/{Path(path).name} {reason}")


class _Odd(ValueError):
    """What is wrong with a record."""


def _record(path: Path | str) -> Record:
    record = read_plain_json(read_bytes(path))
    if not isinstance(record, dict):
        raise _Odd(f"holds a {type(record).__name__}, not a record")
    schema = record.get("schema")
    if not isinstance(schema, int):
        raise _Odd(f"has no schema version (expected {SCHEMA} or lower)")
    if schema > SCHEMA:
        raise _Odd(f"has schema {short(schema)}, this labkit reads up to {SCHEMA}: update labkit")
    if wrong := wrong_field(os.path.basename(path), record):
        raise _Odd(f"is odd: {wrong}")
    return record


def read_bytes(path: Path | str, last: int | None = None) -> bytes:
    """What a file holds, or its last bytes.

    Raises: OSError; UnsafeFile, for what is no file, or longer than a record can be.
    """
    return read_file(path, LONGEST_RECORD, last)


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays, paths and tuples as what strict JSON holds."""
    # NumPy's and pandas's, without importing either.
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # JSON has no such numbers, and other readers than Python refuse the file.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return value.name if value.is_absolute() else value.as_posix()
    return value


# --- names ---------------------------------------------------------------------------------------


def safe_name(text: str, limit: int = LONGEST_NAME) -> str:
    """Make a file name: no separators, no hidden or empty name, at most `limit` ASCII bytes.

    What does not fit is cut and replaced by eight digits of the text's SHA-256, so that two
    long names that differ at the end stay two names.
    """
    name = re.sub(r"[^A-Za-z0-9._=,+@-]+", "_", text).strip("._-") or "unnamed"
    if len(name) <= limit:
        return name
    return f"{name[: limit - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def new_run_directory(parent: Path | str, name: str) -> Path:
    """Make `<name>` under parent, or `<name>-2`, `<name>-3`, …: mkdir decides every race."""
    base = safe_name(name)
    for number in count(1):
        directory = Path(parent) / (base if number == 1 else f"{base}-{number}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        break
    return directory


def run_directory(name: str) -> Path:
    """A new run directory: in the folder of this process's job, else of interactive runs."""
    interactive = Path(os.environ.get("LABKIT_RUNS", "runs")) / "interactive"
    job = os.environ.get("LABKIT_JOB")
    folder = Path(job or interactive)
    make_folder(folder, folder if job else folder.parent)
    # Resolved: a Run is found also when the notebook has changed its folder.
    return new_run_directory(folder.resolve(), name)


def new_job_directory(root: Path | str, notebook: Path | str, parameters: Fields) -> Path:
    """Make `<root>/<notebook>/<NNN>_<k=v,…>/` with params.yaml and the status "queued".

    Args: root, the folder of all runs; notebook, the name or path of what will run (only a relative
    path is recorded whole); parameters, what differs from the notebook's own values.
    """
    folder = Path(root) / safe_name(Path(notebook).stem)
    make_folder(folder, root)
    with _locked(folder):
        taken = [re.match(r"(\d+)(_|$)", entry.name) for entry in folder.iterdir()]
        number = 1 + max((int(match[1]) for match in taken if match), default=0)
        directory = folder / job_name(number, parameters)
        directory.mkdir()
    queue(directory, notebook, parameters)
    return directory


def unfinished_job(root: Path | str, notebook: Path | str, parameters: Fields) -> Path | None:
    """The newest job of a notebook with these parameters, if it ended before it was completed.

    Args: as of `new_job_directory`, whose folder and status "queued" it has again then.

    Raises:
        UnsafeFile: in its folder is a link, or what else is neither file nor folder.
    """
    folder, words = Path(root) / safe_name(Path(notebook).stem), job_name(0, parameters, 1)[1:]
    jobs = {each.parent for each in folder.glob("*/params.yaml")}
    named = [(re.fullmatch(r"(\d+)(.*)", job.name), job) for job in jobs]
    found = [(int(match[1]), each) for match, each in named if match and match[2] == words]
    _, newest = max(found, default=(0, None))
    if newest is None or read_status(newest)["state"] not in ("interrupted", "failed"):
        return None
    check_folder(newest, root)
    queue(newest, notebook, parameters)
    return newest


def job_name(number: int, parameters: Mapping[str, JSON], digits: int = 3) -> str:
    """`<NNN>_<k=v,…>`, or `<NNN>` without parameters."""
    words = ",".join(f"{key}={_short(value)}" for key, value in _plain(dict(parameters)).items())
    return f"{number:0{digits}d}_{safe_name(words)}" if words else f"{number:0{digits}d}"


def queue(directory: Path, notebook: Path | str, parameters: Fields, **fields: JSON) -> None:
    """Write a job's params.yaml, and the status "queued" with these further fields."""
    import yaml

    values = _plain(dict(parameters))
    # As a comment: the file can be given to `labkit run -f` as it is.
    head = f"# labkit parameters, schema {SCHEMA}\n"
    body = yaml.safe_dump(values, sort_keys=False, allow_unicode=True) if values else "{}\n"
    write_atomically(directory / "params.yaml", head + body)
    _write_status(directory, "queued", notebook=shown_path(notebook), **fields)


def shown_path(path: Path | str) -> str:
    """A path as records have it: only a relative one is recorded whole."""
    path = Path(path)
    return path.name if path.is_absolute() else path.as_posix()


def _short(value: JSON) -> str:
    """A parameter's value in a folder name: of an absolute path only the last part."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return Path(text).name if text.startswith(("/", "~")) else text


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's advisory lock: two numbering processes must not take the same number."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- a run's life --------------------------------------------------------------------------------


def start(directory: Path, experiment: Fields, environment: Fields | None = None) -> None:
    """Record what runs and where, then that it is running in this process."""
    write_json(directory / "experiment.json", experiment)
    if environment is not None:
        write_json(directory / "environment.json", environment)
    mark_running(directory)


def mark_running(directory: Path, **fields: JSON) -> None:
    """Say that this process now works on the run or job, and whatever else there is to say."""
    now_known = {"started": now(), "ended": None, "cause": None, "rank": None}
    _write_status(directory, "running", **now_known | fields)


def finish(
    directory: Path,
    metrics: Mapping[str, JSON],
    history: Rows | pandas.DataFrame,
    model: bytes | None = None,
    stopped: str | None = None,
    pruned: bool = False,
) -> None:
    """Write all results, and only then the status "completed", or "interrupted" by what stopped it,
    or "pruned".

    Args: metrics, the record of metrics.json; history, columns (name -> values, a DataFrame too) or
    rows (one mapping each), of HISTORY_COLUMNS and others; model, the bytes of a .keras file.
    """
    if model is not None:
        write_atomically(directory / "model.keras", model)
    write_results(directory, metrics, history)
    if stopped is None:
        complete(directory)
    else:
        end = prune if pruned else interrupt
        end(directory, stopped)


def write_results(
    directory: Path, metrics: Mapping[str, JSON], history: Rows | pandas.DataFrame
) -> None:
    """Write metrics and history, as `finish` does, of a run that may go on."""
    # Metrics come after it: who sees a run's metrics may read its history.
    write_atomically(directory / "history.parquet", _parquet(history))
    write_json(directory / "metrics.json", metrics)


def write_table(path: Path, rows: Rows) -> Path:
    """Write rows as Parquet; no file where there are none."""
    import pyarrow as pa

    return write_atomically(path, _compressed(pa.Table.from_pylist(list(rows)))) if rows else path


def read_table(path: Path, columns: Mapping[str, str]) -> pandas.DataFrame:
    """A table with at least these columns; where it is damaged, no rows, and a warning.

    Each column is checked to be of the kind that `columns` says; of others, to be numbers.
    """
    import pyarrow as pa

    try:
        # Not by pandas, which takes three times as long for a short one, and heeds its own notes.
        table = read_parquet(read_file(path, LONGEST_TABLE))
        if wrong := wrong_column(table, columns):
            raise NotPlain(wrong)
        return table.to_pandas(ignore_metadata=True)
    except NotPlain as error:
        reason = str(error)
    except UnsafeFile as error:
        reason = error.strerror or str(error)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = f"is damaged ({scrub(str(error))[:100]})"
    place = f"{path.parent.name}/{path.name}"
    warnings.warn(f"{place} {reason}; its run is shown without it", stacklevel=2)
    return empty_table(columns)


def empty_table(columns: Mapping[str, str]) -> pandas.DataFrame:
    """A table of these columns and their types without rows."""
    import pandas as pd

    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in columns.items()})


def complete(directory: Path) -> None:
    """Say that all is written; for a notebook's job, that its last cell ended well."""
    _write_status(directory, "completed", ended=now())


def fail(directory: Path, cause: str, rank: int | None = None) -> None:
    """Record a failure: its cause, without paths or names of this machine, and the first rank."""
    _write_status(directory, "failed", ended=now(), cause=scrub(cause), rank=rank)


def interrupt(
    directory: Path, cause: str = "interrupted by the user", rank: int | None = None
) -> None:
    """Record that a person, a limit or a signal stopped the run, or one of its ranks."""
    _write_status(directory, "interrupted", ended=now(), cause=scrub(cause), rank=rank)


def prune(directory: Path, cause: str) -> None:
    """Record that a search has ended the run: it promised less than others."""
    _write_status(directory, "pruned", ended=now(), cause=scrub(cause))


def give_reason(directory: Path, cause: str) -> None:
    """Tell who works for this job why it is about to be interrupted."""
    with suppress(OSError):  # then the interrupt comes without a reason
        write_atomically(directory / _REASON, cause)


def reason(directory: Path) -> str | None:
    """Why this job is being interrupted; None where nobody has said."""
    try:
        return read_bytes(directory / _REASON).decode(errors="replace")
    except FileNotFoundError:
        return None


def forget_reason(directory: Path) -> None:
    """The job has ended: its status says why."""
    with suppress(OSError):
        (directory / _REASON).unlink(missing_ok=True)


def end_orphans(
    job: Path, cause: str, seconds: float = 5.0, record: Callable[[Path, str], None] = fail
) -> None:
    """Record the end of a job's runs whose process ends with the job and cannot say so itself."""
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
    """The runs in a job's folder; a link there is none, for its runs are another folder's."""
    return sorted(path.parent for path in job.glob("*/status.json") if not path.parent.is_symlink())


def read_status(directory: Path) -> Record:
    """The status record; "running" without its process reads as "interrupted"."""
    return checked_status(read_json(directory / "status.json"), directory)


def checked_status(status: Record, directory: Path | str) -> Record:
    """A status as `read_status` gives it, of what a directory's record says."""
    if status.get("state") not in STATES:
        raise LabkitError(
            f"{os.path.basename(directory)}/status.json has the state "
            f"{short(status.get('state'))}, allowed are {', '.join(STATES)}"
        )
    if status["state"] == "running" and (kept := kept_elsewhere(Path(directory), status)):
        return kept
    if status["state"] == "running" and not is_alive(status):
        status |= {"state": "interrupted", "cause": "its process is gone"}
    return status


def kept_elsewhere(directory: Path, status: Record) -> Record | None:
    """How the same attempt ended that could not say so in its own folder."""
    try:
        kept = read_json(_elsewhere(directory))
    except LabkitError:  # there is none, as a rule
        return None
    return kept if kept.get("started") == status.get("started") else None


def _write_status(directory: Path, state: str, **fields: JSON) -> None:
    """Update the record: fields that are not given keep their values."""
    # Only the process that works on a run writes here, so that reading before writing is no race.
    path = directory / "status.json"
    blank = {"state": state, "started": None, "ended": None, "cause": None, "rank": None}
    known = read_json(path) if path.exists() else blank
    record = known | this_process() | {"state": state} | fields
    try:
        write_json(path, record)
    except OSError as error:
        if not fields.get("ended"):
            raise  # at its beginning there is nothing to lose
        _keep_elsewhere(directory, record, error)


def _keep_elsewhere(directory: Path, record: Record, error: OSError) -> None:
    """A full or read-only disk: keep how it ended where something can be written, or say it."""
    told = f"{record['state']}: {record['cause']}" if record.get("cause") else record["state"]
    line = f"labkit: {shown_path(directory.name)}/status.json: {error.strerror}; {told}"
    try:
        kept = write_json(_elsewhere(directory), record)
        print(f"{line}; kept in {kept}", file=sys.stderr, flush=True)
    except OSError:
        print(f"{line}; kept nowhere", file=sys.stderr, flush=True)


def _elsewhere(directory: Path) -> Path:
    """Where the status of a run or job is whose own folder cannot be written."""
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
    return runtime_folder("records") / f"{name}.json"


def this_process() -> Record:
    """What tells this process from a later one under the same number."""
    import psutil

    # First: what is told of a process then is relative to this.
    boot = psutil.boot_time()
    started = psutil.Process().create_time()
    told = {"pid": os.getpid(), "process_started": started, "since_boot": started - boot}
    return told | ({"element": os.environ[ELEMENT]} if ELEMENT in os.environ else {})


def is_alive(status: Record) -> bool:
    """Whether the recorded process still runs, and is not another one under the same number.

    That of an element of Slurm's counts as alive elsewhere: only Slurm knows.
    """
    import psutil

    if "element" in status and status["element"] != os.environ.get(ELEMENT):
        return True
    pid = status.get("pid")
    # A stranger's record may say anything: True, -1 and 0 are no numbers of processes.
    if type(pid) is not int or pid <= 0:
        return False
    try:
        boot = psutil.boot_time()
        process = psutil.Process(pid)
        started = process.create_time()
        # Some seconds of tolerance: the system tells it relative to its own start, which is
        # rounded. That moves when the clock is set; the time since then does not.
        same = abs(started - float(status["process_started"])) < 2.0
        same = same or abs(started - boot - float(status.get("since_boot", -1.0))) < SAME
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def _parquet(history: Rows | pandas.DataFrame) -> bytes:
    """The history as Parquet, the known columns in their order and types, others after them."""
    import pyarrow as pa

    if isinstance(history, Sequence):
        names = dict.fromkeys(name for row in history for name in row) or HISTORY_COLUMNS
        columns: Record = {name: [row.get(name) for row in history] for name in names}
    else:
        columns = {str(name): history[name] for name in history}
    missing = [name for name in HISTORY_COLUMNS if name not in columns]
    if missing:
        raise LabkitError(
            f"a history without {', '.join(missing)}; needed are {', '.join(HISTORY_COLUMNS)}"
        )
    known = {name: pa.array(columns[name], type=kind) for name, kind in HISTORY_COLUMNS.items()}
    others = {name: pa.array(values) for name, values in columns.items() if name not in known}
    return _compressed(pa.table(known | others))


def _compressed(table: pa.Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


def now() -> str:
    """This moment, as records have it."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
