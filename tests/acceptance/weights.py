"""Hash trained weights, to check that a change of the code changes no result."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

import labkit as lk
from labkit.bench.command import AS_JSON, show_rows
from labkit.bench.timing import Row
from labkit.common.errors import LabkitError
from labkit.compression import COMPRESSORS
from labkit.schedules import ALLREDUCE, PIPELINE

RANKS = 4
SHORT: dict[str, Any] = {"workers": 2, "steps_per_epoch": 6, "batch_size": 64, "verify": False}
MLP: dict[str, Any] = {"model": "mlp", "model_options": {"widths": [24, 24, 24]}}
CHARACTERS: dict[str, Any] = {
    "model": "rnn",
    "model_options": {},
    "dataset": "shakespeare",
    "batch_size": 16,
}
CLOCK: dict[str, Any] = {"virtual": lk.VirtualClock(compute_time=[0.01, 0.02, 0.04])}
VIRTUAL: dict[str, Any] = {"network": "1GbE", "workers": 3, **CLOCK}

Case = tuple[str, dict[str, Any]]


def cases() -> list[Case]:
    """Return name and fields of each experiment whose result is reproducible bit for bit."""
    return [*_synchronous(), *_split(), *_programs()]


def _synchronous() -> Iterator[Case]:
    for algorithm in ("mpi", "shared_memory", *ALLREDUCE):
        yield (
            f"allreduce {algorithm}",
            {"strategy": lk.AllReduce(algorithm=algorithm), "workers": 4},
        )
    for schedule in ("overlap", "priority", "staggered"):
        strategy = lk.AllReduce(algorithm="ring", schedule=schedule, bucket_bytes=4096)
        yield f"allreduce {schedule}", {"strategy": strategy, "network": "1GbE"}
    for name in COMPRESSORS:
        if name in ("ErrorFeedback", "Chain"):
            continue
        compressor = {"name": name} | ({"value": 0.01} if name == "Threshold" else {})
        yield (
            f"compressor {name}",
            {"strategy": lk.AllReduce(algorithm="mpi", compressor=compressor)},
        )
    feedback = lk.ErrorFeedback(inner=lk.TopK(ratio=0.1))
    chain = lk.Chain(first=lk.TopK(ratio=0.1), second=lk.Float16())
    for name, wrapped in (("feedback", feedback), ("chain", chain)):
        yield (
            f"compressor {name}",
            {"strategy": lk.AllReduce(algorithm="mpi", compressor=wrapped)},
        )
    for optimizer in ("adam", "rmsprop", "adagrad", "lion"):
        yield (
            f"optimizer {optimizer}",
            {"strategy": lk.AllReduce(algorithm="mpi"), "optimizer": optimizer},
        )
    for precision in ("float64", "mixed_float16", "mixed_bfloat16"):
        yield (
            f"precision {precision}",
            {"strategy": lk.AllReduce(algorithm="mpi"), "precision": precision},
        )
    yield "scatter", {"strategy": lk.AllReduce(algorithm="mpi"), "input_mode": "scatter"}
    yield "weighted", {"strategy": lk.AllReduce(algorithm="mpi"), "batch_weights": (3, 1)}
    yield "averaging", {"strategy": lk.ParameterAveraging(period=2, algorithm="ring")}
    yield (
        "averaging outer",
        {"strategy": lk.ParameterAveraging(period=2, algorithm="ring", outer_optimizer="nesterov")},
    )
    yield "elastic", {"strategy": lk.ElasticAveraging(period=2, center="allreduce")}
    yield "gossip", {"strategy": lk.Gossip()}
    yield "codistillation", {"strategy": lk.Codistillation(period=2)}
    yield "block coordinate", {"strategy": lk.BlockCoordinateDescent(algorithm="ring")}
    yield "servers", {"strategy": lk.ParameterServer(servers=2)}
    yield "servers one-sided", {"strategy": lk.ParameterServer(transport="one_sided")}


def _split() -> Iterator[Case]:
    for schedule in PIPELINE:
        if schedule in ("layerwise", "wavefront"):
            continue
        virtual = 2 if schedule == "interleaved" else 1
        strategy = lk.Pipeline(schedule=schedule, microbatches=4, virtual_stages_per_rank=virtual)
        yield f"pipeline {schedule}", {"strategy": strategy}
    yield (
        "pipeline wavefront",
        {"strategy": lk.Pipeline(schedule="wavefront", microbatches=3), **CHARACTERS},
    )
    yield "pipeline replicas", {"strategy": lk.Pipeline(microbatches=2, stages=2), "workers": 4}
    yield (
        "pipeline slices",
        {"strategy": lk.Pipeline(microbatches=2, tensor_parallel_size=2), "workers": 4},
    )
    yield "layerwise", {"strategy": lk.Layerwise()}
    yield "delayed", {"strategy": lk.DelayedGradients()}
    yield "tensor", {"strategy": lk.TensorParallel(algorithm="ring")}
    yield "spatial", {"strategy": lk.SpatialParallel(), "model": "cnn", "model_options": {}}


def _programs() -> Iterator[Case]:
    strategies: dict[str, lk.strategies.Strategy] = {
        "allreduce": lk.AllReduce(algorithm="ring"),
        "servers": lk.ParameterServer(servers=2),
        "servers asynchronous": lk.ParameterServer(synchronous=False),
        "servers backup": lk.ParameterServer(backup_workers=1),
        "servers compressed": lk.ParameterServer(synchronous=False, compressor=lk.Float16()),
        "servers of stages": lk.ParameterServer(synchronous=False, stages=2),
        "stale": lk.StaleSynchronous(staleness=2),
        "stale compensated": lk.StaleSynchronous(
            staleness=2, staleness_correction="delay_compensated"
        ),
        "softsync": lk.SoftSync(n=2),
        "downpour": lk.Downpour(),
        "averaging": lk.ParameterAveraging(period=2, algorithm="ring"),
        "averaging streamed": lk.ParameterAveraging(period=4, fragments=2, overlap_steps=1),
        "diloco": lk.AsynchronousDiLoCo(period=2),
        "elastic": lk.ElasticAveraging(period=2),
        "gossip": lk.Gossip(),
        "gossip asynchronous": lk.Gossip(asynchronous=True),
    }
    for name, strategy in strategies.items():
        yield f"virtual {name}", {"strategy": strategy, **VIRTUAL}


def digest(run: lk.Run) -> str:
    """Return the SHA-256 hash of a run's trained weights and losses."""
    weights = run.model().get_weights()
    history = run.history[["epoch", "step", "rank", "loss"]].to_numpy()
    return hashlib.sha256(b"".join(array.tobytes() for array in [*weights, history])).hexdigest()


def measure(only: str) -> Iterator[Row]:
    """Train each case; yield a row with its hash, or with the error that refused it."""
    chosen = [case for case in cases() if only in case[0]]
    with TemporaryDirectory() as folder, lk.Cluster(workers=RANKS) as cluster:
        os.environ["LABKIT_RUNS"] = folder
        for name, fields in chosen:
            row: Row = {"bench": "weights", "case": name}
            try:
                run = cluster.run(lk.Experiment(**SHORT | MLP | fields), show=False)
                row["hash"] = digest(run)
            except LabkitError as error:
                row["error"] = str(error).splitlines()[0]
            yield row


@click.command()
@click.option("--only", default="", help="Only cases whose name contains this text.")
@AS_JSON
def command(only: str, file: Path | None) -> None:
    """Train short, reproducible experiments of all strategies; print hashes of their weights."""
    show_rows([*measure(only)], {"case": "case", "hash": "hash", "error": "error"}, file)
