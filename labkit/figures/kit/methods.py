"""How the compression of a run is called, and which run without any it is to be held against."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from labkit.figures.kit import entries as naming
from labkit.figures.kit.called import called
from labkit.figures.kit.entries import LONGEST_LABEL, Entry
from labkit.records.run import Run, flatten

_HEAD = ("name", "network", "seed", "repeats")  # do not make another method


def compressor_of(run: Run) -> Any:
    """The record of the run's compressor, or None."""
    return (run.experiment.get("strategy") or {}).get("compressor")


def method(run: Run) -> str:
    """`TopK(ratio=0.01)`, `ErrorFeedback(OneBit)`, or `no compression`."""
    text = called(compressor_of(run))
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"


def by_method(shown: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Runs that differ in network and seeds only, under the name of what they do."""
    groups: dict[str, list[Entry]] = {}
    for entry in shown:
        groups.setdefault(json.dumps(_fields(entry.run), sort_keys=True), []).append(entry)
    firsts = [group[0].run for group in groups.values()]
    names = [method(run) for run in firsts]
    if len(set(names)) < len(names):
        names = naming.labels(firsts)
    return dict(zip(names, groups.values(), strict=True))


def task(run: Run) -> dict[str, Any]:
    """What is trained, and on how many ranks: all but the strategy, the network and the seeds."""
    return {name: value for name, value in _fields(run).items() if name != "strategy"}


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
    return network, sum(not name.startswith("compressor") for name in differing)


def _fields(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.experiment.items() if name not in _HEAD}
