"""Answers by replicas, stages and slices: how soon, how many a second, and from what memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.common.canonical_json import JSON

if TYPE_CHECKING:
    import pandas as pd

ALONE = "one process"
# Of the answers' own precision: sums of other order differ by far less, another model by far more.
TOLERANCE = 256.0
KEYS = ["network", "way", "batch_size"]


@dataclass(frozen=True)
class Served:
    """What `labkit.cluster.serve` has measured.

    Attributes:
        times: a row a call: network, way, batch_size, what ("first", "batch", "stream"), rows,
            seconds.
        weights: a row a way and rank: weights_bytes.
        differences: by way, the largest from what one process answers.
        allowed: what of that rounding may do.
        workers, threads: ranks, and threads of each.
        oversubscribed: whether they are more than cores.
        under_way: batches of a stream.
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
        """A row a network, way and batch size: ms from a batch to its answer.

        Columns: median (latency_ms), p10 and p90 (latency_ms_low, latency_ms_high), the first call
        (first_ms), and the median as a share of one process's (of_one_process).
        """
        own = self.times[self.times["what"] == "batch"]
        found = 1e3 * _spread(own, "seconds", (0.5, 0.1, 0.9))
        found.columns = ["latency_ms", "latency_ms_low", "latency_ms_high"]
        first = self.times[self.times["what"] == "first"]
        found["first_ms"] = 1e3 * first.set_index(KEYS)["seconds"]
        return self._beside(found.reset_index(), "latency_ms")

    def throughput(self) -> pd.DataFrame:
        """A row a network, way and batch size: rows answered a second, with batches in a stream.

        Columns: median (rows_per_second), least and most (…_low, …_high), of_one_process.
        """
        own = self.times[self.times["what"] == "stream"]
        own = own.assign(rate=own["rows"] / own["seconds"])
        found = _spread(own, "rate", (0.5, 0.0, 1.0))
        name = "rows_per_second"
        found.columns = [name, f"{name}_low", f"{name}_high"]
        return self._beside(found.reset_index(), name)

    def memory(self) -> pd.DataFrame:
        """A row a way: bytes of weights on each rank, and the most on one as a share of all."""
        found = self.weights.pivot(index="way", columns="rank", values="weights_bytes")
        found = found.reindex(dict.fromkeys(self.weights["way"]))
        whole = found.loc[ALONE].max()
        found.columns = [f"rank {rank}, weights_bytes" for rank in found.columns]
        most = found.max(axis=1)
        return found.assign(most_weights_bytes=most, share=most / whole)

    def answers(self) -> pd.DataFrame:
        """A row a way: the largest difference from one process, and what is allowed."""
        import pandas as pd

        # As texts: rounded to places, a table would call them all 0.
        rows = [(way, f"{far:.1e}", f"{self.allowed:.1e}") for way, far in self.differences.items()]
        return pd.DataFrame(rows, columns=["way", "largest_difference", "allowed"]).set_index("way")

    def _beside(self, found: pd.DataFrame, column: str) -> pd.DataFrame:
        alone = found[found["way"] == ALONE].set_index(["network", "batch_size"])[column]
        beside = zip(found["network"], found["batch_size"], strict=True)
        return found.assign(of_one_process=found[column] / [alone[place] for place in beside])


def _spread(own: pd.DataFrame, column: str, shares: Iterable[float]) -> pd.DataFrame:
    """Quantiles of a column by network, way and batch size, in the order of the rows."""
    return own.groupby(KEYS, sort=False)[column].quantile([*shares]).unstack().loc[:, [*shares]]


def served(
    times: list[dict[str, JSON]],
    weights: list[dict[str, int]],
    differences: dict[str, float],
    allowed: float,
    workers: int,
    threads: int,
    cores: int,
    under_way: int,
) -> Served:
    """What ranks have told, as tables; weights: by way, of each rank."""
    import pandas as pd

    held = [
        {"way": way, "rank": rank, "weights_bytes": nbytes}
        for rank, own in enumerate(weights)
        for way, nbytes in own.items()
        if nbytes
    ]
    return Served(
        pd.DataFrame(times),
        pd.DataFrame(held),
        differences,
        allowed,
        workers,
        threads,
        workers * threads > cores,
        under_way,
    )
