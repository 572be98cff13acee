"""Inject faults at random places, and check that the error message names the place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from labkit.bench.runs import temporary_runs
from labkit.bench.timing import Row, head
from labkit.cluster import Cluster, RankError
from labkit.cluster.calls import Refused
from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator import ALGORITHMS
from labkit.exchange.autotune import SCHEDULES
from labkit.experiment import Experiment
from labkit.network import Fault
from labkit.records.run import Run
from labkit.strategies import STRATEGIES, AllReduce, Strategy
from tests.acceptance.faults.claims import LOSSY, named

WORKERS, BESIDE = 3, 1
STEPS = 5
LAYERS = ("dense", "dense_1", "dense_2")
KINDS = ("nan", "inf", "corrupt", "nan", "drop", "inf", "corrupt", "nan", "inf", "kill")
SENT = ("corrupt", "drop")
LIMIT = 20.0  # timeout of a wait for a message, seconds
TRIES = 500  # maximum number of draws to find a possible fault


def measure(repeats: int, known: Sequence[Row]) -> Iterator[Row]:
    """Inject one fault per run; the faults include every kind that labkit detects at once.

    The strategy, the clock, the rank, the training step and the layer are random. Another draw
    replaces an invalid experiment, and a fault whose rank did not reach the step or sent no message
    in it.

    Args:
        repeats: faults.
        known: Rows of earlier runs of the campaign.

    Returns: One row per fault: the fault, the error message (`said`), and whether the message names
        the place of the fault (`found`). For a nonfinite number, the place is step, layer and rank;
        for a flipped or lost message, its sender or the waiting calls; for a kill, the rank.
    """
    done = {row["number"] for row in known if row["what"] == "planted"}
    if wanted := [number for number in range(repeats) if number not in done]:
        with (
            temporary_runs(),
            Cluster(workers=WORKERS + BESIDE, name="planted-faults", timeout=LIMIT) as cluster,
        ):
            for number in wanted:
                yield one(cluster, number)


def one(cluster: Cluster, number: int) -> Row:
    """Run random experiments with a fault until one reaches the fault; return its row."""
    draw, kind = np.random.default_rng([number, 11]), KINDS[number % len(KINDS)]
    strategies = _strategies()
    for _ in range(TRIES):
        strategy, clock = strategies[draw.integers(len(strategies))]
        whole = strategy.parallelism[0] == "data"  # otherwise a rank holds only some of the layers
        fault: dict[str, Any] = {
            "rank": int(draw.integers(WORKERS)),
            "step": int(draw.integers(STEPS)),
        }
        if kind in ("nan", "inf") and whole:
            fault["layer"] = LAYERS[draw.integers(len(LAYERS))]
        try:
            asked = _experiment(strategy, clock, Fault(kind=kind, **fault))
            if asked.ranks > cluster.workers:
                continue
            ended = _ended(cluster, asked)
        except InvalidInput:
            continue
        if isinstance(ended, Run) and _never_was(ended, asked.faults[0]):
            continue
        said, rank = ("", None) if isinstance(ended, Run) else (str(ended), ended.rank)
        found = _found(asked.faults[0], said, rank)
        row = head("faults", named(strategy), "planted", WORKERS, None, number=number)
        told: dict[str, Any] = {"layer": None, **fault}
        return row | {"clock": clock, "kind": kind, **told, "found": found, "said": said[:300]}
    raise LabkitError(f"nothing that was drawn takes a fault of kind {kind!r}")


def _strategies() -> list[tuple[Strategy, str]]:
    """Return some variants of `AllReduce`, and all other strategies, on both clocks."""
    ways = [AllReduce(algorithm=name, compressor=LOSSY[k % 3]) for k, name in enumerate(ALGORITHMS)]
    ways += [AllReduce(schedule=name) for name in SCHEDULES]
    others = [kind() for kind in STRATEGIES.values() if kind is not AllReduce]
    return [(each, clock) for each in (*ways, *others) for clock in ("wall", "virtual")]


def _experiment(strategy: Strategy, clock: str, fault: Fault) -> Experiment:
    sent = fault.kind in SENT
    return Experiment(
        dataset="digits",
        dataset_options={"rows": 20 * STEPS, "test_rows": 10},
        model_options={"widths": [6, 6]},
        batch_size=20,
        workers=WORKERS,
        strategy=strategy,
        clock=clock,
        virtual={"compute_time": 0.01} if clock == "virtual" else None,
        faults=fault,
        on_nonfinite=None if sent else "stop",
        checksums=sent,
        verify=False,
    )


def _found(fault: Fault, said: str, rank: int | None) -> bool:
    """Return whether an error message names the place of a fault."""
    if fault.kind == "kill":
        return rank == fault.rank
    if fault.kind in SENT:
        return f"from rank {fault.rank} to rank " in said
    layer = repr(fault.layer) if fault.layer else ""
    place = f"step {fault.step}: the gradient of layer {layer}"
    return place in said and f" on rank {fault.rank} is not finite" in said


def _ended(cluster: Cluster, asked: Experiment) -> Run | RankError:
    """Return the run of an experiment, or the error that ends it. Raises: InvalidInput."""
    try:
        return cluster.run(asked, show=False)
    except Refused:
        raise
    except RankError as error:
        return error


def _never_was(run: Run, fault: Fault) -> bool:
    """Return whether the rank did not reach the fault's step, or sent no message in it."""
    history = run.history
    own = history[(history["rank"] == fault.rank) & (history["step"] == fault.step)]
    return own.empty or (fault.kind in SENT and not own["payload_bytes"].sum())
