"""Runs of notebooks that train by themselves: what `lk.log` is told, kept as any other run."""

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
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import InvalidInput, LabkitError, Pruned, short
from labkit.common.machine import machine
from labkit.common.privacy import scrub
from labkit.jobs import parameters
from labkit.records import store
from labkit.records.run import Run
from labkit.records.safe_yaml import read_plain_file
from labkit.records.shape import FIELDS, wrong_field
from labkit.records.stream import FOLDER, Reader, Writer

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

    from labkit.jobs.parameters import Values

WRITE_EVERY = 0.5  # seconds between two writes of curves that grow point by point
# Parts of metrics.json that labkit makes by itself.
RESERVED = FIELDS["metrics.json"].keys() - {"test_accuracy", "test_loss"} | {"logged", "spread"}
# What a comparison judges runs by, and what stands for it, the first that is given.
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
    """Keep what a notebook of one's own has measured as a run: `lk.log(accuracy=0.93)`.

    A number, a truth or a text is a result, a list or array of numbers a curve, whose last value is
    a result, too. With `step`, numbers are points of curves. Further calls add to the same run. It
    is "running" until the notebook or script ends: then completed, or failed by what ended it.

    Another run begins where `parameters` are given that differ from those of the run, and in a
    session of cells after a cell that sets a parameter of the parameters cell, as this one does
    when it is run again.

    Comparisons know `accuracy` (or val_accuracy, test_accuracy) and val_loss (or test_loss) as
    those of held-out data, and the curve `loss` as that of training; other names stand as given.

    Args:
        label: which of several runs of the notebook is meant.
        step: where on its curves the numbers stand, in steps from 1.
        parameters: of the run, beside those of the notebook's parameters cell; without them a
            call adds to the run that there is.
        values: what was measured, by name.

    Raises:
        InvalidInput: a value that is none of these, or a name of labkit's own.
    """
    if not _LOGS:
        _listen()
    going = _LOGS.get(label)
    if going and (going.is_over or parameters not in (None, going.given)):
        going.end()
        going = None
    if not going:
        _LOGS[label] = Log.begin(label, parameters or {})
    _LOGS[label].add(values, step)
    return _LOGS[label].run


class Log:
    """A run that is told by hand; it alone writes the record.

    Args:
        directory: of the run.
        experiment: its parameters.
        given: those of them that `lk.log` was given.
        declared: those that the notebook's parameters cell sets.
    """

    def __init__(
        self,
        directory: Path,
        experiment: Mapping[str, JSON],
        given: Values | None = None,
        declared: Iterable[str] = (),
    ) -> None:
        self.run, self.given, self._declared = Run(directory), dict(given or {}), set(declared)
        self.is_over = False  # what is told from now on is of another run
        self._results: dict[str, JSON] = {}
        self._curves: dict[str, dict[int, float | None]] = {}
        self._seconds: dict[int, float] = {}  # at which points of curves came
        self._seed = experiment.get("seed")
        self._begun, self._written = time.monotonic(), 0.0
        store.start(directory, experiment, machine())
        self._live = directory / FOLDER  # what it tells while it runs, as ranks do
        self._live.mkdir()
        self._writer = Writer(self._live, 0, store.this_process())

    @classmethod
    def begin(cls, label: str, given: Values) -> Log:
        """A run of this process, with the parameters of its notebook."""
        notebook, values = _parameters()
        record = experiment(notebook, values | dict(given), label)
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:8]
        name = label or Path(notebook).stem or "log"
        return cls(store.run_directory(f"{name}-{digest}"), record, given, values)

    def note(self, cell: str) -> None:
        """Hear of a cell that is about to run: one that sets parameters begins another run."""
        self.is_over |= not self._declared.isdisjoint(_names_set(cell))

    def add(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Take in values; what is given again replaces what was."""
        for name, value in values.items():
            if name in RESERVED:
                raise InvalidInput(f"{name} is a name of labkit's own: give it another one")
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
            told = {name: points.get(step) for name, points in self._curves.items()}
            self._writer.write("epoch", [{"step": step} | told])
            if Reader(self._live).asked_to_prune():
                raise Pruned(f"{self.run.name} pruned after {step} steps")

    def write(self) -> None:
        """Write what is known so far."""
        metrics = self._metrics()
        if wrong := wrong_field("metrics.json", metrics):
            raise InvalidInput(wrong)
        store.write_results(self.run.path, metrics, self._history())
        self.run.__dict__.pop("_metrics", None)  # a Run keeps what it has read
        self.run.__dict__.pop("_history", None)
        self._written = time.monotonic()

    def end(self) -> None:
        """Write all, and how the notebook has ended."""
        self.write()
        error = _ended_by()
        if error is None:
            store.complete(self.run.path)
        elif isinstance(error, Pruned):
            store.prune(self.run.path, str(error))
        elif isinstance(error, KeyboardInterrupt):
            job = os.environ.get("LABKIT_JOB")
            store.interrupt(self.run.path, (job and store.reason(Path(job))) or "by the user")
        elif isinstance(error, SystemExit):
            told = error.code if isinstance(error.code, str) else f"exit code {error.code}"
            store.fail(self.run.path, told)
        else:
            store.fail(self.run.path, f"{type(error).__name__}: {error}")
        # Last: a search may be asking it to end by a file in there at this very moment.
        shutil.rmtree(self._live, ignore_errors=True)

    def _metrics(self) -> dict[str, JSON]:
        """The record of metrics.json."""
        last = {name: points[max(points)] for name, points in self._curves.items() if points}
        results = {**last, **self._results}
        judged = {
            name.replace("val", "test"): results[given[0]]
            for name, names in JUDGED.items()
            if (given := [each for each in names if is_number(results.get(each))])
        }
        return results | judged | {"logged": list(results), "epochs": self._epochs()}

    def _epochs(self) -> list[JSON]:
        """A row a step with the points of all curves."""
        curves = dict(self._curves)
        for name, names in JUDGED.items():
            if given := [each for each in names if each in curves]:
                curves[name] = curves[given[0]]
        steps = sorted(set(chain.from_iterable(curves.values())))
        return [
            {"epoch": place, "step": step, "seconds": self._seconds.get(step)}
            | {name: points[step] for name, points in curves.items() if step in points}
            for place, step in enumerate(steps)
        ]

    def _history(self) -> list[dict[str, JSON]]:
        """A row a step of the training loss; nothing is known of bytes, nor of seconds of lists."""
        points = self._curves.get("loss", {})
        empty = dict.fromkeys(store.HISTORY_COLUMNS)
        zero = dict.fromkeys(("epoch", "rank", "payload_bytes", "wire_bytes", "messages"), 0)
        seed = self._seed if type(self._seed) is int else 0
        before, rows = 0.0, []
        for step, loss in sorted(points.items()):
            at = self._seconds.get(step)
            spent = None if at is None else at - before
            before = before if at is None else at
            rows.append(
                empty | zero | {"seed": seed, "step": step - 1, "loss": loss, "seconds": spent}
            )
        return rows


def experiment(notebook: str, values: Values, label: str = "") -> dict[str, JSON]:
    """The record of a logged run's parameters; its texts name no machine."""
    record: dict[str, JSON] = {"notebook": notebook}
    if label:
        record["name"] = label
    for name, value in values.items():
        plain: JSON = scrub(value) if isinstance(value, str) else value
        # Records say the name of a strategy so; any other field of another type is the notebook's.
        if name == "strategy" and isinstance(plain, str):
            plain = dict[str, JSON](name=plain)
        odd = name in record or wrong_field("experiment.json", {name: plain})
        record[f"{name} (own)" if odd else name] = plain
    return record


def parameters_of_job(job: Path) -> tuple[str, dict[str, JSON]]:
    """The name of a job's notebook, and its parameters as far as they are known without it."""
    given = read_plain_file(job / "params.yaml")
    known = parameters.declared(job / "output.ipynb")
    defaults = parameters.known_values({name: each.default for name, each in known.items()})
    name = str(store.read_json(job / "status.json").get("notebook"))
    return name, defaults | (given if isinstance(given, dict) else {})


def keep_failed(job: Path, cause: str, rank: int | None = None) -> None:
    """Keep a run of a job that failed before it made one: a comparison of a sweep lacks nobody."""
    if not any(job.glob("*/experiment.json")) and (job / "output.ipynb").exists():
        run = store.new_run_directory(job, "failed")
        store.start(run, experiment(*parameters_of_job(job)), machine())
        store.fail(run, cause, rank)


_LOGS: dict[str, Log] = {}  # of this process, by their labels


@atexit.register
def _end() -> None:
    for each in _LOGS.values():
        each.end()


def _parameters() -> tuple[str, dict[str, JSON]]:
    """The name of this process's notebook or script, and its parameters as they are now."""
    main = vars(sys.modules["__main__"])
    if job := os.environ.get("LABKIT_JOB"):
        return parameters_of_job(Path(job))
    # As JupyterLab, VS Code and Python itself say it.
    session = os.environ.get("JPY_SESSION_NAME")
    path = Path(session or main.get("__vsc_ipynb_file__") or main.get("__file__") or "")
    try:
        known = parameters.declared(path)
    except LabkitError:  # not saved yet, or no file at all
        return path.name, {}
    values = {name: main.get(name, each.default) for name, each in known.items()}
    return path.name, {name: value for name, value in values.items() if _is_json(value)}


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _plain(name: str, value: Any) -> Any:
    """A number, a truth, a text, None, or a list of numbers."""
    if hasattr(value, "numpy") and not hasattr(value, "tolist"):  # TensorFlow's
        value = value.numpy()
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy's, PyTorch's, pandas's
    if isinstance(value, tuple | list):
        numbers = [_plain(name, each) for each in value]
        if numbers and all(number is None or is_number(number) for number in numbers):
            return numbers
    elif value is None or isinstance(value, bool | int | float | str):
        return scrub(value) if isinstance(value, str) else value
    raise InvalidInput(
        f"{name}={short(value)} is no number, truth or text, nor a list of numbers (a curve)"
    )


def _ended_by() -> BaseException | None:
    """The error that has ended this process's notebook or script; of a session of cells, none."""
    error = getattr(sys, "last_value", None) or _exit
    if _shell() is not None:
        # An error of one cell ends a job, and nothing where a person goes on.
        error = _last_error if os.environ.get("LABKIT_JOB") else None
    return None if isinstance(error, SystemExit) and not error.code else error


_last_error: BaseException | None = None  # of the last cell
_exit: SystemExit | None = None  # of a script; Python forgets it before it calls `_end`


def _listen() -> None:
    """Hear of cells, or of the exit of a script."""
    if shell := _shell():
        if not os.environ.get("LABKIT_JOB"):  # whose parameters are those that it was started with
            shell.events.register("pre_run_cell", _before)
        shell.events.register("post_run_cell", _note)
    elif sys.exit is not _leave:
        sys.exit = _leave


def _leave(
    code: int | str | None = None, /, *, plain: Callable[..., NoReturn] = sys.exit
) -> NoReturn:
    """`sys.exit`, remembered: no other trace is left of how a script ended by it."""
    global _exit
    if threading.current_thread() is threading.main_thread():
        _exit = SystemExit(code)
    plain(code)


def _before(cell: ExecutionInfo) -> None:
    for log in _LOGS.values():
        log.note(str(cell.raw_cell))


def _names_set(cell: str) -> set[str]:
    """The names to which a cell assigns outside functions, loops and conditions."""
    shell = _shell()
    try:
        body = ast.parse(shell.transform_cell(cell) if shell else cell).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the kernel will say so
        return set()
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign) and node.value]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _note(cell: ExecutionResult) -> None:
    global _last_error
    _last_error = cell.error_before_exec or cell.error_in_exec
    # The kernel may not come to its end: all of a cell is kept when the cell is over.
    for log in _LOGS.values():
        log.write()


def _shell() -> InteractiveShell | None:
    """IPython's, where this is a notebook's kernel."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()
