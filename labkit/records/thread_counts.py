"""Step times by number of threads, and the number of threads from which steps get slower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas

KINDS = ("intra", "inter")  # threads within an operation, and threads for parallel operations


class StepTime(NamedTuple):
    """The median step time in ms of one repeat, for one batch size and pair of thread counts."""

    batch: int
    intra: int
    inter: int
    repeat: int
    step_ms: float


@dataclass(frozen=True)
class ThreadSweep:
    """Step times at all measured numbers of threads.

    Attributes:
        timed: One row per batch size, pair of thread counts, and repeat.
        cores: Number of CPU cores that the processes use.
    """

    timed: Sequence[StepTime]
    cores: int

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the measurements as a table with columns batch, intra, inter, repeat, step_ms."""
        import pandas as pd

        return pd.DataFrame(list(self.timed))


def thread_costs(sweep: ThreadSweep) -> pandas.DataFrame:
    """Return median, minimum and maximum of ms per step over repeats, by batch and threads."""
    timed = sweep.to_dataframe().groupby(["batch", "intra", "inter"])["step_ms"]
    columns = {"step_ms": "median", "step_ms_low": "min", "step_ms_high": "max"}
    return timed.agg(**columns).reset_index()


def more_is_less(sweep: ThreadSweep) -> pandas.DataFrame:
    r"""Return the number of threads from which a step gets slower, by batch and kind of thread.

    The number of threads of the other kind stays that of the fastest step. Let \(t_r(k)\) be the
    step time with \(k\) threads in repeat \(r\), and \(k^*\) the number with the shortest median.
    `less_from` is the least \(k > k^*\) from which \(t_r(k)/t_r(k^*)\) exceeds 1 for all numbers
    and repeats. `less_from` is missing if no such \(k\) exists, or with only one repeat. `ratio` is
    the median ratio at `less_from`, with its minimum and maximum.
    """
    import pandas as pd

    return pd.DataFrame([row for batch in _batches(sweep) for row in _slowdowns(sweep, batch)])


def _batches(sweep: ThreadSweep) -> list[int]:
    return list(dict.fromkeys(measurement.batch for measurement in sweep.timed))


def _slowdowns(sweep: ThreadSweep, batch: int) -> Iterator[dict[str, float | str]]:
    timed = sweep.to_dataframe()
    steps = timed[timed["batch"] == batch].pivot_table(
        index="repeat", columns=list(KINDS), values="step_ms"
    )
    best: tuple[int, int] = steps.median().idxmin()
    for index, kind in enumerate(KINDS):
        # Candidates differ from the best pair in this kind of thread only; fewest threads come
        # first.
        candidates = sorted(pair for pair in steps if pair[1 - index] == best[1 - index])
        row: dict[str, float | str] = {"batch": batch}
        row |= {"threads": kind, "best": best[index], "other": best[1 - index]}
        row |= {"best_ms": float(steps[best].median()), "most": candidates[-1][index]}
        row |= dict.fromkeys(("less_from", "ratio", "ratio_low", "ratio_high"), nan)
        # The search starts at the most threads, and ends when any repeat is not slower.
        for pair in candidates[: candidates.index(best) : -1] if len(steps) > 1 else []:
            ratio = steps[pair] / steps[best]
            if ratio.min() <= 1:
                break
            row |= {"less_from": pair[index], "ratio": float(ratio.median())}
            row |= {"ratio_low": float(ratio.min()), "ratio_high": float(ratio.max())}
        yield row
