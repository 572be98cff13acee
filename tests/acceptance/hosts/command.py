"""Ranks on two hosts of a testbed: allreduces, emulation of the link, and starts of clusters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click

from labkit.bench.command import AS_JSON, format_rows, names, write_rows
from labkit.bench.timing import Row
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.terminal import say
from tests.acceptance.hosts import allreduce, starts


class Part(NamedTuple):
    """A part of the command: its measurement, its default repeats, and its table's columns.

    The measurement raises LabkitError if this machine does not support testbeds.
    """

    measure: Callable[[int], list[Row]]
    repeats: int
    columns: dict[str, str]


def trouble(row: Row) -> str:
    """Return a text that names the errors in a row; "" if there are none.

    >>> trouble({"correct": False}), trouble({"repeats": 3, "started": 2, "left": 1})
    ('not correct', '1 of 3 did not start, 1 left something')
    """
    found = ["not correct"] if row.get("correct") is False else []
    if "started" in row:
        missing, left = int(row["repeats"] or 0) - int(row["started"] or 0), row["left"]
        found += [f"{missing} of {row['repeats']} did not start"] if missing else []
        found += [f"{left} left something"] if left else []
    return ", ".join(found)


_TIMES = {"median_ms": "median ms", "min_ms": "least"}

PARTS = {
    "levels": Part(
        allreduce.measure_levels,
        5,
        {"algorithm": "algorithm", "bytes": "bytes", **_TIMES, "max_ms": "most"}
        | {"ratio_to_ring": "of ring's time", "ratio_min": "least", "ratio_max": "most"}
        | {"predicted_ms": "predicted ms", "predicted_ratio": "of ring's"}
        | {"link_bytes": "bytes out of a host", "sent": "by its link", "correct": "correct"},
    ),
    "emulated": Part(
        allreduce.measure_emulation,
        5,
        {"algorithm": "algorithm", "bytes": "bytes", "median_ms": "real ms"}
        | {"emulated_ms": "emulated ms", "error": "error", "error_min": "least"}
        | {"error_max": "most", "correct": "correct"},
    ),
    "starts": Part(
        starts.measure,
        20,
        {"launcher": "launcher", **_TIMES, "p90_ms": "p90", "end_ms": "end ms"}
        | {"repeats": "asked", "started": "started", "left": "left something"},
    ),
}


@click.command("hosts")
@click.option("--what", default=None, callback=names, help="levels,emulated,starts; default: all.")
@click.option("--repeats", type=click.IntRange(1), help="Default: 5, and 20 starts.")
@AS_JSON
def command(what: list[str], repeats: int | None, file: Path | None) -> None:
    """Measure allreduces, an emulated link, and cluster starts on two virtual hosts (Linux, root).

    Ends with an error if a sum is wrong, a cluster does not start, or processes or jobs remain
    after its end.
    """
    if unknown := [name for name in what if name not in PARTS]:
        raise InvalidInput(f"what={unknown[0]!r} is not known; allowed: {', '.join(PARTS)}")
    rows = []
    for name in what or PARTS:
        found = PARTS[name].measure(repeats or PARTS[name].repeats)
        say(format_rows(found, PARTS[name].columns))
        rows += found
    write_rows(rows, file)
    if failed := [f"{row['case']}: {said}" for row in rows if (said := trouble(row))]:
        raise LabkitError(f"failed: {'; '.join(failed)}")
