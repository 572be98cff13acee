"""What steps of training waited for their input, and what a real one costs against none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas

SYNTHETIC, INSIDE = "synthetic", "in the step"
# After tensors that lie in memory, each adds to the one before it; a cache prefetches, too.
WAYS = (SYNTHETIC, INSIDE, "map", "parallel calls", "prefetch", "cache")


class Fed(NamedTuple):
    """A step and its batch; times in s, on the clock of the host.

    Attributes:
        way: of `WAYS`.
        repeat, step: the turn, and the place in it.
        start, got, stop: when the step asked for its batch, had it, and ended.
        made_start, made_stop: when that batch was made; NaN where it was before the turn began.
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
    """What was measured of the ways to feed a step.

    Attributes:
        fed: a row a step.
        nbytes: of the file that was read.
        filled: seconds of the first pass, in which the cache was filled.
    """

    fed: Sequence[Fed]
    nbytes: int
    filled: float

    @property
    def ways(self) -> list[str]:
        """Those that were measured, in the order of `WAYS`."""
        found = {each.way for each in self.fed}
        return [way for way in WAYS if way in found]

    def frame(self) -> pandas.DataFrame:
        """A row a step, with `compute_ms`, `idle_ms` (until its batch was `ready`) and `step_ms`.

        A batch is ready when it has come, or been made, where the step makes it itself.
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
    r"""A row a way: what a step takes, what of it is idle, and the overhead of its input.

    With \(t_r\) the median step of a repeat \(r\) and \(s_r\) that of the synthetic input in the
    same repeat, the I/O overhead is the median over repeats of \((t_r - s_r)/s_r\), with its least
    and greatest (`overhead_low`, `overhead_high`). Times are medians over repeats of medians over
    steps, ms; `idle_share` is the part of all these steps' time in which training stood still.

    Source: TensorFlow's "Benchmarks" (2017) set a baseline with synthetic data and add real data to
    it; the ways are those of Murray et al. 2021, *tf.data: A machine learning data processing
    framework* (arXiv:2101.12127). Differs from both: pairs of interleaved turns, and processors
    alone, so that input and training share the cores.
    """
    import pandas as pd

    steps = trace.frame()
    medians = steps.groupby(["way", "repeat"])[["step_ms", "compute_ms", "idle_ms"]].median()
    base = medians.loc[SYNTHETIC, "step_ms"]
    sums = steps.groupby("way")[["idle_ms", "step_ms"]].sum()
    rows = {}
    for way in trace.ways:
        own = medians.loc[way]
        row = {name: float(own[name].median()) for name in ("step_ms", "compute_ms", "idle_ms")}
        row |= {"step_ms_low": own["step_ms"].min(), "step_ms_high": own["step_ms"].max()}
        row["idle_share"] = sums.loc[way, "idle_ms"] / sums.loc[way, "step_ms"]
        over = np.array(own["step_ms"] / base - 1, float)
        row |= {"overhead": float(np.median(over))}
        row |= {"overhead_low": over.min(), "overhead_high": over.max()}
        rows[way] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("way")
