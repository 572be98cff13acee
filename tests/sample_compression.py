"""Runs with and without a compressor, with the costs and accuracies that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sample_runs import ENVIRONMENT, experiment, metrics

from labkit.records import store
from labkit.records.run import Run
from labkit.records.run_metrics import aggregate

STEPS, EPOCHS = 20, 3  # steps per epoch
TOP_K = {"name": "TopK", "ratio": 0.01}


def strategy(compressor: dict[str, Any] | None = None, algorithm: str = "ring") -> dict[str, Any]:
    """AllReduce's record."""
    return {"name": "AllReduce", "algorithm": algorithm, "compressor": compressor}


def columns(
    workers: int, seed: int, milliseconds: dict[str, float], counts: dict[str, int]
) -> dict[str, Any]:
    """Return a history in which every step of every rank costs the same."""
    step, rank = (grid.ravel() for grid in np.mgrid[0 : EPOCHS * STEPS, 0:workers])
    ones = np.ones(step.size)
    spent = {name: ones * value / 1e3 for name, value in milliseconds.items()}
    found: dict[str, Any] = {
        "seed": np.full(step.size, seed),
        "epoch": step // STEPS,
        "step": step,
        "rank": rank,
        "loss": 2.0 * np.exp(-step / 25.0),
        "seconds": ones * sum(milliseconds.values()) / 1e3,
        "compute_seconds": spent["compute"],
        "communicate_seconds": spent["wire"],
        "wait_seconds": spent["wait"],
        "payload_bytes": np.full(step.size, counts["payload"]),
        "wire_bytes": np.full(step.size, counts["sent"]),
        "messages": np.full(step.size, counts["messages"]),
        "samples": np.full(step.size, 256 // workers),
    }
    return found | ({"codec_seconds": spent["codec"]} if "codec" in spent else {})


def write_method(
    root: Path,
    accuracies: Sequence[float] = (0.9,),
    *,
    compute: float = 3.0,
    codec: float | None = None,
    wire: float = 2.0,
    wait: float = 0.0,
    payload: int = 40_000,
    sent: int | None = None,
    messages: int = 2,
    compressor: dict[str, Any] | None = None,
    algorithm: str = "ring",
    measured: dict[str, Any] | None = None,
    **parameters: Any,
) -> Run:
    """Write a completed run with a seed per accuracy, and the times (ms) and bytes of each rank."""
    fields = experiment(
        strategy=strategy(compressor, algorithm), repeats=len(accuracies), epochs=EPOCHS
    )
    fields |= parameters
    workers = fields["workers"]
    milliseconds = {"compute": compute, "wire": wire, "wait": wait}
    milliseconds |= {} if codec is None else {"codec": codec}
    # In a ring allreduce, each rank sends 2(p - 1)/p of the payload.
    sent = 2 * (workers - 1) * payload // workers if sent is None else sent
    counts = {"payload": payload, "sent": sent, "messages": messages}
    top = store.new_run_directory(root, "run")
    store.start(top, fields, ENVIRONMENT)
    found = []
    for seed, accuracy in enumerate(accuracies):
        place = top if len(accuracies) == 1 else top / f"seed{seed}"
        place.mkdir(exist_ok=True)
        store.start(place, fields | {"seed": seed, "repeats": 1}, ENVIRONMENT)
        record = _record(workers, accuracy, milliseconds, counts, fields) | (measured or {})
        store.finish(place, record, columns(workers, seed, milliseconds, counts))
        found.append(Run(place))
    if len(found) > 1:
        history = pd.concat([run.history for run in found], ignore_index=True)
        store.finish(top, aggregate(found), history)
    return Run(top)


def _record(
    workers: int,
    accuracy: float,
    milliseconds: dict[str, float],
    counts: dict[str, int],
    fields: dict[str, Any],
) -> dict[str, Any]:
    step_ms = sum(milliseconds.values())
    record = metrics(workers, EPOCHS, STEPS, step_milliseconds=step_ms, first_step_ms=step_ms)
    for epoch, missing in zip(record["epochs"], (0.2, 0.1, 0.0), strict=True):
        epoch["val_accuracy"] = accuracy - missing
    return record | {
        "test_accuracy": accuracy,
        "payload_bytes_per_step": float(counts["payload"]),
        "wire_bytes_per_step": float(counts["sent"]),
        "network": fields["network"],
        "exchange": {"algorithm": fields["strategy"]["algorithm"]},
    }
