"""The command `labkit bench transport`: its options and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from labkit.bench.command import AS_JSON, TIMES, format_rows, names, sizes, write_rows
from labkit.bench.timing import Row
from labkit.bench.transports import measuring
from labkit.bench.transports.starting import GRPC, LOOPBACK, PLACES, WITHIN, predict
from labkit.common.terminal import say
from labkit.common.units import bytes_text

FOUR = 2**22  # The constant FOUR is a size of 4 MiB in bytes.
AGAINST = (GRPC, "two_sided")


@click.command("transport")
@click.option(
    "--bytes",
    "sizes",
    default=None,
    callback=sizes,
    help="Sizes of the transferred array in bytes, separated by commas.",
)
@click.option(
    "--repeats",
    default=5,
    show_default=True,
    help="Number of times that each transport is timed with each size.",
)
@click.option(
    "--transports",
    default=None,
    callback=names,
    help="Transports to time, separated by commas.  [default: all]",
)
@click.option(
    "--namespaces/--no-namespaces",
    default=True,
    show_default=True,
    help="Also measure a real link between two network namespaces (Linux, root, iproute2).",
)
@click.option(
    "--rate",
    default="1Gb",
    show_default=True,
    help="Rate of the link between the network namespaces, in bits/s.",
)
@click.option(
    "--train",
    is_flag=True,
    help="Also time training steps with each transport, and training to 90 % accuracy.",
)
@AS_JSON
def command(
    sizes: list[int],
    repeats: int,
    transports: list[str],
    namespaces: bool,
    rate: str,
    train: bool,
    file: Path | None,
) -> None:
    """Measure the transfer of an array by gRPC, by two-sided and by one-sided messages."""
    wanted = measuring.plan(transports, namespaces=namespaces, rate=rate)
    for sentence in wanted.left_out:
        say(f"left out: {sentence}", err=True)
    sizes = sizes or list(measuring.SIZES)
    rows = measuring.measure(wanted, sizes, repeats)
    columns = (
        {"case": "transport", "bytes": "bytes"} | TIMES | {"bandwidth": "B/s", "copies": "copies"}
    )
    columns |= {"processor_ns": "CPU ns per byte", "tcp": "TCP bytes / bytes"}
    say(format_rows(rows, columns | {"correct": "bit-identical"}))
    for way in wanted.ways:
        say(f"{way.name}: {len(way.copies)} copies: {'; '.join(way.copies)}")
    for sentence in ratio_sentences(rows):
        say(sentence)
    trained = measuring.train(wanted, repeats=min(repeats, 3)) if train else []
    if trained:
        columns = {"case": "transport", "bytes": "bytes of weights"} | TIMES
        say(
            format_rows(
                trained, columns | {"seconds_to_target": "s to 90 %", "accuracy": "accuracy"}
            )
        )
    rdma = predict(sizes)
    columns = {"case": "predicted, not measured", "bytes": "bytes", "median_ms": "ms"}
    say(format_rows(rdma, columns | {"bandwidth": "B/s", "copies": "copies"}))
    write_rows([*rows, *trained, *rdma], file)


def seconds(rows: Sequence[Row], transport: str, place: str, nbytes: int) -> float | None:
    """Return the median seconds of a transport for a place and size; None without a row."""
    for row in rows:
        wanted = (row.get("transport"), row.get("place"), row["bytes"], row["what"])
        if wanted == (transport, place, nbytes, "exchange"):
            return float(row["median_ms"] or 0.0) / 1e3
    return None


def ratio(rows: Sequence[Row], other: str, at: str, place: str, nbytes: int = FOUR) -> float | None:
    """Return a transport's time divided by the time of one-sided messages (static placement).

    Args:
        rows: Rows that `measure` returns.
        other: Name of the transport to compare with one-sided messages.
        at: Place (kind of connection) where the other transport was measured.
        place: Place (kind of connection) where one-sided messages were measured.
        nbytes: Size of the array in bytes.
    """
    slow, fast = seconds(rows, other, at, nbytes), seconds(rows, "one_sided", place, nbytes)
    return slow / fast if slow and fast else None


def ratio_sentences(rows: Sequence[Row], nbytes: int = FOUR) -> Iterator[str]:
    """Yield sentences that compare gRPC and two-sided messages with one-sided messages."""
    for place in PLACES:
        ratios = []
        for other in AGAINST:
            at = LOOPBACK if place in WITHIN and other == GRPC else place
            found = ratio(rows, other, at, place, nbytes)
            if found is None:
                continue
            ratios.append(f"{other} by {at} takes {found:.2f} times as long")
        if ratios:
            yield f"{bytes_text(nbytes)}, compared with one_sided by {place}: {'; '.join(ratios)}"
