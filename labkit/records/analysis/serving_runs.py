"""Measurements of inference by replicas, stages and slices: latency, throughput and memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.common.canonical_json import JSON

if TYPE_CHECKING:
    import pandas as pd

ONE_PROCESS = "one process"
# Allowed difference of answers, in units of their precision's rounding error. Another order of
# summation causes a far smaller difference, another model a far larger one.
TOLERANCE = 256.0
KEYS = ["network", "way", "batch_size"]


@dataclass(frozen=True)
class ServingMeasurements:
    """Measurements of `labkit.cluster.serve`.

    Attributes:
        times: One row per call: network, way (of serving: one process, replicas, stages or slices),
            batch_size, what ("first", "batch", "stream"), rows (samples), seconds.
        weights: One row per way of serving and rank, with weights_bytes.
        differences: Largest absolute difference from the answers of one process, by way of serving.
        allowed: Largest absolute difference that rounding can explain.
        workers, threads: Number of ranks, and of threads per rank.
        oversubscribed: True if there are more threads than CPU cores.
        under_way: Number of concurrent batches in a stream.
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
        """Return the ms from a batch's request to its answer, by network, way and batch size.

        Columns: median (latency_ms), p10 and p90 (latency_ms_low, latency_ms_high), the first call
        (first_ms), and the median relative to one process (of_one_process).
        """
        batches = self.times[self.times["what"] == "batch"]
        latencies = 1e3 * _spread(batches, "seconds", (0.5, 0.1, 0.9))
        latencies.columns = ["latency_ms", "latency_ms_low", "latency_ms_high"]
        first = self.times[self.times["what"] == "first"]
        latencies["first_ms"] = 1e3 * first.set_index(KEYS)["seconds"]
        return self._relative_to_one_process(latencies.reset_index(), "latency_ms")

    def throughput(self) -> pd.DataFrame:
        """Return the answered samples per second of streams, by network, way and batch size.

        Columns: median (rows_per_second), minimum and maximum (…_low, …_high), and the median
        relative to one process (of_one_process).
        """
        streams = self.times[self.times["what"] == "stream"]
        streams = streams.assign(rate=streams["rows"] / streams["seconds"])
        rates = _spread(streams, "rate", (0.5, 0.0, 1.0))
        name = "rows_per_second"
        rates.columns = [name, f"{name}_low", f"{name}_high"]
        return self._relative_to_one_process(rates.reset_index(), name)

    def memory(self) -> pd.DataFrame:
        """Return the bytes of weights by way and rank, and the largest fraction on one rank."""
        by_rank = self.weights.pivot(index="way", columns="rank", values="weights_bytes")
        by_rank = by_rank.reindex(dict.fromkeys(self.weights["way"]))
        whole = by_rank.loc[ONE_PROCESS].max()
        by_rank.columns = [f"rank {rank}, weights_bytes" for rank in by_rank.columns]
        most = by_rank.max(axis=1)
        return by_rank.assign(most_weights_bytes=most, share=most / whole)

    def answers(self) -> pd.DataFrame:
        """Return the largest difference from one process, and the allowed difference, by way."""
        import pandas as pd

        # The values are texts, because a table would round such small numbers to 0.
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
    """Return quantiles of a column by network, way and batch size, in their order of occurrence."""
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
    """Return the ranks' measurements as tables; `weights` has, for each rank, bytes by way."""
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
