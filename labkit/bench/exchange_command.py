"""`labkit bench exchange`: options, and a table that compares labkit with other frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from labkit.bench import exchange
from labkit.bench.command import AS_JSON, NETWORK, TIMES, format_rows, names, write_rows
from labkit.bench.peers.peer_comparison import PeerComparison, validate_peers
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
    "limit_ms": "limit ms",
    "added": "added ms per step (min to max)",
    "same_weights": "same weights",
}
BESIDE = {"ours_to_theirs": "time added by labkit / by peer", "version": ""}
OVERLAP = {"saved": "saved ms (min to max) of ideal saving (ms)", "recording": "recording"}


@click.command("exchange")
@click.option(
    "--workers", default=2, show_default=True, help="Number of MPI ranks, with one thread each."
)
@click.option(
    "--cases",
    default="mlp-1024,mlp-2048,cnn",
    show_default=True,
    callback=names,
    help="Models, separated by commas; deep-mlp and embedding may also be given.",
)
@click.option(
    "--schedules",
    default="sequential,overlap",
    show_default=True,
    callback=names,
    help="Schedules of the gradient exchange, separated by commas.",
)
@click.option(
    "--algorithm",
    default="auto",
    show_default=True,
    help="Allreduce algorithm that sums the gradient buckets.",
)
@NETWORK
@click.option(
    "--repeats",
    default=5,
    show_default=True,
    help="Number of times that each kind of step of each model is timed.",
)
@click.option(
    "--bucket-bytes",
    default=4 * 2**20,
    show_default=True,
    type=click.IntRange(1),
    help="Size of a gradient bucket in bytes.",
)
@click.option(
    "--peer",
    "peers",
    default=None,
    callback=names,
    help="Other frameworks to compare: multi_worker_mirrored,ddp,fsdp,horovod,jax.",
)
@click.option(
    "--breakdown",
    is_flag=True,
    help="Also break down the time that the schedule 'sequential' adds to a step.",
)
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
    breakdown: bool,
    file: Path | None,
) -> None:
    """Measure the time that gradient exchange adds to a step, in labkit and other frameworks."""
    # The command validates its options before it starts ranks, because a start takes seconds.
    _validate_options(workers, cases, schedules, algorithm, network, repeats, breakdown)
    validate_peers(peers, network)
    others = PeerComparison(peers, cases, workers) if peers else None
    arguments = (workers, cases, schedules, algorithm, network, repeats, bucket_bytes)
    rows = exchange.measure(*arguments, others.turn if others else None, breakdown)
    say(format_rows([_with_spread(row) for row in rows], EXCHANGE | OVERLAP))
    for row in rows:
        if "why" in row:
            say(f"{row['case']} {row['what']}: {row['algorithm']}, {row['why']}")
    if others:
        peer_rows = others.rows(rows)
        if peer_rows:
            say(format_rows([_with_spread(row) for row in peer_rows], EXCHANGE | BESIDE))
        for remark in others.remarks:
            say(f"peer {remark}", err=True)
        # The output file contains rows of labkit and of other frameworks. The field `peer` names
        # the framework of a row.
        rows += peer_rows
    write_rows(rows, file)


def _with_spread(row: Row) -> Row:
    """Return the row with its added and saved times as texts, for example "3 (2 to 5)"."""
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
    breakdown: bool,
) -> None:
    if workers < 2 or repeats < 1:
        raise InvalidInput(
            f"workers={workers}, repeats={repeats} are too few to time an exchange; give 2 or "
            "more workers and 1 or more repeats"
        )
    for field, values, allowed in (
        ("schedule", schedules, SCHEDULES),
        ("algorithm", [algorithm], ("auto", *ALGORITHMS)),
    ):
        unknown = [value for value in values if value not in allowed]
        if unknown or not values:
            value = repr(unknown[0]) if unknown else "nothing"
            raise InvalidInput(f"{field}={value} is not known; allowed: {', '.join(allowed)}")
    words = [name for name in cases if name in WORD_CASES]
    own = [name for name in schedules if SCHEDULES[name].into_next]
    if words and own:
        raise InvalidInput(
            f"schedule={own[0]!r} updates dense layers one by one, but the gradient of "
            f"{words[0]!r} is sparse (rows of an embedding); remove the schedule or the model"
        )
    if breakdown and "sequential" not in schedules:
        raise InvalidInput(
            "--breakdown requires the schedule sequential; add sequential to --schedules"
        )
    if breakdown and words:
        raise InvalidInput(
            f"--breakdown requires dense gradients, but the gradient of {words[0]!r} is sparse; "
            f"remove {words[0]!r} from --cases"
        )
    refuse_unmetered(algorithm, network)
