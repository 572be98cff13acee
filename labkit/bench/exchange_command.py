"""`labkit bench exchange`: its options, and a table of labkit beside other frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from labkit.bench import exchange
from labkit.bench.command import AS_JSON, NETWORK, TIMES, format_rows, names, write_rows
from labkit.bench.peers import beside
from labkit.bench.steps import WORD_CASES
from labkit.bench.timing import Row
from labkit.common.errors import InvalidInput
from labkit.common.terminal import say
from labkit.communicator import ALGORITHMS, refuse_unmetered
from labkit.exchange import SCHEDULES

EXCHANGE = {
    "case": "case",
    "what": "what",
    **TIMES,
    "limit_ms": "limit",
    "added": "added ms (least to most)",
    "same_weights": "same weights",
}
BESIDE = {"ours_to_theirs": "added by ours : by theirs", "version": ""}
OVERLAP = {"saved": "ms saved of what an ideal line would", "recording": "recording"}


@click.command("exchange")
@click.option("--workers", default=2, show_default=True, help="MPI ranks of one thread.")
@click.option(
    "--cases",
    default="mlp-1024,mlp-2048,cnn",
    show_default=True,
    callback=names,
    help="Models, with commas; there are deep-mlp and embedding, too.",
)
@click.option("--schedules", default="sequential,overlap", show_default=True, callback=names)
@click.option("--algorithm", default="auto", show_default=True, help="How buckets are summed.")
@NETWORK
@click.option("--repeats", default=5, show_default=True, help="Rounds over everything.")
@click.option("--bucket-bytes", default=4 * 2**20, show_default=True, type=click.IntRange(1))
@click.option(
    "--peer",
    "peers",
    default=None,
    callback=names,
    help="Other frameworks in turns with it: multi_worker_mirrored,ddp,fsdp,horovod,jax.",
)
@click.option("--where", is_flag=True, help="Also say where the time goes that sequential adds.")
@AS_JSON
def command(
    workers: int,
    cases: list[str],
    schedules: list[str],
    algorithm: str,
    network: str | None,
    repeats: int,
    bucket_bytes: int,
    peers: list[str],
    where: bool,
    file: Path | None,
) -> None:
    """What the exchange of gradients adds to a training step, beside other frameworks."""
    # Before the engines: they take seconds to start.
    _validate_options(workers, cases, schedules, algorithm, network, repeats, where)
    beside.check(peers, network)
    others = beside.Beside(peers, cases, workers) if peers else None
    given = (workers, cases, schedules, algorithm, network, repeats, bucket_bytes)
    rows = exchange.measure(*given, others.turn if others else None, where)
    say(format_rows([_with_spread(row) for row in rows], EXCHANGE | OVERLAP))
    for row in rows:
        if "why" in row:
            say(f"{row['case']} {row['what']}: {row['algorithm']}, {row['why']}")
    if others:
        found = others.rows(rows)
        if found:
            say(format_rows([_with_spread(row) for row in found], EXCHANGE | BESIDE))
        for remark in others.remarks:
            say(f"peer {remark}", err=True)
        # A file has them together: `peer` tells them apart.
        rows += found
    write_rows(rows, file)


def _with_spread(row: Row) -> Row:
    """The row with what it adds to the local step, and its spread, in one cell."""
    more: Row = {}
    if row.get("added_ms") is not None:
        least, most = row["added_min_ms"], row["added_max_ms"]
        more["added"] = f"{row['added_ms']:.3g} ({least:.3g} to {most:.3g})"
    if "saved_ms" in row:
        least, most, ideal = row["saved_min_ms"], row["saved_max_ms"], row["ideal_saving_ms"]
        more["saved"] = f"{row['saved_ms']:.3g} ({least:.3g} to {most:.3g}) of {ideal:.3g}"
    if "recording_share" in row:
        more["recording"] = f"{row['recording_share']:.2%} of the step"
    return row | more


def _validate_options(
    workers: int,
    cases: Sequence[str],
    schedules: Sequence[str],
    algorithm: str,
    network: str | None,
    repeats: int,
    where: bool,
) -> None:
    if workers < 2 or repeats < 1:
        raise InvalidInput(
            f"workers={workers}, repeats={repeats}: an exchange wants 2 workers or more, and a "
            "median 1 repeat or more"
        )
    for field, values, allowed in (
        ("schedule", schedules, SCHEDULES),
        ("algorithm", [algorithm], ("auto", *ALGORITHMS)),
    ):
        unknown = [value for value in values if value not in allowed]
        if unknown or not values:
            given = repr(unknown[0]) if unknown else "nothing"
            raise InvalidInput(f"{field}={given} is not known; allowed: {', '.join(allowed)}")
    words = [name for name in cases if name in WORD_CASES]
    own = [name for name in schedules if SCHEDULES[name].into_next]
    if words and own:
        raise InvalidInput(
            f"schedule={own[0]!r} updates dense layers one by one; {words[0]!r} has rows: leave "
            "one of them out"
        )
    if where and "sequential" not in schedules:
        raise InvalidInput("--where is about schedule sequential, which --schedules leaves out")
    if where and words:
        raise InvalidInput(f"--where is about dense gradients; {words[0]!r} has rows: leave it out")
    refuse_unmetered(algorithm, network)
