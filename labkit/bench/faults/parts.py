"""What faults do to trainings, tried many times at random, as parts of one command.

The long form, `labkit bench faults --json PATH`, takes some hours of two quiet cores: 100 kills on
four ranks 50 min, 60 at any moment of a call 25 min, 39 that are come back from 20 min, 100 resumes
40 min, 30 planted faults 5 min, the cost 3 min.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from labkit.bench.faults import calls, comebacks, cost, kills, resumes, sown
from labkit.bench.timing import Row


class Part(NamedTuple):
    """A part: what measures it, in how many repeats if nothing is said, what makes a row good.

    Attributes:
        measure: of repeats and the rows that there are already; yields further ones.
        repeats: if nothing is said.
        good: columns that are true in a row where all is as it should be.
        counts: the column that is true in rows that count; "": all do.
        numbers: columns of which the median is told.
    """

    measure: Callable[[int, Sequence[Row]], Iterator[Row]]
    repeats: int
    good: tuple[str, ...] = ()
    counts: str = ""
    numbers: tuple[str, ...] = ()


PARTS = {
    "kills": Part(
        kills.measure,
        100,
        ("finished", "exact", "within"),
        "struck",
        ("seconds", "trace_s", "early_s"),
    ),
    "calls": Part(
        calls.measure, 60, ("finished", "exact", "recorded"), "struck", ("seconds", "after_s")
    ),
    "comebacks": Part(
        comebacks.measure,
        39,
        ("finished", "same"),
        "struck",
        ("detect_s", "rebuild_s", "prepare_s", "repeat_s"),
    ),
    "planted": Part(sown.measure, 30, ("found",)),
    "resumes": Part(resumes.measure, 100, ("same",), "struck"),
    "cost": Part(cost.measure, 31, numbers=("median_ms", "tolerant_ms", "share", "quiet_share")),
}


def summary(rows: Sequence[Row]) -> list[Row]:
    """A row a part and place: how many count, how many of these are good in what, medians."""
    found: list[Row] = []
    for what, part in PARTS.items():
        own = [row for row in rows if row["what"] == what and row.get(part.counts or "what")]
        for place in dict.fromkeys(row["network"] for row in own):
            here = [row for row in own if row["network"] == place]
            told: Row = {"what": what, "network": place, "count": len(here)}
            told |= {good: sum(bool(row[good]) for row in here) for good in part.good}
            for name in part.numbers:
                values = [row[name] for row in here if row.get(name) is not None]
                told[name] = float(np.median(np.array(values, float))) if values else None
            found.append(told)
    return found


def trouble(rows: Sequence[Row]) -> list[str]:
    """What is not as it should be.

    >>> trouble([{"what": "planted", "case": "AllReduce ring", "number": 3, "found": False}])
    ['planted 3, AllReduce ring: not found']
    """
    return [
        f"{row['what']} {row['number']}, {row['case']}: not {', '.join(bad)}"
        for row in rows
        if row["what"] in PARTS and row.get(PARTS[str(row["what"])].counts or "what")
        if (bad := [good for good in PARTS[str(row["what"])].good if row[good] is not True])
    ]
