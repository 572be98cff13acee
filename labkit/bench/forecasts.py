"""Forecasts held against what was measured: settings and forecasts are written down first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from labkit.bench.calibrating.measure import calibrate
from labkit.bench.faults.claims import own_runs
from labkit.bench.timing import Row, head
from labkit.cluster import Cluster
from labkit.common.errors import LabkitError
from labkit.compression import COMPRESSORS, ErrorFeedback, TopK
from labkit.experiment import Experiment
from labkit.forecast import Calibration
from labkit.network import Network
from labkit.records.measure import WARM_UP
from labkit.records.pace import in_order
from labkit.records.run import Run
from labkit.strategies import (
    AllReduce,
    ParameterAveraging,
    ParameterServer,
    Pipeline,
    Strategy,
)

WORKERS = 2
PERIOD = 4  # steps from one meeting to the next
MODELS = {"small": ([128, 128], 48), "large": ([512, 512], 96)}  # widths, rows of a global batch
NETWORKS = (
    Network.named("10GbE"),
    Network(name="500Mb", latency=100e-6, bandwidth=500e6 / 8),
    Network(name="250Mb", latency=200e-6, bandwidth=250e6 / 8),
    Network(name="100Mb, 1 ms", latency=1e-3, bandwidth=100e6 / 8),
)
WAYS: dict[str, Strategy] = {
    "ring": AllReduce(algorithm="ring"),
    "ring, overlap": AllReduce(algorithm="ring", schedule="overlap"),
    "float16": AllReduce(algorithm="ring", compressor=COMPRESSORS["Float16"]()),
    "1 bit": AllReduce(algorithm="ring", compressor=COMPRESSORS["OneBit"]()),
    "top-k": AllReduce(algorithm="ring", compressor=ErrorFeedback(inner=TopK(ratio=0.01))),
    "averaging": ParameterAveraging(period=PERIOD),
    "server": ParameterServer(colocated=True),
    "pipeline": Pipeline(microbatches=4),
}
BATCHES = (8, 32, 128)  # rows that are calibrated: none of a setting's
FEATURES = 64
SECONDS = 2.5  # that a run is to train, by its forecast
STEPS = (40, 200)  # least and most of a run
LOUD = 0.10  # by which repeats may differ
NINE_TENTHS = 0.9


def base(model: str) -> Experiment:
    """What of a setting the calibration has to have measured, but for its batch."""
    widths, batch = MODELS[model]
    return Experiment(
        model="mlp",
        model_options={"widths": widths},
        dataset="synthetic",
        dataset_options={"shape": [FEATURES], "rows": batch * STEPS[1], "test_rows": batch},
        batch_size=batch,
        gate=False,
    )


def settings() -> list[tuple[str, Experiment]]:
    """Every way to train of either model on every network, and one rank alone."""
    found = [
        (f"{model}, {way}", base(model).replace(strategy=strategy, workers=WORKERS, network=each))
        for model, each, (way, strategy) in product(MODELS, NETWORKS, WAYS.items())
    ]
    return found + [(f"{model}, alone", base(model)) for model in MODELS]


def calibrated(path: Path | None, rows: Path | None) -> Calibration:
    """What a file holds; else what was measured beside these rows, or is measured now."""
    beside = rows.with_suffix(".calibration.json") if rows is not None else None
    if path is not None or (beside is not None and beside.is_file()):
        return Calibration.load(path or beside or Path())
    return calibrate(
        [base(model) for model in MODELS],
        workers=WORKERS,
        batches=BATCHES,
        compressors=[way.lossy for way in WAYS.values() if way.lossy is not None],
        keep=False,
        file=beside,
    )


def measure(repeats: int, known: Sequence[Row], calibration: Calibration) -> Iterator[Row]:
    """Forecast all settings, then run them, in turns.

    Args:
        repeats: runs of each setting; every round goes through all of them, backwards every other
            time.
        known: rows that there are already; what was forecast then, counts.
        calibration: which has not seen the settings: neither their networks nor their batches.

    Returns:
        a row "forecast" a setting, with the `seal` of what it says; then a row "measured" a run,
        which names the forecast that it is held against.

    Raises:
        LabkitError: the rows there are of another calibration, or of other settings.
    """
    rows, asked = list(known), settings()
    if not rows:
        for number, (case, experiment) in enumerate(asked):
            rows.append(_forecast(number, case, experiment, calibration))
            yield rows[-1]
    foreseen = [row for row in rows if row["what"] == "forecast"]
    if [row["asked"] for row in foreseen] != [each.hash8 for _, each in asked]:
        raise LabkitError("the file has forecasts of other settings; give a new one")
    if any(row["calibration"] != calibration.hash8 for row in foreseen):
        raise LabkitError("the file has forecasts of another calibration; give it, or a new file")
    done = {(row["number"], row["repeat"]) for row in rows if row["what"] == "measured"}
    with own_runs(), Cluster(workers=WORKERS, name="forecasts") as cluster:
        for repeat in range(repeats):
            order = foreseen if repeat % 2 == 0 else foreseen[::-1]
            for row in (row for row in order if (row["number"], repeat) not in done):
                experiment = asked[int(row["number"] or 0)][1].replace(steps=int(row["steps"] or 1))
                yield _measured(row, repeat, cluster.run(experiment, show=False))


def _forecast(number: int, case: str, experiment: Experiment, calibration: Calibration) -> Row:
    found = experiment.forecast(calibration=calibration)
    steps = int(np.clip(SECONDS / found.seconds, *STEPS))
    network = None if experiment.network is None else str(experiment.network)
    row = head("forecasts", case, "forecast", experiment.workers, network, number=number)
    row |= {"asked": experiment.hash8, "calibration": calibration.hash8, "steps": steps}
    row |= {"predicted_ms": 1e3 * found.seconds}
    row |= {f"{name}_ms": 1e3 * s for name, s in zip(("low", "high"), found.interval, strict=True)}
    row |= {f"{name}_part_ms": 1e3 * seconds for name, seconds in found.taken.parts.items()}
    return row | {"seal": seal(row)}


def _measured(forecast: Row, repeat: int, run: Run) -> Row:
    """What a global batch took."""
    row = head("forecasts", str(forecast["case"]), "measured", int(forecast["workers"] or 1))
    row |= {"network": forecast["network"], "number": forecast["number"], "repeat": repeat}
    row |= {"of": forecast["seal"], "oversubscribed": run.metrics["oversubscribed"]}
    return row | {"batch_ms": 1e3 * _batch_seconds(run)}


def _batch_seconds(run: Run) -> float:
    """The median over stretches of steps, each with one meeting of those that meet in periods."""
    ended = in_order(run.history).groupby("step")["ended"].max().to_numpy(float)[WARM_UP::PERIOD]
    return float(np.median(np.diff(ended))) / PERIOD


def seal(row: Row) -> str:
    """Sixteen hexadecimal digits of a forecast, as it was written."""
    text = json.dumps({k: v for k, v in row.items() if k != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def verify(rows: Sequence[Row]) -> list[str]:
    """What is wrong with the order of rows: a forecast that was written late, or changed."""
    kinds = [row["what"] for row in rows]
    first = kinds.index("measured") if "measured" in kinds else len(kinds)
    wrong = [
        f"forecast {row['number']} was written behind a measurement"
        for row in rows[first:]
        if row["what"] == "forecast"
    ]
    foreseen = {row["number"]: row for row in rows if row["what"] == "forecast"}
    wrong += [
        f"forecast {number} is not what was sealed"
        for number, row in foreseen.items()
        if row["seal"] != seal(row)
    ]
    return wrong + [
        f"measurement {row['number']} is held against another forecast"
        for row in rows
        if row["what"] == "measured"
        and (row["number"] not in foreseen or row["of"] != foreseen[row["number"]]["seal"])
    ]


def compared(rows: Sequence[Row]) -> list[Row]:
    """A row a setting: predicted, measured (the median of its runs), error, and whether it counts.

    `error` is predicted / measured - 1. Settings whose ranks share cores, or whose runs differ by
    more than 10 %, stand apart: `group` says so. `held` is the share of runs in the interval.
    """
    found = []
    for row in (row for row in rows if row["what"] == "forecast"):
        own = [r for r in rows if r["what"] == "measured" and r["number"] == row["number"]]
        if not own:
            continue
        times = np.array([each["batch_ms"] for each in own], float)
        median, low, high = float(np.median(times)), float(times.min()), float(times.max())
        group = "calm"
        if any(each["oversubscribed"] for each in own):
            group = "oversubscribed"
        elif high / low - 1 > LOUD:
            group = "unsteady"
        predicted = float(row["predicted_ms"] or 0)
        inside = (float(row["low_ms"] or 0) <= times) & (times <= float(row["high_ms"] or 0))
        found.append(
            {name: row[name] for name in ("case", "network", "workers", "number")}
            | {name: row[name] for name in ("predicted_ms", "low_ms", "high_ms")}
            | {"measured_ms": median, "least_ms": low, "most_ms": high}
            | {"error": predicted / median - 1, "held": float(inside.mean()), "group": group}
        )
    return found


def summary(rows: Sequence[Row]) -> list[Row]:
    """A row a group: settings, median and 90th percentile of |error|, share held, the bias."""
    table = compared(rows)
    found: list[Row] = []
    for group in dict.fromkeys(str(row["group"]) for row in table):
        own = [row for row in table if row["group"] == group]
        error = np.array([row["error"] for row in own], float)
        found.append(
            {
                "group": group,
                "settings": len(own),
                "error_median": float(np.median(np.abs(error))),
                "error_p90": float(np.quantile(np.abs(error), NINE_TENTHS)),
                "error_bias": float(np.median(error)),
                "held": float(np.mean([float(row["held"] or 0) for row in own])),
            }
        )
    return found


def worst(rows: Sequence[Row], count: int = 5) -> list[Row]:
    """The settings with the largest |error| of those that count."""
    calm = [row for row in compared(rows) if row["group"] == "calm"]
    return sorted(calm, key=lambda row: -abs(float(row["error"] or 0)))[:count]
