"""Measure how much time fault tolerance costs if no rank dies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from labkit.bench.runs import temporary_runs
from labkit.bench.timing import Row, head
from labkit.cluster import Cluster
from labkit.experiment import Experiment
from labkit.strategies import AllReduce

WORKERS = 2
WIDTHS = {"small": [64, 32], "large": [1024, 1024]}
STEPS = 300


def measure(repeats: int, known: Sequence[Row]) -> Iterator[Row]:
    """Train alternately on fault-tolerant engines and on engines without fault tolerance.

    Args:
        repeats: Number of pairs of runs; in every second pair the order is reversed.
        known: Rows of earlier runs of the campaign.

    Returns: One row per model: the median step time without fault tolerance, and the relative
        increase with it. The column `share` is the median increase over all pairs, with minimum and
        maximum. The column `quiet_share` compares the lower quartiles of both kinds of runs, which
        slow periods of the machine hardly affect.
    """
    done = {row["case"] for row in known if row["what"] == "cost"}
    cases = [case for case in WIDTHS if case not in done]
    if not cases:
        return
    with (
        temporary_runs(),
        Cluster(workers=WORKERS, name="plain-cost") as plain,
        Cluster(workers=WORKERS, name="tolerant-cost", fault_tolerant=True) as tolerant,
    ):
        for case in cases:
            pairs = np.array([_pair(plain, tolerant, case, k) for k in range(repeats + 1)][1:])
            share = pairs[:, 1] / pairs[:, 0] - 1
            row = head("faults", case, "cost", WORKERS, None, repeats=repeats)
            row |= {"median_ms": float(np.median(pairs[:, 0]))}
            row |= {"tolerant_ms": float(np.median(pairs[:, 1]))}
            row |= {"share": float(np.median(share)), "share_min": float(share.min())}
            quiet = np.quantile(pairs, 0.25, axis=0)
            row |= {"share_max": float(share.max()), "quiet_share": float(quiet[1] / quiet[0] - 1)}
            yield row


def _pair(plain: Cluster, tolerant: Cluster, case: str, number: int) -> tuple[float, float]:
    """Return the median step time (ms) without and with fault tolerance; their order alternates."""
    asked = Experiment(
        model_options={"widths": WIDTHS[case]},
        dataset="synthetic",
        strategy=AllReduce(),
        batch_size=64,
        steps_per_epoch=STEPS,
        workers=WORKERS,
        verify=False,
    )
    order = (plain, tolerant) if number % 2 else (tolerant, plain)
    found = {each.name: each.run(asked, show=False).metrics["step_ms"]["median"] for each in order}
    return found[plain.name], found[tolerant.name]
