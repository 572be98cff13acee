"""Step times by number of threads, and the thread counts from which steps become slower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas

KINDS = ("intra", "inter")  # threads within an operation, and for parallel operations


class StepTime(NamedTuple):
    """The median step time in ms in one repeat, for a batch size and a pair of thread counts."""

    batch: int
    intra: int
    inter: int
    repeat: int
    step_ms: float


@dataclass(frozen=True)
class ThreadSweep:
    """Step times for all measured numbers of threads.

    Attributes:
        timed: One entry per batch size, pair of thread counts, and repeat.
        cores: Number of CPU cores that the measured processes use.
    """

    timed: Sequence[StepTime]
    cores: int

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the measurements as a table with columns batch, intra, inter, repeat, step_ms."""
        import pandas as pd

        return pd.DataFrame(list(self.timed))


def thread_costs(sweep: ThreadSweep) -> pandas.DataFrame:
    """Return the median, minimum and maximum step time over repeats, by batch size and threads."""
    timed = sweep.to_dataframe().groupby(["batch", "intra", "inter"])["step_ms"]
    columns = {"step_ms": "median", "step_ms_low": "min", "step_ms_high": "max"}
    return timed.agg(**columns).reset_index()


def more_is_less(sweep: ThreadSweep) -> pandas.DataFrame:
    r"""Return the thread count from which steps become slower, by batch size and kind of thread.

    Only one thread count is varied, and the count of the other kind of threads is that of the
    fastest step. Let \(t_r(k)\) be the step time with \(k\) threads in repeat \(r\), and \(k^*\)
    the number of threads with the shortest median. The column `less_from` is the smallest \(k >
    k^*\) such that \(t_r(j)/t_r(k^*)\) exceeds 1 for all measured \(j \geq k\) and all repeats.
    The value of `less_from` is missing if there is no such \(k\), or if there is only one repeat.
    The columns `ratio`, `ratio_low` and `ratio_high` are the median, minimum and maximum of the
    ratio at `less_from`.
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
        # Candidates differ from the best pair only in the number of this kind of threads, and are
        # sorted by this number.
        candidates = sorted(pair for pair in steps if pair[1 - index] == best[1 - index])
        row: dict[str, float | str] = {"batch": batch}
        row |= {"threads": kind, "best": best[index], "other": best[1 - index]}
        row |= {"best_ms": float(steps[best].median()), "most": candidates[-1][index]}
        row |= dict.fromkeys(("less_from", "ratio", "ratio_low", "ratio_high"), nan)
        # The search starts at the largest number of threads, and ends at the first number that is
        # not slower in all repeats.
        for pair in candidates[: candidates.index(best) : -1] if len(steps) > 1 else []:
            ratio = steps[pair] / steps[best]
            if ratio.min() <= 1:
                break
            row |= {"less_from": pair[index], "ratio": float(ratio.median())}
            row |= {"ratio_low": float(ratio.min()), "ratio_high": float(ratio.max())}
        yield row
