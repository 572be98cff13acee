"""What a step takes at each number of threads, and from which number on more is less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas

KINDS = ("intra", "inter")  # threads within an operation, and between operations


class Timed(NamedTuple):
    """The median step of one turn, ms."""

    batch: int
    intra: int
    inter: int
    repeat: int
    step_ms: float


@dataclass(frozen=True)
class ThreadSweep:
    """What was measured.

    Attributes:
        timed: a row a turn.
        cores: that the processes had.
    """

    timed: Sequence[Timed]
    cores: int

    def frame(self) -> pandas.DataFrame:
        """A row a turn: batch, intra, inter, repeat, step_ms."""
        import pandas as pd

        return pd.DataFrame(list(self.timed))


def thread_costs(sweep: ThreadSweep) -> pandas.DataFrame:
    """A row a batch and pair of counts: the median step over repeats, its least and most, ms."""
    timed = sweep.frame().groupby(["batch", "intra", "inter"])["step_ms"]
    columns = {"step_ms": "median", "step_ms_low": "min", "step_ms_high": "max"}
    return timed.agg(**columns).reset_index()


def more_is_less(sweep: ThreadSweep) -> pandas.DataFrame:
    r"""From which number of threads on a step takes longer, for each batch and kind of thread.

    The other kind's number stays that of the shortest step. With \(t_r(k)\) the step with \(k\)
    threads in repeat \(r\) and \(k^*\) the number of the shortest median, more is less from the
    least \(k > k^*\) from which on \(t_r(k)/t_r(k^*)\) is above 1 for every number of the sweep, in
    every repeat (`less_from`, missing where there is none, or only one repeat); `ratio` is its
    median there, with its least and greatest.
    """
    import pandas as pd

    return pd.DataFrame([row for batch in _batches(sweep) for row in _turnings(sweep, batch)])


def _batches(sweep: ThreadSweep) -> list[int]:
    return list(dict.fromkeys(each.batch for each in sweep.timed))


def _turnings(sweep: ThreadSweep, batch: int) -> Iterator[dict[str, float | str]]:
    timed = sweep.frame()
    steps = timed[timed["batch"] == batch].pivot_table(
        index="repeat", columns=list(KINDS), values="step_ms"
    )
    best: tuple[int, int] = steps.median().idxmin()
    for place, kind in enumerate(KINDS):
        # All pairs that differ from the best one in this kind alone, fewest threads first.
        along = sorted(pair for pair in steps if pair[1 - place] == best[1 - place])
        row: dict[str, float | str] = {"batch": batch}
        row |= {"threads": kind, "best": best[place], "other": best[1 - place]}
        row |= {"best_ms": float(steps[best].median()), "most": along[-1][place]}
        row |= dict.fromkeys(("less_from", "ratio", "ratio_low", "ratio_high"), nan)
        # From the most threads down, as long as all repeats are slower; one repeat tells nothing.
        for pair in along[: along.index(best) : -1] if len(steps) > 1 else []:
            ratio = steps[pair] / steps[best]
            if ratio.min() <= 1:
                break
            row |= {"less_from": pair[place], "ratio": float(ratio.median())}
            row |= {"ratio_low": float(ratio.min()), "ratio_high": float(ratio.max())}
        yield row
