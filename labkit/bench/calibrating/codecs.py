"""What compressors take, while all ranks encode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.bench.compression import in_this_process, named, without_fields
from labkit.bench.timing import Row
from labkit.common.canonical_json import JSON, digest
from labkit.communicator import Communicator
from labkit.compression import Compressor, parse
from labkit.experiment import Experiment
from labkit.forecast import CodecCost, Spread


def wanted(
    given: Sequence[Compressor | Mapping[str, JSON] | str] | None, experiments: Sequence[Experiment]
) -> list[Compressor]:
    """Those that are given (None: all that need no fields) and those of strategies, each once."""
    found = without_fields() if given is None else [parse(each) for each in given]
    found += [own for each in experiments if (own := each.strategy.lossy) is not None]
    return list({digest(each.to_json()): each for each in found}.values())


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
