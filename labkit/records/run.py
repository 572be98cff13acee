"""A finished (or failed, or still running) run, read from its directory when asked."""

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
from labkit.common.html import card, curve, folded, pairs, preformatted
from labkit.common.safe_files import open_file
from labkit.common.units import number_text
from labkit.records import store
from labkit.records.scan import Found, find_runs
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


@dataclass(frozen=True)
class Run:
    """One run: parameters, metrics, history, environment, trained model, the gate's verdict."""

    path: Path

    @property
    def name(self) -> str:
        """The directory's name: `<label>-<hash8>`, with -2, -3 … for later runs of the same."""
        given = self.path.name  # none, where the run is the folder that one stands in
        return given if given not in ("", "..") else self.path.resolve().name

    @cached_property
    def experiment(self) -> Record:
        """The parameters: the experiment's fields as they were, without the schema version."""
        return _without_schema(store.read_json(self.path / "experiment.json"))

    @property
    def status(self) -> Record:
        """state, started, ended, cause, rank …, as they are now."""
        return self.__dict__.get("_final") or store.read_status(self.path)

    @property
    def metrics(self) -> Record:
        """The results; empty unless the run completed."""
        # Written once, when the ranks have ended: what is there is kept, what is not may yet come.
        known = "_metrics" in self.__dict__ or (self.path / "metrics.json").exists()
        return self._metrics if known else {}

    @cached_property
    def _metrics(self) -> Record:
        return _without_schema(store.read_json(self.path / "metrics.json"))

    @property
    def history(self) -> pandas.DataFrame:
        """One row a step and rank (store.HISTORY_COLUMNS); no rows before the run completed."""
        if (self.path / "history.parquet").exists():
            return self._history
        return store.empty_table(store.HISTORY_COLUMNS)

    @cached_property
    def _history(self) -> pandas.DataFrame:
        return store.read_table(self.path / "history.parquet", store.HISTORY_COLUMNS)

    @cached_property
    def timeline(self) -> pandas.DataFrame:
        """What each rank did when: rank, kind, step, bucket, start, stop (s); empty without ranks.

        Kinds as in `labkit.exchange.Timeline`; the clock starts with the first event.
        """
        return self._table("timeline")

    @cached_property
    def microscope(self) -> pandas.DataFrame:
        """What compression did to each gradient: step, rank, bucket, layer, relative_error, cosine,
        residual_norm, bits_per_parameter, fraction_sent; empty without `microscope`.
        """
        return self._table("microscope")

    @cached_property
    def interleaving(self) -> pandas.DataFrame:
        """What servers did with each gradient: server, update (its number there; -1: dropped),
        worker, step, version (of the weights that it is of), staleness, rows, sent, delivered,
        applied (s of the run's clock); empty without servers.
        """
        return self._table("interleaving")

    @cached_property
    def layers(self) -> pandas.DataFrame:
        """How each layer of a model in slices was cut: rank, layer, slices (outputs, inputs, heads,
        words, …), why (a layer is whole), forward_bytes, forward_wire_bytes, backward_bytes,
        backward_wire_bytes (a step), weights_bytes (held by the rank), whole_weights_bytes.
        """
        return self._table("layers")

    def _table(self, name: str) -> pandas.DataFrame:
        """What ranks wrote beside the history; no rows where there was nothing to write."""
        path, kinds = self.path / f"{name}.parquet", TABLES[name]
        return store.read_table(path, kinds) if path.exists() else store.empty_table(kinds)

    @property
    def memory(self) -> pandas.DataFrame:
        """The most bytes that each rank keeps: rank, kind, measured, predicted.

        Kinds: weights, gradients, optimizer, activations (between forward and backward), versions
        (old weights that a backward pass still needs). Counted as `stages.Ledger` says;
        predicted from shapes and schedule. Missing where a run did not look.
        """
        import pandas as pd

        rows = [
            {"rank": part["rank"], "kind": kind}
            | {name: part[name].get(kind) for name in ("measured", "predicted")}
            for part in self.metrics.get("memory", [])
            for kind in part["predicted"]
        ]
        return pd.DataFrame(rows, columns=["rank", "kind", "measured", "predicted"])

    def export_trace(self, path: Path | str, beside: Iterable[Record] = ()) -> Path:
        """Write the timeline as a Chrome trace, which chrome://tracing and Perfetto open.

        Args:
            path: of the file.
            beside: further rows, such as `labkit.records.staged_steps.predicted_rows(run)`.

        Raises: LabkitError, where the run has no timeline.
        """
        from labkit.records.export.chrome_trace import chrome_trace

        if self.timeline.empty:
            where = "; its seeds have one each" if self.seeds else ""
            raise LabkitError(
                f"{self.name} has no timeline (state: {self.status['state']}); a completed run on "
                f"two or more workers that exchange gradients has one{where}"
            )
        rows = [*self.timeline.to_dict("records"), *beside]
        trace = chrome_trace(rows, self.metrics.get("clocks") or [])
        return store.write_atomically(Path(path), json.dumps(trace))

    @cached_property
    def environment(self) -> Record:
        """Versions and hardware; empty where none was recorded, or, with a warning, are odd."""
        path = self.path / "environment.json"  # a run that failed early has none
        try:
            return _without_schema(store.read_json(path)) if path.exists() else {}
        except LabkitError as error:
            warnings.warn(f"{error}; its run is shown without it", stacklevel=2)
            return {}

    @property
    def seeds(self) -> list[Run]:
        """The repeats of this run, one a seed, in order; empty for a run without repeats."""
        inside = [path for path in self.path.iterdir() if not path.is_symlink()]
        numbered = ((re.fullmatch(r"seed(\d+)", path.name), path) for path in inside)
        # By number: as text seed10 stands before seed2.
        found = sorted((int(match[1]), path) for match, path in numbered if match)
        return [Run(path) for _, path in found]

    @property
    def model_file(self) -> Path:
        """The trained model, as Keras saves it (of the first seed, where there are several).

        Raises: LabkitError, where the run has none.
        """
        # A run with repeats has no model of its own.
        places = [self.path, *(seed.path for seed in self.seeds)]
        files = [place / "model.keras" for place in places if (place / "model.keras").exists()]
        if not files:
            raise LabkitError(
                f"{self.name} has no model.keras (state: {self.status['state']}); only a completed "
                "run of a model that Keras can save has one"
            )
        os.close(open_file(files[0]))  # refuses a link, and a pipe, which Keras would wait for
        return files[0]

    def model(self) -> keras.Model:
        """The trained keras.Model, read in Keras's safe mode; imports Keras.

        Raises: LabkitError, the file holds code, such as a Lambda layer, or unknown classes.
        """
        from labkit.keras.safe_mode import load_model

        return load_model(self.model_file)

    def _repr_html_(self) -> str:
        status = self.status
        cause = f" · {status['cause']}" if status.get("cause") else ""
        facts = {"state": f"{status['state']}{cause}", "verdict": verdict(self)}
        figures = {name: shown(value) for name, value in key_metrics(self).items()}
        parameters = json.dumps(self.experiment, indent=1, ensure_ascii=False)
        return card(
            self.name,
            pairs(facts | figures),
            _losses(self.metrics.get("epochs") or []),
            folded("parameters", preformatted(parameters)),
        )


def load_runs(root: Path | str | Iterable[Path | str] = "runs") -> list[Run]:
    """All usable runs below a folder (or several), oldest first; warns about each unusable one.

    A pattern such as `runs/tour/00*` stands for all the folders that it matches. What is not in
    this folder is looked for beside the folder of all runs (`LABKIT_RUNS`).

    Raises: LabkitError, where there is no such folder.
    """
    roots = [root] if isinstance(root, str | Path) else list(root)
    places = [place for each in roots for place in _places(Path(each))]
    # Once each, though folders may lie in each other; by path, where runs started at one moment.
    found = {run.path: run for place in places for run in find_runs(place)}
    order = sorted(found.values(), key=lambda each: (each.status.get("started") or "", each.path))
    return [known(each) for each in order]


def known(found: Found) -> Run:
    """The run of records that have been read: those that are final are not read again."""
    run = Run(found.path)
    run.__dict__["experiment"] = _without_schema(found.experiment)
    if found.metrics is not None:
        run.__dict__["_metrics"] = _without_schema(found.metrics)
    if found.status["state"] == "completed":
        run.__dict__["_final"] = found.status
    return run


def frame(runs: Iterable[Run]) -> pandas.DataFrame:
    """One row a run: run, state, started, the parameters and metrics flattened (`step_ms.median`).

    Values are text, numbers, booleans or missing; a list is its JSON text. Reads no history, so
    that a thousand runs take a moment. Where a metric repeats a parameter, the parameter stands.
    """
    import pandas as pd

    return pd.DataFrame([_row(run) for run in runs])


def flatten(record: Mapping[str, JSON], prefix: str = "") -> Record:
    """`{"a": {"b": 1}, "c": [2]}` as `{"a.b": 1, "c": "[2]"}`."""
    flat: Record = {}
    for key, value in record.items():
        # The most frequent first: a page of a thousand runs asks this of a million values.
        if value is None or isinstance(value, str | int | float):
            flat[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value)
    return flat


def key_metrics(run: Run) -> Record:
    """The few metrics that a table shows; those that the run does not have are left out."""
    metrics, hidden = run.metrics, SPEED_METRICS if gate_failed(run) else ()
    found: Record = {}
    # In the order of KEY_METRICS, whatever the record's is; nothing else of it is looked at.
    for name in (*KEY_METRICS, *logged(run)):
        outer, _, inner = name.partition(".")
        value = metrics.get(name)
        if value is None and inner and isinstance(metrics.get(outer), dict):
            value = metrics[outer].get(inner)
        if value is not None and name not in hidden:
            found[name] = value
    return found


def logged(run: Run) -> list[str]:
    """The results that `lk.log` was told under names that labkit does not know."""
    names = run.metrics.get("logged") or []
    return [
        name for name in names if name not in ("accuracy", "val_accuracy", "val_loss", *KEY_METRICS)
    ]


def own_results(run: Run) -> Record:
    """The numbers among them, by name; but for the training loss, which all runs have."""
    found = {name: run.metrics.get(name) for name in logged(run) if name != "loss"}
    return {name: value for name, value in found.items() if is_number(value)}


SPEED_METRICS = {"samples_per_second", "step_ms.median", "train_seconds"}


def gate_failed(run: Run) -> bool:
    """Whether the equivalence gate failed: then no speed of this run is shown."""
    return bool((run.metrics.get("equivalence") or {}).get("verdict") == "failed")


def verdict(run: Run) -> str:
    """The equivalence gate in a few words: "passed (max |Δ| 3.1e-16)", "not run" …"""
    gate = run.metrics.get("equivalence")
    if not gate:
        return "not run"
    difference = gate.get("max_abs_difference")
    if difference is not None:
        place = gate.get("place") or {}
        where = (
            f", {place['operation']} of {place['layer']}"
            if {"operation", "layer"} <= place.keys()
            else ""
        )
        return f"{gate['verdict']} (max |Δ| {difference:.2g}{where})"
    reason = gate.get("reason")
    return f"{gate['verdict']} ({reason})" if reason else str(gate["verdict"])


def _row(run: Run) -> Record:
    status = run.status
    head = {"run": run.name, "state": status["state"], "started": status.get("started")}
    apart = ("epochs", "memory", "spread", "clocks")
    metrics = {k: v for k, v in run.metrics.items() if k not in apart}
    for key, (least, most) in run.metrics.get("spread", {}).items():
        metrics |= {f"spread.{key}.min": least, f"spread.{key}.max": most}
    return flatten(metrics) | flatten(run.experiment) | head


def _places(root: Path) -> list[Path]:
    """The folders that a path or pattern means; the path itself, where it means none."""
    everywhere = os.environ.get("LABKIT_RUNS")
    for start in (Path(), *([Path(everywhere).parent] if everywhere else [])):
        # Only then: a folder whose name has no such signs is named in the error if it is not there.
        if glob.has_magic(str(root)):
            found = [Path(match) for match in sorted(glob.glob(str(start / root)))]
        else:
            found = [start / root] if os.path.exists(start / root) else []
        if found:
            return found
    return [root]


def _without_schema(record: Record) -> Record:
    return {key: value for key, value in record.items() if key != "schema"}


def shown(value: JSON) -> str:
    """A metric for the eye."""
    return number_text(value) if isinstance(value, float) else str(value)


def _losses(epochs: list[Record]) -> str:
    """The curve of the held-out loss, or of the training's where nothing was held out."""
    for name, words in (("val_loss", "held-out loss"), ("loss", "loss")):
        values = [epoch[name] for epoch in epochs if epoch.get(name) is not None]
        if len(values) > 1:
            said = (
                f"{words} after each of {len(values)} epochs: {values[0]:.4g} to {values[-1]:.4g}"
            )
            return curve(values, said)
    return ""
