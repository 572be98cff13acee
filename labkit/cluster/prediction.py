"""Validated parameters of `Cluster.predict`, and concatenation of the outputs of its ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from labkit import models
from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.experiment.data import leaves
from labkit.experiment.experiment import parse_strategy
from labkit.network import Slowdown
from labkit.records.run import Run
from labkit.strategies import AllReduce, Batch, Strategy


@dataclass(frozen=True)
class PredictionSpec:
    """Parameters of a prediction, and the fields of an experiment that strategies validate.

    Attributes:
        file: Path of the file in which Keras has saved the trained model.
        strategy: Strategy that divides the work among the ranks.
    """

    file: str
    strategy: Strategy
    workers: int
    blocks: int | None = None
    max_slices: None = None
    grid_layers: None = None
    time_steps: None = None
    epoch_steps: None = None
    # A prediction has no training batch, so its batch size is unlimited.
    batch_size: int = sys.maxsize
    rows: int = sys.maxsize  # A prediction has no training set, so its number of rows is unlimited.
    network: None = None
    batch_weights: None = None
    callbacks: None = None
    threads: int = 1
    data_partition: str = "iid"
    failed_workers: tuple[int, ...] = ()
    input_mode: str = "shard"
    clock: str = "wall"
    precision: str = "float32"
    optimizer: str = "sgd"
    optimizer_options: Mapping[str, JSON] = field(default_factory=dict)
    slowdowns: Mapping[int, Slowdown] = field(default_factory=dict)

    def model(self, is_local: bool) -> str | bytes:
        """Return the path of the model file if `is_local`, or else the content of the file."""
        return self.file if is_local else Path(self.file).read_bytes()


def plan_prediction(
    run: Run | Path | str, strategy: Strategy | str | None, workers: int | None, available: int
) -> PredictionSpec:
    """Return the parameters of `Cluster.predict` on a cluster with `available` ranks.

    Raises:
        InvalidInput: The file is missing, there are too few ranks, or the strategy rejects the
            model.
        LabkitError: The run has no saved model.
    """
    trained = run.experiment if isinstance(run, Run) else {}
    file = run.model_file if isinstance(run, Run) else Path(run)
    if not file.is_file():
        raise InvalidInput(
            f"{str(run)!r} has no model file: give a completed run, or an existing .keras file"
        )
    if workers is None:
        workers = trained.get("workers", available) if strategy is None else available
    if not isinstance(workers, int) or not 1 <= workers <= available:
        raise InvalidInput(
            f"workers={workers} on a cluster of {available} ranks; give workers=1 to "
            f"{available}, or use Cluster(workers={workers})"
        )
    chosen = parse_strategy(strategy or trained.get("strategy") or AllReduce())
    if not isinstance(chosen, Strategy):
        raise InvalidInput(
            f"strategy={chosen!r} is no strategy: give an object, such as lk.AllReduce()"
        )
    named = isinstance(trained.get("model"), str)
    blocks = models.blocks(trained["model"], trained["model_options"]) if named else None
    fields = ("precision", "optimizer", "optimizer_options") if strategy is None and trained else ()
    values = {name: trained[name] for name in fields}
    prediction = PredictionSpec(str(file.resolve()), chosen, workers, blocks, **values)
    # With a strategy that has `uses_programs`, each worker has the complete model. A prediction
    # with the complete model on each worker needs no check.
    if not chosen.uses_programs:
        chosen.check(prediction)
    return prediction


def validate_rows(x: Batch, batch_size: int) -> None:
    """Raise an error unless `x` consists of rows that can be divided among the ranks.

    Raises:
        InvalidInput: `x` contains something other than arrays, or arrays of different lengths. The
            error also occurs if `batch_size` is below 1.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidInput(
            f"batch_size={batch_size!r} is impossible; give a whole number of at least 1"
        )
    for leaf in leaves(x):
        if not getattr(leaf, "shape", ()):
            raise InvalidInput(
                f"x contains a {type(leaf).__name__}; give an array, or nested structures of "
                "arrays, with one row per sample: use numpy.asarray"
            )
    rows = {len(leaf) for leaf in leaves(x)}
    if len(rows) != 1:
        raise InvalidInput(
            f"the arrays of x have different numbers of rows, {sorted(rows)}; give arrays "
            "with equal numbers of rows"
        )


def join_parts(parts: Sequence[Batch | None]) -> Batch:
    """Concatenate outputs in rank order; the output of a rank without rows is None."""
    results = [part for part in parts if part is not None]
    if named := [part for part in results if isinstance(part, dict)]:
        return {key: join_parts([part[key] for part in named]) for key in named[0]}
    if arrays := [part for part in results if isinstance(part, np.ndarray)]:
        return np.concatenate(arrays)
    leaves_ = map(join_parts, zip(*results, strict=True))
    return tuple(leaves_) if isinstance(results[0], tuple) else list(leaves_)
