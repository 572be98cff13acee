"""Step times by number of threads, and the thread counts from which on steps become slower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas

KINDS = ("intra", "inter")  # threads within one operation; threads for parallel operations


class StepTime(NamedTuple):
    """The median step time in ms in one repeat, for a batch size and a pair of thread counts."""

    batch: int
    intra: int
    inter: int
    repeat: int
    step_ms: float


@dataclass(frozen=True)
class ThreadSweep:
    """Step times for all measured combinations of thread counts.

    Attributes:
        timed: One entry per batch size, pair of thread counts, and repeat.
        cores: Number of CPU cores that the measured processes may use.
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

    Only one of the two thread counts is varied; the other thread count is that of the fastest step.
    Let \(t_r(k)\) be the step time with \(k\) threads in repeat \(r\), and \(k^*\) the thread count
    with the lowest median step time. The column `less_from` is the smallest \(k > k^*\) such that
    \(t_r(j)/t_r(k^*)\) exceeds 1 for all measured \(j \geq k\) and all repeats. The column
    `less_from` has no value if there is no such \(k\), or if there is only one repeat. The columns
    `ratio`, `ratio_low` and `ratio_high` contain the median, minimum and maximum of
    \(t_r(j)/t_r(k^*)\) over the repeats for \(j\) = `less_from`.
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
        # Candidates differ from the fastest pair only in the thread count of `kind`, and are sorted
        # by the thread count of `kind`.
        candidates = sorted(pair for pair in steps if pair[1 - index] == best[1 - index])
        row: dict[str, float | str] = {"batch": batch}
        row |= {"threads": kind, "best": best[index], "other": best[1 - index]}
        row |= {"best_ms": float(steps[best].median()), "most": candidates[-1][index]}
        row |= dict.fromkeys(("less_from", "ratio", "ratio_low", "ratio_high"), nan)
        # The search starts at the highest thread count, and ends at the first count that is not
        # slower in all repeats.
        for pair in candidates[: candidates.index(best) : -1] if len(steps) > 1 else []:
            ratio = steps[pair] / steps[best]
            if ratio.min() <= 1:
                break
            row |= {"less_from": pair[index], "ratio": float(ratio.median())}
            row |= {"ratio_low": float(ratio.min()), "ratio_high": float(ratio.max())}
        yield row
