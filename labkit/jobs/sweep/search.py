"""What is searched for, and among what: the record of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.jobs.sweep.grid import LARGEST, Axis, Draw
from labkit.records import store


@dataclass(frozen=True)
class Search:
    """What is searched for: a number of the runs that shall be large, or small.

    Attributes:
        metric: its name; `accuracy` is that of held-out data, `test_accuracy` in records.
        maximize: whether it shall be large.
        trials: members to try.
        prune: end those early that promise less than others at the same step, by this pruner of
            Optuna's; None: none. (Records from before there was a choice say true for the median.)
        sampler: Optuna's.
        seed: of the sampler.
        axes: what each parameter may be.
        fixed: parameters of all members.
    """

    metric: str
    maximize: bool
    trials: int
    prune: str | None
    sampler: str
    seed: int
    axes: Mapping[str, Axis]
    fixed: Mapping[str, JSON]

    def __post_init__(self) -> None:
        if not 1 <= self.trials <= LARGEST:
            raise InvalidInput(f"--trials {self.trials} is impossible; give 1 to {LARGEST:,}")

    def to_json(self) -> dict[str, JSON]:
        """As the sweep's record has it."""
        axes = {
            name: asdict(axis) if isinstance(axis, Draw) else list(axis)
            for name, axis in self.axes.items()
        }
        return asdict(replace(self, axes={})) | {"axes": axes}


def of_record(record: store.Record) -> Search:
    """The search of a sweep's record.

    Raises:
        LabkitError: it is not one.
    """
    try:
        axes = {
            name: Draw(**axis) if isinstance(axis, dict) else tuple(axis)
            for name, axis in record["axes"].items()
        }
        prune = {True: "median", False: None}.get(record["prune"], record["prune"])
        return Search(**{**record, "axes": axes, "prune": prune})
    except (TypeError, KeyError, AttributeError) as error:
        raise LabkitError(f"the sweep's record of its search is odd: {error}") from error
