"""`labkit bench transport`: its options, and its tables."""

from __future__ import annotations

from pathlib import Path

import click

from labkit.bench.command import AS_JSON, TIMES, format_rows, names, numbers, write_rows
from labkit.bench.transports import measuring, predicted, ratios
from labkit.common.terminal import say


@click.command("transport")
@click.option("--bytes", "sizes", default=None, callback=numbers, help="Sizes with commas.")
@click.option("--repeats", default=5, show_default=True, help="Rounds over all ways and sizes.")
@click.option("--transports", default=None, callback=names, help="With commas; default: all.")
@click.option(
    "--namespaces/--no-namespaces",
    default=True,
    show_default=True,
    help="Also over a real link between two of them (Linux, root, iproute2).",
)
@click.option("--rate", default="1Gb", show_default=True, help="Of that link, bits/s.")
@click.option("--train", is_flag=True, help="Time training steps and the time to 90 %, too.")
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
    """Time one exchange by gRPC, two-sided, one-sided static and one-sided dynamic messages."""
    wanted = measuring.plan(transports, namespaces=namespaces, rate=rate)
    for sentence in wanted.left_out:
        say(f"left out: {sentence}", err=True)
    sizes = sizes or list(measuring.SIZES)
    rows = measuring.measure(wanted, sizes, repeats)
    columns = {"case": "way", "bytes": "bytes"} | TIMES | {"bandwidth": "B/s", "copies": "copies"}
    columns |= {"processor_ns": "processor ns a byte", "tcp": "bytes by TCP, times"}
    say(format_rows(rows, columns | {"correct": "bit by bit"}))
    for way in wanted.ways:
        say(f"{way.name}: {len(way.copies)} copies: {'; '.join(way.copies)}")
    for sentence in ratios.sentences(rows):
        say(sentence)
    trained = measuring.train(wanted, repeats=min(repeats, 3)) if train else []
    if trained:
        columns = {"case": "way", "bytes": "bytes of weights"} | TIMES
        say(
            format_rows(
                trained, columns | {"seconds_to_target": "s to 90 %", "accuracy": "accuracy"}
            )
        )
    rdma = predicted.predict(sizes)
    columns = {"case": "predicted, not measured", "bytes": "bytes", "median_ms": "ms"}
    say(format_rows(rdma, columns | {"bandwidth": "B/s", "copies": "copies"}))
    write_rows([*rows, *trained, *rdma], file)
