"""Campaigns that inject faults at random moments; each part of the command is one campaign.

On two quiet cores all parts take some hours. 100 kills on four ranks take 50 min, 60 kills during a
call 25 min, and 39 recoveries 20 min. 100 resumes take 40 min, 30 injected faults 5 min, and the
cost 3 min.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from labkit.bench.command import AS_JSON, names, show_rows
from labkit.bench.timing import Row
from labkit.common.errors import InvalidInput, LabkitError
from tests.acceptance.faults import calls, cost, injection, kills, recovery, resumes
from tests.acceptance.rows import read_rows, record_rows


class Part(NamedTuple):
    """A part of the command: its measurement, its default repeats, and what makes a row good.

    Attributes:
        measure: Function that takes the number of repeats and the known rows, and yields further
            rows.
        repeats: Default number of repeats.
        good: Names of columns that must be true in a row without an error.
        counts: Name of the column that is true in rows that count; if "", all rows count.
        numbers: Names of columns whose medians the summary shows.
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
        recovery.measure,
        39,
        ("finished", "same"),
        "struck",
        ("detect_s", "rebuild_s", "prepare_s", "repeat_s"),
    ),
    "planted": Part(injection.measure, 30, ("found",)),
    "resumes": Part(resumes.measure, 100, ("same",), "struck"),
    "cost": Part(cost.measure, 31, numbers=("median_ms", "tolerant_ms", "share", "quiet_share")),
}


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return a row per part and place: number of rows that count, good rows, and medians."""
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
    """Return a text for each row that contains an error.

    >>> trouble([{"what": "planted", "case": "AllReduce ring", "number": 3, "found": False}])
    ['planted 3, AllReduce ring: not found']
    """
    return [
        f"{row['what']} {row['number']}, {row['case']}: not {', '.join(bad)}"
        for row in rows
        if row["what"] in PARTS and row.get(PARTS[str(row["what"])].counts or "what")
        if (bad := [good for good in PARTS[str(row["what"])].good if row[good] is not True])
    ]


@click.command("faults")
@click.option(
    "--what",
    default=None,
    callback=names,
    help="kills,calls,comebacks,planted,resumes,cost; default: all.",
)
@click.option(
    "--repeats", type=click.IntRange(1), help="Default: 100 kills and resumes, 30 faults."
)
@AS_JSON
def command(what: list[str], repeats: int | None, file: Path | None) -> None:
    """Kill ranks and trainings at random moments, inject faults, and check the results.

    All parts together take some hours on two cores. Rows that FILE already contains are not
    measured again. Ends with an error if a run does not continue, a ledger of samples is not exact,
    a fault is not reported, or a resumed training differs.
    """
    if unknown := [name for name in what if name not in PARTS]:
        raise InvalidInput(f"what={unknown[0]!r} is not known; allowed: {', '.join(PARTS)}")
    rows = read_rows(file)
    for name in what or PARTS:
        new = PARTS[name].measure(repeats or PARTS[name].repeats, rows)
        record_rows(new, rows, file)
    columns = {"what": "what", "network": "where", "count": "count"}
    columns |= {good: good for part in PARTS.values() for good in (*part.good, *part.numbers)}
    show_rows(summary(rows), columns, None)
    if failed := trouble(rows):
        raise LabkitError(f"failed: {'; '.join(failed)}")
