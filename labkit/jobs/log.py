"""Runs of notebooks with their own training loop, which record measured values with `lk.log`."""

from __future__ import annotations

import ast
import atexit
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import InvalidInput, LabkitError, Pruned, short
from labkit.common.machine import machine
from labkit.common.privacy import scrub
from labkit.jobs import cells, parameters
from labkit.records import provenance, store
from labkit.records.run import Run
from labkit.records.safe_yaml import read_plain_file
from labkit.records.shape import FIELDS, field_problem
from labkit.records.stream import FOLDER, StreamReader, StreamWriter

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

    from labkit.jobs.parameters import Known, Values

INJECTED = "# Parameters\n"  # papermill begins the cell that it injects with this comment
# An executor's notebook is searched among at most `MAX_CANDIDATES` notebooks near the kernel.
MAX_CANDIDATES = 100
WRITE_EVERY = 0.5  # Growing curves are written to disk at most every `WRITE_EVERY` seconds.

# Only labkit itself may write the fields of metrics.json in `RESERVED`.
RESERVED = FIELDS["metrics.json"].keys() - {"test_accuracy", "test_loss"} | {"logged", "spread"}
# Comparisons of runs use the metrics in `JUDGED`. For each metric, `JUDGED` lists the logged names
# to read, best first.
JUDGED = {
    "val_accuracy": ("val_accuracy", "test_accuracy", "accuracy"),
    "val_loss": ("val_loss", "test_loss"),
}


def log(
    label: str = "",
    /,
    *,
    step: int | None = None,
    parameters: Values | None = None,
    **values: Any,
) -> Run:
    """Record a notebook's measured values as a run, for example `lk.log(accuracy=0.93)`.

    A value that is a number, a boolean or a text is a result. A list or an array of numbers is a
    curve; the curve's last value is also a result. With the argument `step`, each number is a point
    of a curve. Further calls of `lk.log` add values to the same run. The state of the run is
    "running" until the notebook or script ends. After the end of the notebook or script, the run's
    state is "completed", or "failed" after an error.

    A new run begins if `parameters` differ from those of the current run. In interactive sessions,
    a new run begins after a cell sets a declared parameter.

    Comparisons of runs read held-out accuracy from val_accuracy, test_accuracy or accuracy, and
    held-out loss from val_loss or test_loss. The curve `loss` is the training loss. All other names
    have no special meaning.

    Args:
        label: Label of the run. Only notebooks that log several runs at once need labels.
        step: Training step, counted from 1, at which the values were measured; the values become
            points of curves.
        parameters: Parameters of the run, in addition to those of the notebook's parameters cell.
            If `parameters` is None, the call adds values to the current run.
        values: Measured values, by name.

    Raises:
        InvalidInput: A name is reserved by labkit, or a value has the wrong type. Valid values are
            numbers, booleans, texts and lists of numbers.
    """
    if not _LOGS:
        _register_hooks()
    present = _LOGS.get(label)
    if present and (present.is_over or parameters not in (None, present.given)):
        present.end()
        present = None
    if not present:
        _LOGS[label] = RunLog.begin(label, parameters or {})
    _LOGS[label].add(values, step)
    return _LOGS[label].run


class RunLog:
    """A run whose values come from `lk.log`; only this object writes the record of the run.

    Args:
        directory: Folder of the run.
        experiment: Parameters of the run, as stored in experiment.json.
        given: Parameters that the caller passed to `lk.log`.
        declared: Names of parameters that the notebook's parameters cell sets.
    """

    def __init__(
        self,
        directory: Path,
        experiment: Mapping[str, JSON],
        given: Values | None = None,
        declared: Iterable[str] = (),
    ) -> None:
        self.run, self.given, self._declared = Run(directory), dict(given or {}), set(declared)
        # After the end of the run, `is_over` is true, and further values need a new run.
        self.is_over = False
        self._results: dict[str, JSON] = {}
        self._curves: dict[str, dict[int, float | None]] = {}
        # `_seconds` maps each step to the number of seconds since the start of the run.
        self._seconds: dict[int, float] = {}
        self._seed = experiment.get("seed")
        self._begun, self._written = time.monotonic(), 0.0
        store.start(directory, experiment, machine())
        self._live = directory / FOLDER  # The folder `_live` receives the stream of logged values.
        self._live.mkdir()
        self._writer = StreamWriter(self._live, 0, store.this_process())

    @classmethod
    def begin(cls, label: str, parameters: Values) -> RunLog:
        """Begin the log of a run of this notebook or script, with the parameters of the process."""
        notebook, values = _parameters()
        record = experiment(notebook, values | dict(parameters), label)
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:8]
        name = label or Path(notebook).stem or "log"
        log = cls(store.run_directory(f"{name}-{digest}"), record, parameters, values)
        provenance.write(log.run.path, begin=True)
        return log

    def note(self, cell: str) -> None:
        """Mark the run as ended if the next cell sets parameters, so that a new run begins."""
        self.is_over |= not self._declared.isdisjoint(_assigned_names(cell))

    def add(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Add values to the run; a value replaces the earlier value with the same name."""
        for name, value in values.items():
            if name in RESERVED:
                raise InvalidInput(f"{name} is a name that labkit reserves; choose another name")
            plain = _plain(name, value)
            if isinstance(plain, list):
                self._curves[name] = dict(enumerate(plain, 1))
            elif step is not None and (is_number(plain) or plain is None):
                self._curves.setdefault(name, {})[step] = plain
            else:
                self._results[name] = plain
        now = time.monotonic()
        if step is not None:
            self._seconds.setdefault(step, now - self._begun)
        if step is None or now - self._written > WRITE_EVERY:
            self.write()
        if step is not None:
            points_at_step = {name: points.get(step) for name, points in self._curves.items()}
            self._writer.write("epoch", [{"step": step} | points_at_step])
            if StreamReader(self._live).is_prune_requested():
                raise Pruned(f"{self.run.name} pruned after {step} steps")

    def write(self) -> None:
        """Write all values that have been added so far to the folder of the run."""
        metrics = self._metrics()
        if wrong := field_problem("metrics.json", metrics):
            raise InvalidInput(wrong)
        store.write_results(self.run.path, metrics, self._history())
        # A `Run` caches its metrics and history, so the code deletes the cached values after each
        # write.
        self.run.__dict__.pop("_metrics", None)
        self.run.__dict__.pop("_history", None)
        self._written = time.monotonic()

    def end(self) -> None:
        """Write all values, and the run's final state: completed, pruned, interrupted or failed."""
        self.write()
        # The process of a job, which records glued values, has not read the notebook's files.
        if (self.run.path / provenance.FILE).exists():
            provenance.write(self.run.path)
        error = _ended_by()
        if error is None:
            store.complete(self.run.path)
        elif isinstance(error, Pruned):
            store.prune(self.run.path, str(error))
        elif isinstance(error, KeyboardInterrupt):
            job = os.environ.get("LABKIT_JOB")
            store.interrupt(self.run.path, (job and store.read_reason(Path(job))) or "by the user")
        elif isinstance(error, SystemExit):
            message = error.code if isinstance(error.code, str) else f"exit code {error.code}"
            store.fail(self.run.path, message)
        else:
            store.fail(self.run.path, f"{type(error).__name__}: {error}")
        # The folder with streamed values is removed last. A hyperparameter search may still write a
        # prune request to the folder.
        shutil.rmtree(self._live, ignore_errors=True)

    def _metrics(self) -> dict[str, JSON]:
        """Return the content of metrics.json."""
        last = {name: points[max(points)] for name, points in self._curves.items() if points}
        results = {**last, **self._results}
        judged = {
            name.replace("val", "test"): results[present[0]]
            for name, names in JUDGED.items()
            if (present := [candidate for candidate in names if is_number(results.get(candidate))])
        }
        return results | judged | {"logged": list(results), "epochs": self._epochs()}

    def _epochs(self) -> list[JSON]:
        """Return one row per training step, with the values of all curves at the step."""
        curves = dict(self._curves)
        for name, names in JUDGED.items():
            if present := [candidate for candidate in names if candidate in curves]:
                curves[name] = curves[present[0]]
        steps = sorted(set(chain.from_iterable(curves.values())))
        return [
            {"epoch": place, "step": step, "seconds": self._seconds.get(step)}
            | {name: points[step] for name, points in curves.items() if step in points}
            for place, step in enumerate(steps)
        ]

    def _history(self) -> list[dict[str, JSON]]:
        """Return one history row per step of the curve `loss`, with unknown byte counts as 0."""
        points = self._curves.get("loss", {})
        empty = dict.fromkeys(store.HISTORY_COLUMNS)
        zero = dict.fromkeys(("epoch", "rank", "payload_bytes", "wire_bytes", "messages"), 0)
        seed = self._seed if type(self._seed) is int else 0
        before, rows = 0.0, []
        for step, loss in sorted(points.items()):
            elapsed = self._seconds.get(step)
            seconds = None if elapsed is None else elapsed - before
            before = before if elapsed is None else elapsed
            rows.append(
                empty | zero | {"seed": seed, "step": step - 1, "loss": loss, "seconds": seconds}
            )
        return rows


def experiment(notebook: str, values: Values, label: str = "") -> dict[str, JSON]:
    """Return the record of a logged run's parameters, without user, host or folder names."""
    record: dict[str, JSON] = {"notebook": notebook}
    if label:
        record["name"] = label
    for name, value in values.items():
        plain: JSON = scrub(value) if isinstance(value, str) else value
        # experiment.json stores a strategy as a mapping that contains the strategy's name. A
        # parameter may have the name of an Experiment field but an invalid value. The record then
        # contains the parameter under another name.
        if name == "strategy" and isinstance(plain, str):
            plain = dict[str, JSON](name=plain)
        odd = name in record or field_problem("experiment.json", {name: plain})
        record[f"{name} (own)" if odd else name] = plain
    return record


def parameters_of_job(job: Path) -> tuple[str, dict[str, JSON]]:
    """Return the name of a job's notebook, and the parameters that are known without a kernel."""
    job_values = read_plain_file(job / "params.yaml")
    declared = parameters.declared(job / "output.ipynb")
    defaults = parameters.known_values(
        {name: parameter.default for name, parameter in declared.items()}
    )
    name = Path(str(store.read_json(job / "status.json").get("notebook"))).name
    return name, defaults | (job_values if isinstance(job_values, dict) else {})


def keep_failed(job: Path, cause: str, rank: int | None = None) -> None:
    """Record a run for a job that failed before its first run, so that comparisons show the job."""
    if not any(job.glob("*/experiment.json")) and (job / "output.ipynb").exists():
        run = store.new_run_directory(job, "failed")
        store.start(run, experiment(*parameters_of_job(job)), machine())
        store.fail(run, cause, rank)


_LOGS: dict[str, RunLog] = {}  # `_LOGS` contains the unfinished runs of this process, by label.


@atexit.register
def _end() -> None:
    for entry in _LOGS.values():
        entry.end()


def _parameters() -> tuple[str, dict[str, JSON]]:
    """Return the name of this process's notebook or script, and its current parameters."""
    main = vars(sys.modules["__main__"])
    if job := os.environ.get("LABKIT_JOB"):
        name, values = parameters_of_job(Path(job))
        computed = parameters.declared(Path(job) / "output.ipynb").keys() - values.keys()
        return name, _json_values({each: main.get(each) for each in computed}) | values
    path = _session_file() or Path(main.get("__file__") or "")
    try:
        declared = parameters.declared(path)
    except LabkitError:  # the notebook file is not saved yet, or does not exist
        shell = _shell()
        if shell is None or _session_file():
            return path.name, {}
        return executed_parameters([*shell.history_manager.input_hist_raw], main)
    values = {name: main.get(name, parameter.default) for name, parameter in declared.items()}
    return path.name, _json_values(values)


def _session_file() -> Path | None:
    """Return the notebook that is open in JupyterLab or VS Code; None in other processes."""
    in_vs_code = vars(sys.modules["__main__"]).get("__vsc_ipynb_file__")
    file = os.environ.get("JPY_SESSION_NAME") or in_vs_code
    return Path(file) if file else None


def executed_parameters(history: Sequence[str], namespace: Values) -> tuple[str, dict[str, JSON]]:
    """Return the name and the parameters of the notebook that papermill or nbclient executes.

    Executors do not tell a kernel the notebook's path. The kernel knows the sources of the executed
    cells. The notebook is a file whose cells begin with these sources. Without such a file, the
    parameters are those in the cell that papermill injected, and in the cell before. Without an
    injected cell, the first cell that contains only assignments declares the parameters.

    Args:
        history: Sources of the executed cells, in order.
        namespace: Variables of the kernel.
    """
    sources = [source.strip() for source in history if source.strip()]
    for path in _notebook_candidates():
        with suppress(LabkitError):  # the file is no notebook
            all_cells = cells.read(path)
            code = [cell for cell in all_cells if cell.kind == "code" and cell.source.strip()]
            own = [cell.source.strip() for cell in code if "injected-parameters" not in cell.tags]
            if (injected := _injected_source(own, sources)) is not None:
                declared = parameters.declared(path) | parameters.parse(injected)
                return path.name, _values_of(declared, namespace)
    marked = [place for place, source in enumerate(sources) if source.startswith(INJECTED)]
    if marked:
        own = sources[max(0, marked[-1] - 1) : marked[-1] + 1]
    else:
        own = [source for source in sources if parameters.only_assigns(source)][:1]
    return "", _values_of(parameters.parse("\n".join(own)), namespace)


def _values_of(declared: Known, namespace: Values) -> dict[str, JSON]:
    """Return literal values from the source, and computed values from the kernel's variables."""
    defaults = {name: parameter.default for name, parameter in declared.items()}
    computed = {name: namespace[name] for name in defaults.keys() & namespace.keys()}
    return _json_values(computed | parameters.known_values(defaults))


def _injected_source(own: Sequence[str], executed: Sequence[str]) -> str | None:
    """Return the source that papermill injected, or ""; None if the executed cells are others."""
    place, injected = 0, ""
    for source in executed:
        if source == next(iter(own[place : place + 1]), None):
            place += 1
        elif source.startswith(INJECTED) and not injected:
            injected = source
        else:
            return None
    return injected


def _notebook_candidates() -> list[Path]:
    """Return files that an executor may execute: its arguments, then notebooks in this folder."""
    import psutil

    named: list[Path] = []
    with suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        named = [Path(parent.cwd(), word) for word in parent.cmdline()[1:]]
    named = [path for path in named if path.suffix.lower() in (".ipynb", *cells.SCRIPTS)]
    near = sorted(chain(Path().glob("*.ipynb"), Path().glob("*/*.ipynb")))[:MAX_CANDIDATES]
    return [path for path in (*named, *near) if path.is_file()]


def _json_values(values: Values) -> dict[str, JSON]:
    return {name: value for name, value in values.items() if _is_json(value)}


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _plain(name: str, value: Any) -> Any:
    """Return a value as a number, a boolean, a text, None, or a list of numbers."""
    if hasattr(value, "numpy") and not hasattr(value, "tolist"):  # a TensorFlow tensor
        value = value.numpy()
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, tuple | list):
        numbers = [_plain(name, element) for element in value]
        if numbers and all(number is None or is_number(number) for number in numbers):
            return numbers
    elif value is None or isinstance(value, bool | int | float | str):
        return scrub(value) if isinstance(value, str) else value
    raise InvalidInput(
        f"{name}={short(value)} is not a number, a boolean, a text, or a list of numbers (a curve)"
    )


def _ended_by() -> BaseException | None:
    """Return the exception that ended this notebook or script; None if there was no error.

    An interactive session always ends without error, because it continues after an error in a cell.
    """
    error = getattr(sys, "last_value", None) or _exit
    if (shell := _shell()) is not None:
        # An error in a cell ends a job, and a notebook that papermill or nbclient executes. An
        # interactive session continues after the error.
        is_executed = getattr(shell, "kernel", None) is not None and _session_file() is None
        error = _last_error if os.environ.get("LABKIT_JOB") or is_executed else None
    return None if isinstance(error, SystemExit) and not error.code else error


_last_error: BaseException | None = None
# `_exit` stores the SystemExit of a script, because Python deletes the exception before `_end`
# runs.
_exit: SystemExit | None = None


def _register_hooks() -> None:
    """Register hooks for the start and end of each cell, or for the exit of a script."""
    if shell := _shell():
        # Only interactive sessions need the hook, because the parameters of a job do not change.
        if not os.environ.get("LABKIT_JOB"):
            shell.events.register("pre_run_cell", _note_cell_start)
        shell.events.register("post_run_cell", _note_cell_end)
    elif sys.exit is not _exit_with_record:
        sys.exit = _exit_with_record


def _exit_with_record(
    code: int | str | None = None, /, *, plain: Callable[..., NoReturn] = sys.exit
) -> NoReturn:
    """Store the exit code and call `sys.exit`, because Python itself does not store the code."""
    global _exit
    if threading.current_thread() is threading.main_thread():
        _exit = SystemExit(code)
    plain(code)


def _note_cell_start(cell: ExecutionInfo) -> None:
    for log in _LOGS.values():
        log.note(str(cell.raw_cell))


def _assigned_names(cell: str) -> set[str]:
    """Return the names that a cell assigns outside functions, loops and conditions."""
    shell = _shell()
    try:
        body = ast.parse(shell.transform_cell(cell) if shell else cell).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the kernel reports the error
        return set()
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign) and node.value]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _note_cell_end(cell: ExecutionResult) -> None:
    global _last_error
    _last_error = cell.error_before_exec or cell.error_in_exec
    # Logged values are written after each cell, because the kernel may be killed at any time.
    for log in _LOGS.values():
        log.write()


def _shell() -> InteractiveShell | None:
    """Return the IPython shell of a notebook's kernel; None in a script."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()
