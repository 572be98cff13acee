"""A search over parameters: its objective, and the possible values of each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.jobs.sweep.grid import LARGEST, Axis, Draw
from labkit.records import store


@dataclass(frozen=True)
class Search:
    """A search that maximizes or minimizes a metric of the runs.

    Attributes:
        metric: Name of the metric; `accuracy` means the accuracy on held-out data, which records
            call `test_accuracy`.
        maximize: Whether the search maximizes the metric; if False, it minimizes the metric.
        trials: Total number of notebook runs that the search tries.
        prune: Name of Optuna's pruner; a pruner stops runs that are worse than other runs at the
            same step. None: no run is pruned. (In records of older labkit versions, true means the
            median pruner.)
        sampler: Name of Optuna's sampler.
        seed: Seed of the sampler.
        axes: Possible values of each searched parameter, or the distribution of these values.
        fixed: Parameters with the same value in all runs.
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
        """Return the fields as JSON, for the record of the sweep."""
        axes = {
            name: asdict(axis) if isinstance(axis, Draw) else list(axis)
            for name, axis in self.axes.items()
        }
        return asdict(replace(self, axes={})) | {"axes": axes}


def of_record(record: store.Record) -> Search:
    """Return the search that a sweep's record describes.

    Raises:
        LabkitError: The record does not describe a search.
    """
    try:
        axes = {
            name: Draw(**axis) if isinstance(axis, dict) else tuple(axis)
            for name, axis in record["axes"].items()
        }
        prune = {True: "median", False: None}.get(record["prune"], record["prune"])
        return Search(**{**record, "axes": axes, "prune": prune})
    except (TypeError, KeyError, AttributeError) as error:
        raise LabkitError(f"the sweep's record of its search is invalid: {error}") from error
