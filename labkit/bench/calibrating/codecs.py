"""What compressors take, while all ranks encode."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.bench.compression import in_this_process, named
from labkit.bench.timing import Row
from labkit.communicator import Communicator
from labkit.compression import Compressor
from labkit.forecast import CodecCost, Spread


def codecs(
    communicator: Communicator,
    compressors: Sequence[Compressor],
    sizes: Sequence[int],
    repeats: int,
) -> list[CodecCost]:
    """On each rank: encode and decode gradients of so many bytes; what has no `encode`, a step."""
    described = [each.to_json() for each in compressors]
    found = []
    for nbytes in sizes:
        communicator.meet("the next size of a calibration")
        rows = in_this_process(described, nbytes // 4, repeats)
        for compressor in compressors:
            own = {row["what"]: row for row in rows if row["case"] == named(compressor)}
            found.append(_cost(compressor, own))
    return found


def _cost(compressor: Compressor, rows: dict[str | float | None, Row]) -> CodecCost:
    encode = rows.get("encode") or rows["reduce"]
    nothing = Spread(median=0.0, low=0.0, high=0.0)
    return CodecCost(
        compressor=compressor.to_json(),
        nbytes=4 * int(encode["elements"] or 0),
        encode=_spread(encode),
        decode=_spread(rows["decode"]) if "decode" in rows else nothing,
        payload=int(encode["bytes"] or 0),
    )


def _spread(row: Row) -> Spread:
    low, median, high = (float(row[name] or 0) / 1e3 for name in ("p5_ms", "median_ms", "p95_ms"))
    return Spread(median=median, low=low, high=high, count=int(row["repeats"] or 1))
