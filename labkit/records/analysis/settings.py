"""Groups of runs that differ only in their seeds; each group is treated as one run."""

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
    """Completed runs that differ only in their seeds, treated as one run with repeats."""

    members: tuple[Run, ...] = ()

    @cached_property
    def metrics(self) -> Record:
        """Medians over seeds of all metrics, with the field `spread`, as in a run with repeats."""
        # The import is inside the function, because it also imports `Experiment`, which most
        # callers do not need.
        from labkit.records.run_metrics import aggregate

        return aggregate(self.seeds)

    @cached_property
    def history(self) -> pandas.DataFrame:
        """History rows of the runs with all seeds."""
        import pandas as pd

        return pd.concat([member.history for member in self.members], ignore_index=True)

    @property
    def seeds(self) -> list[Run]:
        """The runs of the individual seeds, one per seed."""
        return [seed for member in self.members for seed in member.seeds or [member]]


def group_seeds(runs: Sequence[Run]) -> list[Run]:
    """Combine runs that differ only in their seeds; runs without metrics remain separate.

    The groups are ordered by their first runs. Two runs with the same seed are not repeats, so the
    second run belongs to another group.
    """
    groups: dict[tuple[str, int], list[Run]] = {}
    occurrences: dict[str, int] = {}
    for index, run in enumerate(runs):
        fields = {name: value for name, value in run.experiment.items() if name not in _CHANCE}
        setting = json.dumps(fields, sort_keys=True)
        identity = json.dumps([setting, run.experiment.get("seed"), run.experiment.get("repeats")])
        occurrences[identity] = occurrences.get(identity, 0) + 1
        key = (setting, occurrences[identity]) if run.metrics else (str(index), 0)
        groups.setdefault(key, []).append(run)
    return [
        members[0] if len(members) == 1 else Seeds(members[0].path, tuple(members))
        for members in groups.values()
    ]
