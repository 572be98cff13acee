"""How the compression of a run is called, and which run without any it is to be held against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from labkit.common.canonical_json import JSON
from labkit.compression import COMPRESSORS
from labkit.records.run import Run, flatten

DENSE = "no compression"
LONGEST = 80  # letters of a method's name
_HEAD = ("name", "network", "seed", "repeats")  # do not make another method


def called(compressor: JSON) -> str:
    """A compressor's record as a notebook would write it: `ErrorFeedback(TopK(ratio=0.01))`.

    Numbers are always said; words and switches, only where they are not the default.
    """
    if compressor is None:
        return DENSE
    if isinstance(compressor, list):
        return ", ".join(called(each) for each in compressor)
    if not isinstance(compressor, Mapping):
        return str(compressor)
    name = str(compressor.get("name", ""))
    inside = ", ".join(
        called(each) if isinstance(each, Mapping | list) else f"{field}={each}"
        for field, each in compressor.items()
        if field != "name" and each is not None and not _goes_without_saying(name, field, each)
    )
    return f"{name}({inside})" if inside else name


def compressor_of(run: Run) -> dict[str, JSON] | None:
    """The record of the run's compressor, or None."""
    found: dict[str, JSON] | None = (run.experiment.get("strategy") or {}).get("compressor")
    return found


def method(run: Run) -> str:
    """`TopK(ratio=0.01)`, `ErrorFeedback(OneBit)`, or `no compression`."""
    text = called(compressor_of(run))
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def task(run: Run) -> dict[str, JSON]:
    """What is trained, and on how many ranks: all but the strategy, the network and the seeds."""
    return {name: value for name, value in fields_of(run).items() if name != "strategy"}


def baseline_of(run: Run, runs: Iterable[Run]) -> Run | None:
    """The run without compression that is equal otherwise.

    On the same network, where there is one; then with the same algorithm and schedule.
    """
    if compressor_of(run) is None:
        return None
    wanted = task(run)
    found = [other for other in runs if compressor_of(other) is None and task(other) == wanted]
    return min(found, key=lambda other: _unlike(other, run), default=None)


def _unlike(one: Run, other: Run) -> tuple[bool, int]:
    mine, yours = (flatten(each.experiment.get("strategy") or {}) for each in (one, other))
    differing = [name for name in mine | yours if mine.get(name) != yours.get(name)]
    network = one.experiment.get("network") != other.experiment.get("network")
    # A tuple: no likeness of the strategies makes up for another network.
    return network, sum(not name.startswith("compressor") for name in differing)


def fields_of(run: Run) -> dict[str, JSON]:
    """All that makes it another method, or another task."""
    return {name: value for name, value in run.experiment.items() if name not in _HEAD}


def _goes_without_saying(name: str, field: str, value: JSON) -> bool:
    # A record may name a compressor of an earlier labkit, or of a notebook's own.
    if name not in COMPRESSORS or not isinstance(value, str | bool):
        return False
    known = COMPRESSORS[name].model_fields.get(field)
    return known is not None and known.default == value
