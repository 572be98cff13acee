"""Runs of one setting that differ in their seeds, as one run with repeats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from labkit.records.run import Run
from labkit.records.store import Record

if TYPE_CHECKING:
    import pandas

_CHANCE = ("seed", "repeats")


@dataclass(frozen=True)
class Seeds(Run):
    """Completed runs with other seeds and otherwise equal parameters, to be read as one run."""

    members: tuple[Run, ...] = ()

    @cached_property
    def metrics(self) -> Record:
        """Medians over the seeds, and `spread`, as of a run with repeats."""
        # In the function: it imports what an experiment is, which reading one run does not need.
        from labkit.records.measure import aggregate

        return aggregate(self.seeds)

    @cached_property
    def history(self) -> pandas.DataFrame:
        """The rows of all seeds."""
        import pandas as pd

        return pd.concat([member.history for member in self.members], ignore_index=True)

    @property
    def seeds(self) -> list[Run]:
        """One run a seed."""
        return [seed for member in self.members for seed in member.seeds or [member]]


def gathered(runs: Sequence[Run]) -> list[Run]:
    """Each setting once, in the order of its first run; what did not complete stays alone.

    Runs with the same seed are no repeats of each other, but of another setting: the same again.
    """
    found: dict[tuple[str, int], list[Run]] = {}
    times: dict[str, int] = {}
    for place, run in enumerate(runs):
        fields = {name: value for name, value in run.experiment.items() if name not in _CHANCE}
        setting = json.dumps(fields, sort_keys=True)
        whole = json.dumps([setting, run.experiment.get("seed"), run.experiment.get("repeats")])
        times[whole] = times.get(whole, 0) + 1
        key = (setting, times[whole]) if run.metrics else (str(place), 0)
        found.setdefault(key, []).append(run)
    return [own[0] if len(own) == 1 else Seeds(own[0].path, tuple(own)) for own in found.values()]
