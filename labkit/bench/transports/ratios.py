"""How many times as long one way takes as another, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.bench.timing import Row
from labkit.bench.transports.ways import GRPC, LOOPBACK, PLACES, WITHIN
from labkit.common.units import bytes_text

FOUR = 2**22  # bytes
AGAINST = (GRPC, "two_sided")


def seconds(rows: Sequence[Row], transport: str, place: str, nbytes: int) -> float | None:
    """The median of a way and size, s; None where it was not timed."""
    for row in rows:
        wanted = (row.get("transport"), row.get("place"), row["bytes"], row["what"])
        if wanted == (transport, place, nbytes, "exchange"):
            return float(row["median_ms"] or 0.0) / 1e3
    return None


def ratio(rows: Sequence[Row], other: str, at: str, place: str, nbytes: int = FOUR) -> float | None:
    """How many times as long as one-sided static in a place another transport takes elsewhere.

    Args:
        rows: of `measure`.
        other: the other transport; at: its place.
        place: of the one-sided one.
        nbytes: of the array.
    """
    slow, fast = seconds(rows, other, at, nbytes), seconds(rows, "one_sided", place, nbytes)
    return slow / fast if slow and fast else None


def sentences(rows: Sequence[Row], nbytes: int = FOUR) -> Iterator[str]:
    """Of one-sided static against gRPC and against two-sided: within a host, then over TCP."""
    for place in PLACES:
        said = []
        for other in AGAINST:
            at = LOOPBACK if place in WITHIN and other == GRPC else place
            found = ratio(rows, other, at, place, nbytes)
            if found is None:
                continue
            said.append(f"{other} by {at} takes {found:.2f} times as long")
        if said:
            yield f"{bytes_text(nbytes)}, against one_sided by {place}: {'; '.join(said)}"
