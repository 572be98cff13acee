"""Measurements of inference with replicas, stages or slices: latency, throughput and memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.common.canonical_json import JSON

if TYPE_CHECKING:
    import pandas as pd

ONE_PROCESS = "one process"
# The constant TOLERANCE is the allowed difference between predictions, in units of their
# precision's rounding error. A different order of summation changes predictions by much less than
# the tolerance. Different models change predictions by much more than the tolerance.
TOLERANCE = 256.0
KEYS = ["network", "way", "batch_size"]


@dataclass(frozen=True)
class ServingMeasurements:
    """Measurements of inference by `labkit.cluster.serve`, as tables and numbers.

    Attributes:
        times: One row per call. The columns are `network`, `way`, `batch_size`, `what`, `rows`
            (samples), and `seconds`. The column `way` names how the model is served: one process,
            replicas, stages or slices. The column `what` is "first" (first call), "batch" (one
            batch) or "stream" (stream of batches).
        weights: One row per rank and way of serving. The column weights_bytes contains the bytes of
            the rank's weights.
        differences: Largest absolute difference from the predictions of one process, with one entry
            per way of serving.
        allowed: Largest absolute difference between predictions that rounding errors can explain.
        workers, threads: Number of ranks, and number of threads per rank.
        oversubscribed: Whether all ranks together have more threads than there are CPU cores.
        under_way: Number of batches that are processed concurrently in a stream of batches.
    """

    times: pd.DataFrame
    weights: pd.DataFrame
    differences: dict[str, float]
    allowed: float
    workers: int
    threads: int
    oversubscribed: bool
    under_way: int

    def latency(self) -> pd.DataFrame:
        """Return the latency of batches in ms, one row per network, way of serving and batch size.

        The columns latency_ms, latency_ms_low and latency_ms_high contain the median, p10 and p90.
        The column first_ms contains the latency of the first call. The column of_one_process
        contains the median divided by the median of one process.
        """
        batches = self.times[self.times["what"] == "batch"]
        latencies = 1e3 * _spread(batches, "seconds", (0.5, 0.1, 0.9))
        latencies.columns = ["latency_ms", "latency_ms_low", "latency_ms_high"]
        first = self.times[self.times["what"] == "first"]
        latencies["first_ms"] = 1e3 * first.set_index(KEYS)["seconds"]
        return self._relative_to_one_process(latencies.reset_index(), "latency_ms")

    def throughput(self) -> pd.DataFrame:
        """Return the throughput in samples/s, one row per network, way of serving and batch size.

        The column rows_per_second contains the median throughput. The columns rows_per_second_low
        and rows_per_second_high contain minimum and maximum. The column of_one_process contains the
        median divided by the median of one process.
        """
        streams = self.times[self.times["what"] == "stream"]
        streams = streams.assign(rate=streams["rows"] / streams["seconds"])
        rates = _spread(streams, "rate", (0.5, 0.0, 1.0))
        name = "rows_per_second"
        rates.columns = [name, f"{name}_low", f"{name}_high"]
        return self._relative_to_one_process(rates.reset_index(), name)

    def memory(self) -> pd.DataFrame:
        """Return each rank's weight bytes for each way of serving, and the largest fraction."""
        by_rank = self.weights.pivot(index="way", columns="rank", values="weights_bytes")
        by_rank = by_rank.reindex(dict.fromkeys(self.weights["way"]))
        whole = by_rank.loc[ONE_PROCESS].max()
        by_rank.columns = [f"rank {rank}, weights_bytes" for rank in by_rank.columns]
        most = by_rank.max(axis=1)
        return by_rank.assign(most_weights_bytes=most, share=most / whole)

    def answers(self) -> pd.DataFrame:
        """Return the largest and the allowed difference from the predictions of one process."""
        import pandas as pd

        # Differences between predictions are formatted as text, because a table would round such
        # small numbers to 0.
        rows = [
            (way, f"{difference:.1e}", f"{self.allowed:.1e}")
            for way, difference in self.differences.items()
        ]
        return pd.DataFrame(rows, columns=["way", "largest_difference", "allowed"]).set_index("way")

    def _relative_to_one_process(self, table: pd.DataFrame, column: str) -> pd.DataFrame:
        one_process = table[table["way"] == ONE_PROCESS].set_index(["network", "batch_size"])[
            column
        ]
        keys = zip(table["network"], table["batch_size"], strict=True)
        return table.assign(of_one_process=table[column] / [one_process[key] for key in keys])


def _spread(rows: pd.DataFrame, column: str, shares: Iterable[float]) -> pd.DataFrame:
    """Return quantiles of a column for each network, way of serving and batch size."""
    return rows.groupby(KEYS, sort=False)[column].quantile([*shares]).unstack().loc[:, [*shares]]


def serving_measurements(
    times: list[dict[str, JSON]],
    weights: list[dict[str, int]],
    differences: dict[str, float],
    allowed: float,
    workers: int,
    threads: int,
    cores: int,
    under_way: int,
) -> ServingMeasurements:
    """Return the measurements as tables; `weights` has one dict of weight bytes per rank."""
    import pandas as pd

    weight_rows = [
        {"way": way, "rank": rank, "weights_bytes": nbytes}
        for rank, rank_weights in enumerate(weights)
        for way, nbytes in rank_weights.items()
        if nbytes
    ]
    return ServingMeasurements(
        pd.DataFrame(times),
        pd.DataFrame(weight_rows),
        differences,
        allowed,
        workers,
        threads,
        workers * threads > cores,
        under_way,
    )
