"""Records of running, completed and failed runs, whose files are read only when needed."""

from __future__ import annotations

import glob
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import LabkitError
from labkit.common.files import open_file
from labkit.common.html import card, curve, folded, pairs, preformatted
from labkit.common.renamed import refuse_former_attributes
from labkit.common.units import number_text
from labkit.records import shape, store
from labkit.records.folders import RunRecords, find_runs
from labkit.records.shape import TABLES
from labkit.records.store import Record

if TYPE_CHECKING:
    import keras
    import pandas

KEY_METRICS = (
    "test_accuracy",
    "test_loss",
    "samples_per_second",
    "step_ms.median",
    "train_seconds",
    "payload_bytes_per_step",
)


@refuse_former_attributes
@dataclass(frozen=True)
class Run:
    """The record of a training run: experiment, metrics, history, environment and model.

    `Cluster.run` returns a run, and `lk.load_runs` reads all runs of a folder.

    Args:
        path: Folder of the run, such as `runs/mlp-digits-AllReduce-2-1f3a9c04`. Each file of the
            run is read at its first use. A run that is still training has no metrics yet.
    """

    path: Path

    @property
    def name(self) -> str:
        """Name of the run's folder: `<label>-<hash8>`, followed by -2, -3 … for repeated runs."""
        # The attribute `Path.name` is empty for the path of the current folder.
        name = self.path.name
        return name if name not in ("", "..") else self.path.resolve().name

    @cached_property
    def experiment(self) -> Record:
        """Fields of the experiment by name, without the schema version."""
        return _without_schema(store.read_json(self.path / "experiment.json"))

    @property
    def status(self) -> Record:
        """The current status of the run, a dict.

        `state` is "running", "completed", "failed" or "interrupted". The status of a run that has
        ended also contains `ended`. The status of a failed run also contains `cause` and `rank`.
        """
        return self.__dict__.get("_final") or store.read_status(self.path)

    @property
    def metrics(self) -> Record:
        """A dict of the run's results, such as `test_accuracy`; empty before the run has results.

        `step_ms` is the time of a step in milliseconds, and `samples_per_second` the throughput.
        `equivalence` is the verdict of the equivalence check.
        """
        # Missing metrics are not cached, because an active run writes its metrics later.
        is_written = "_metrics" in self.__dict__ or (self.path / "metrics.json").exists()
        return self._metrics if is_written else {}

    @cached_property
    def _metrics(self) -> Record:
        return _without_schema(store.read_json(self.path / "metrics.json"))

    @property
    def history(self) -> pandas.DataFrame:
        """A data frame with one row per training step and rank; empty until the run has results.

        `seed`, `epoch`, `step` and `rank` identify the row, and `loss` is the loss of the rank's
        samples. `seconds` is the time of the step; `compute_seconds`, `communicate_seconds` and
        `wait_seconds` are parts of it, in seconds. `payload_bytes` counts the bytes that the rank
        passed to collectives and sends. `wire_bytes` counts the bytes that the rank sent to other
        ranks. `messages` counts these messages, and `samples` the rows that the rank trained on.
        """
        if (self.path / "history.parquet").exists():
            return self._history
        return store.empty_table(store.HISTORY_COLUMNS)

    @cached_property
    def _history(self) -> pandas.DataFrame:
        return store.read_table(self.path / "history.parquet", store.HISTORY_COLUMNS)

    @cached_property
    def timeline(self) -> pandas.DataFrame:
        """A data frame of timed events: rank, kind, step, bucket, start, stop (seconds).

        `labkit.exchange.Timeline` lists the kinds of events. Times are counted from the first
        event.
        """
        return self._table("timeline")

    @cached_property
    def compression_stats(self) -> pandas.DataFrame:
        """Compression statistics of each gradient; empty without `compression_stats_every`.

        Columns: step, rank, bucket, layer, relative_error, cosine, residual_norm,
        bits_per_parameter, fraction_sent.
        """
        return self._table("compression_stats")

    @cached_property
    def update_log(self) -> pandas.DataFrame:
        """Parameter servers' events for each gradient; empty for a run without parameter servers.

        Columns: server, update, worker, step, version (of the weights), staleness, rows (samples),
        sent, delivered, applied. The column `update` is the server's update number, or -1 for a
        dropped gradient. The columns `sent`, `delivered` and `applied` contain seconds on the run's
        clock.
        """
        return self._table("update_log")

    @cached_property
    def layers(self) -> pandas.DataFrame:
        """How each layer is sliced under tensor parallelism; empty for a run without slices.

        Columns: rank, layer, slices (the sliced dimension), why (reason against slicing), and
        counts of bytes. The columns `forward_bytes`, `forward_wire_bytes`, `backward_bytes` and
        `backward_wire_bytes` count bytes per step. The column `weights_bytes` counts the rank's
        weights, and `whole_weights_bytes` the unsliced layer's weights.
        """
        return self._table("layers")

    @cached_property
    def resources(self) -> pandas.DataFrame:
        """Processor time, memory and traffic of each rank over the training, at regular times.

        Columns: rank, seconds since the start of training, cpu_seconds of the rank's process,
        memory_bytes (resident), and sent_bytes and received_bytes of the rank's host. All columns
        but memory_bytes are totals since the start. The traffic excludes loopback.
        """
        return self._table("resources")

    def _table(self, name: str) -> pandas.DataFrame:
        """Return the table `name` that the ranks wrote, or an empty table if it has no file."""
        path, kinds = self.path / f"{name}.parquet", TABLES[name]
        if name in shape.RENAMED_TABLES and not path.exists():
            path = self.path / f"{shape.RENAMED_TABLES[name]}.parquet"
        return store.read_table(path, kinds) if path.exists() else store.empty_table(kinds)

    @property
    def memory(self) -> pandas.DataFrame:
        """Peak bytes of each rank, with columns rank, kind, measured, predicted.

        Kinds of memory: weights, gradients, optimizer, activations, versions. Activations are kept
        between the forward pass and the backward pass. Versions are old weights that a backward
        pass still needs. `labkit.model_parallel.stages.footprint.MemoryLedger` defines how the
        bytes of each kind of memory are counted. Predictions are computed from tensor shapes and
        the pipeline schedule. The column `measured` is missing for a run that did not measure its
        memory.
        """
        import pandas as pd

        rows = [
            {"rank": part["rank"], "kind": kind}
            | {name: part[name].get(kind) for name in ("measured", "predicted")}
            for part in self.metrics.get("memory", [])
            for kind in part["predicted"]
        ]
        return pd.DataFrame(rows, columns=["rank", "kind", "measured", "predicted"])

    def export_trace(self, path: Path | str, more_rows: Iterable[Record] = ()) -> Path:
        """Write the timeline as a Chrome trace, which chrome://tracing and Perfetto open.

        Args:
            path: Path of the trace file.
            more_rows: Additional timeline rows, such as
                `labkit.records.staged_steps.predicted_rows(run)`.

        Raises:
            LabkitError: If the run has no timeline.
        """
        from labkit.records.chrome_trace import chrome_trace

        if self.timeline.empty:
            hint = "; give one of its seeds, each of which has a timeline" if self.seeds else ""
            raise LabkitError(
                f"{self.name} has no timeline (state: {self.status['state']}); a completed run on "
                f"two or more workers that exchange gradients has one{hint}"
            )
        rows = [*self.timeline.to_dict("records"), *more_rows]
        trace = chrome_trace(rows, self.metrics.get("clocks") or [])
        return store.write_atomically(Path(path), json.dumps(trace))

    @cached_property
    def environment(self) -> Record:
        """Package versions and hardware, or an empty dict and a warning if the file is damaged."""
        # The file `environment.json` is missing if the run failed early.
        path = self.path / "environment.json"
        try:
            return _without_schema(store.read_json(path)) if path.exists() else {}
        except LabkitError as error:
            warnings.warn(f"{error}; the run is shown without its environment", stacklevel=2)
            return {}

    @cached_property
    def provenance(self) -> Record:
        """Repository, files, packages and imported modules of the run; {} if not recorded.

        `repository` contains the commit, and the diff of uncommitted changes or only its checksum.
        `files` maps each source file and data file that Python has read to its checksum.
        """
        from labkit.records import provenance

        try:
            return _without_schema(provenance.read(self.path))
        except LabkitError as error:
            warnings.warn(f"{error}; the run is shown without its inputs", stacklevel=2)
            return {}

    @property
    def seeds(self) -> list[Run]:
        """The runs of all seeds, in order of the seeds; empty for a run without repeats."""
        entries = [path for path in self.path.iterdir() if not path.is_symlink()]
        numbered = ((re.fullmatch(r"seed(\d+)", path.name), path) for path in entries)
        # Seeds are sorted as numbers, because the text seed10 would come before seed2.
        seeds = sorted((int(match[1]), path) for match, path in numbered if match)
        return [Run(path) for _, path in seeds]

    @property
    def model_file(self) -> Path:
        """Path of the trained model's Keras file; with several seeds, the file of the first seed.

        Raises:
            LabkitError: If the run has no model file.
        """
        # If a run has repeats, only the folders of its seeds contain model files.
        directories = [self.path, *(seed.path for seed in self.seeds)]
        files = [
            directory / "model.keras"
            for directory in directories
            if (directory / "model.keras").exists()
        ]
        if not files:
            raise LabkitError(
                f"{self.name} has no model.keras (state: {self.status['state']}); only a completed "
                "run of a model that Keras can save has one"
            )
        # The function `open_file` rejects symbolic links, and pipes, on which Keras would block.
        os.close(open_file(files[0]))
        return files[0]

    def model(self) -> keras.Model:
        """Import Keras, and load the trained model in Keras's safe mode.

        Raises:
            LabkitError: If the model file contains code, such as a Lambda layer, or unknown
                classes.
        """
        from labkit.keras.safe_mode import load_model

        return load_model(self.model_file)

    def _repr_html_(self) -> str:
        status = self.status
        cause = f" · {status['cause']}" if status.get("cause") else ""
        facts = {"state": f"{status['state']}{cause}", "verdict": verdict(self)}
        figures = {name: metric_text(value) for name, value in key_metrics(self).items()}
        parameters = json.dumps(self.experiment, indent=1, ensure_ascii=False)
        return card(
            self.name,
            pairs(facts | figures),
            _losses(self.metrics.get("epochs") or []),
            folded("parameters", preformatted(parameters)),
        )


def load_runs(root: Path | str | Iterable[Path | str] = "runs") -> list[Run]:
    """Return all usable runs in one or several folders, from the oldest to the newest.

    A warning is issued for each unusable run. A pattern such as `runs/tour/00*` means all folders
    that match it. If the current folder lacks a relative path, labkit searches a second folder. The
    second folder is the parent of the runs folder (`store.runs_folder`).

    Raises:
        LabkitError: If a folder does not exist.
    """
    roots = [root] if isinstance(root, str | Path) else list(root)
    folders = [folder for root_path in roots for folder in _matching_folders(Path(root_path))]
    # If a caller gives nested folders, each run is still returned only once. Runs with the same
    # starting time are sorted by path.
    runs_by_path = {run.path: run for folder in folders for run in find_runs(folder)}
    order = sorted(
        runs_by_path.values(), key=lambda run: (run.status.get("started") or "", run.path)
    )
    return [run_from_records(run) for run in order]


def run_from_records(records: RunRecords) -> Run:
    """Return a run from records in memory, so that their files are not read again."""
    run = Run(records.path)
    run.__dict__["experiment"] = _without_schema(records.experiment)
    if records.metrics is not None:
        run.__dict__["_metrics"] = _without_schema(records.metrics)
    if records.status["state"] == "completed":
        run.__dict__["_final"] = records.status
    return run


def to_dataframe(runs: Iterable[Run]) -> pandas.DataFrame:
    """Return one row per run: run, state, started, and flattened parameters and metrics.

    Values are texts, numbers, booleans or missing. A list is converted to its JSON text. The
    function reads no histories, so it is fast even for a thousand runs. If a parameter and a metric
    have the same name, the parameter is used.
    """
    import pandas as pd

    return pd.DataFrame([_row(run) for run in runs])


def flatten(record: Mapping[str, JSON], prefix: str = "") -> Record:
    """Flatten nested fields: `{"a": {"b": 1}, "c": [2]}` becomes `{"a.b": 1, "c": "[2]"}`."""
    flat: Record = {}
    for key, value in record.items():
        # Scalar values are tested first, because a page of a thousand runs contains a million of
        # them.
        if value is None or isinstance(value, str | int | float):
            flat[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value)
    return flat


def key_metrics(run: Run) -> Record:
    """Return a dict of the metrics of a run that are shown in tables of runs."""
    metrics, hidden = run.metrics, SPEED_METRICS if equivalence_failed(run) else ()
    shown_metrics: Record = {}
    for name in (*KEY_METRICS, *logged_names(run)):
        outer, _, inner = name.partition(".")
        value = metrics.get(name)
        if value is None and inner and isinstance(metrics.get(outer), dict):
            value = metrics[outer].get(inner)
        if value is not None and name not in hidden:
            shown_metrics[name] = value
    return shown_metrics


def logged_names(run: Run) -> list[str]:
    """Return the names of results that the user logged with `lk.log`, except labkit's metrics."""
    names = run.metrics.get("logged") or []
    return [
        name for name in names if name not in ("accuracy", "val_accuracy", "val_loss", *KEY_METRICS)
    ]


def logged_results(run: Run) -> Record:
    """Return a dict of numbers that the user logged with `lk.log`, except the training loss."""
    results = {name: run.metrics.get(name) for name in logged_names(run) if name != "loss"}
    return {name: value for name, value in results.items() if is_number(value)}


SPEED_METRICS = {"samples_per_second", "step_ms.median", "train_seconds"}


def equivalence_failed(run: Run) -> bool:
    """Return True if the equivalence check failed; labkit then shows no speed of this run."""
    return bool((run.metrics.get("equivalence") or {}).get("verdict") == "failed")


def verdict(run: Run) -> str:
    """Return the equivalence verdict as short text: "passed (max |Δ| 3.1e-16)", "not run" …"""
    equivalence = run.metrics.get("equivalence")
    if not equivalence:
        return "not run"
    difference = equivalence.get("max_abs_difference")
    if difference is not None:
        place = equivalence.get("place") or {}
        where = (
            f", {place['operation']} of {place['layer']}"
            if {"operation", "layer"} <= place.keys()
            else ""
        )
        return f"{equivalence['verdict']} (max |Δ| {difference:.2g}{where})"
    reason = equivalence.get("reason")
    return f"{equivalence['verdict']} ({reason})" if reason else str(equivalence["verdict"])


def _row(run: Run) -> Record:
    status = run.status
    head = {"run": run.name, "state": status["state"], "started": status.get("started")}
    excluded = ("epochs", "memory", "spread", "clocks")
    metrics = {k: v for k, v in run.metrics.items() if k not in excluded}
    for key, (least, most) in run.metrics.get("spread", {}).items():
        metrics |= {f"spread.{key}.min": least, f"spread.{key}.max": most}
    return flatten(metrics) | flatten(run.experiment) | head


def _matching_folders(root: Path) -> list[Path]:
    """Return the folders that match a path or pattern, or the path itself if none matches."""
    for start in (Path(), store.runs_folder().parent):
        # A missing path without wildcards is returned unchanged, so that the error message names
        # the path.
        if glob.has_magic(str(root)):
            matches = [Path(match) for match in sorted(glob.glob(str(start / root)))]
        else:
            matches = [start / root] if os.path.exists(start / root) else []
        if matches:
            return matches
    return [root]


def _without_schema(record: Record) -> Record:
    return {key: value for key, value in record.items() if key != "schema"}


def metric_text(value: JSON) -> str:
    """Return the value of a metric as text for display."""
    return number_text(value) if isinstance(value, float) else str(value)


def _losses(epochs: list[Record]) -> str:
    """Return an HTML curve of the held-out loss, or of the training loss if there is none."""
    for name, words in (("val_loss", "held-out loss"), ("loss", "loss")):
        values = [epoch[name] for epoch in epochs if epoch.get(name) is not None]
        if len(values) > 1:
            caption = (
                f"{words} after each of {len(values)} epochs: {values[0]:.4g} to {values[-1]:.4g}"
            )
            return curve(values, caption)
    return ""
