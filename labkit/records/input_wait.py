"""The time for which training steps wait for input, and the overhead over synthetic input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas

SYNTHETIC, INSIDE = "synthetic", "in the step"
# Each input pipeline after the synthetic one adds a technique to the pipeline before it, so the
# pipeline "cache" also includes prefetching.
WAYS = (SYNTHETIC, INSIDE, "map", "parallel calls", "prefetch", "cache")


class FedStep(NamedTuple):
    """A training step and its input batch, with times in seconds on the host's clock.

    Attributes:
        way: Name of the input pipeline, one of `WAYS`.
        repeat, step: Number of the repeat of the measurement, and number of the step within the
            repeat.
        start, got, stop: Times at which the step requested its batch, received it, and ended.
        made_start, made_stop: Times at which the preparation of the batch began and ended; NaN if
            this was before the repeat.
    """

    way: str
    repeat: int
    step: int
    start: float
    got: float
    stop: float
    made_start: float
    made_stop: float


@dataclass(frozen=True)
class InputTrace:
    """Measurements of training steps with each of the input pipelines.

    Attributes:
        fed: Measured training steps (`FedStep`).
        nbytes: Size of the input file in bytes.
        filled: Seconds of the first pass over the data with the pipeline "cache"; this pass fills
            the cache.
    """

    fed: Sequence[FedStep]
    nbytes: int
    filled: float

    @property
    def ways(self) -> list[str]:
        """Names of the measured input pipelines, in the order of `WAYS`."""
        measured = {step.way for step in self.fed}
        return [way for way in WAYS if way in measured]

    def to_dataframe(self) -> pandas.DataFrame:
        """Return one row per step with the columns `ready` (s), `idle_ms`, `compute_ms`, `step_ms`.

        The column `ready` is the time at which the training step received its batch. If the
        training step prepares the batch itself, `ready` is the time at which the preparation ended.
        """
        import pandas as pd

        table = pd.DataFrame(list(self.fed))
        inside = table["made_start"] >= table["got"]
        ready = table["got"].where(~inside, table["made_stop"])
        return table.assign(
            ready=ready,
            idle_ms=1e3 * (ready - table["start"]),
            compute_ms=1e3 * (table["stop"] - ready),
            step_ms=1e3 * (table["stop"] - table["start"]),
        )


def input_costs(trace: InputTrace) -> pandas.DataFrame:
    r"""Return step time, idle time and overhead over synthetic input, one row per input pipeline.

    For each repeat \(r\), \(t_r\) is the median step time, and \(s_r\) is the median step time with
    synthetic input. The I/O overhead is the relative difference \(t_r/s_r-1\), as the median over
    the repeats r. The columns `overhead_low` and `overhead_high` are the minimum and the maximum of
    \(t_r/s_r-1\) over the repeats. Times in ms are first medians over the steps of each repeat,
    then medians over the repeats. The column `idle_share` is the fraction of the step time for
    which the step waits for input.

    Source: TensorFlow's "Benchmarks" (2017) measures training first with synthetic data, then with
    real data. Murray et al. 2021, *tf.data: A machine learning data processing framework*
    (arXiv:2101.12127), define the pipelines. Unlike TensorFlow's benchmarks and Murray et al.,
    labkit measures repeats as interleaved pairs, and input and training share the CPU cores.
    """
    import pandas as pd

    steps = trace.to_dataframe()
    medians = steps.groupby(["way", "repeat"])[["step_ms", "compute_ms", "idle_ms"]].median()
    base = medians.loc[SYNTHETIC, "step_ms"]
    sums = steps.groupby("way")[["idle_ms", "step_ms"]].sum()
    rows = {}
    for way in trace.ways:
        rows_of_way = medians.loc[way]
        row = {
            name: float(rows_of_way[name].median()) for name in ("step_ms", "compute_ms", "idle_ms")
        }
        row |= {
            "step_ms_low": rows_of_way["step_ms"].min(),
            "step_ms_high": rows_of_way["step_ms"].max(),
        }
        row["idle_share"] = sums.loc[way, "idle_ms"] / sums.loc[way, "step_ms"]
        overhead = np.array(rows_of_way["step_ms"] / base - 1, float)
        row |= {"overhead": float(np.median(overhead))}
        row |= {"overhead_low": overhead.min(), "overhead_high": overhead.max()}
        rows[way] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("way")
