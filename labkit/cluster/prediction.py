"""What is asked of ranks that predict: whose model, which strategy, how many; checked before."""

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
class Prediction:
    """A question to a strategy that only predicts, see `labkit.strategies.strategy.Question`.

    Attributes:
        file: the trained model, as Keras has saved it.
        strategy: how the ranks share the work.
    """

    file: str
    strategy: Strategy
    workers: int
    blocks: int | None = None
    widest: None = None
    planes: None = None
    time_steps: None = None
    epoch_steps: None = None
    batch_size: int = sys.maxsize  # of training; there is none
    rows: int = sys.maxsize  # likewise
    network: None = None
    capacities: None = None
    callbacks: None = None
    threads: int = 1
    shards: str = "iid"
    gone: tuple[int, ...] = ()
    feed: str = "shard"
    clock: str = "wall"
    precision: str = "float32"
    optimizer: str = "sgd"
    optimizer_options: Mapping[str, JSON] = field(default_factory=dict)
    slowed: Mapping[int, Slowdown] = field(default_factory=dict)

    def model(self, is_local: bool) -> str | bytes:
        """What ranks load: the file, or what it holds where they may not see it."""
        return self.file if is_local else Path(self.file).read_bytes()


def ask(
    run: Run | Path | str, strategy: Strategy | str | None, workers: int | None, available: int
) -> Prediction:
    """The question of `Cluster.predict` on a cluster of so many ranks.

    Raises:
        InvalidInput: no such file, too many ranks, or what the strategy refuses.
        LabkitError: a run without a model.
    """
    trained = run.experiment if isinstance(run, Run) else {}
    file = run.model_file if isinstance(run, Run) else Path(run)
    if not file.is_file():
        raise InvalidInput(f"{str(run)!r} is no file: give a completed run, or a .keras file")
    if workers is None:
        workers = trained.get("workers", available) if strategy is None else available
    if not isinstance(workers, int) or not 1 <= workers <= available:
        raise InvalidInput(
            f"workers={workers} on a cluster of {available}; give workers=1 to {available}, or use "
            f"Cluster(workers={workers})"
        )
    chosen = parse_strategy(strategy or trained.get("strategy") or AllReduce())
    if not isinstance(chosen, Strategy):
        raise InvalidInput(f"strategy={chosen!r} is none: give an object, such as lk.AllReduce()")
    named = isinstance(trained.get("model"), str)
    blocks = models.blocks(trained["model"], trained["model_options"]) if named else None
    fields = ("precision", "optimizer", "optimizer_options") if strategy is None and trained else ()
    own = {name: trained[name] for name in fields}  # with which it has been asked before
    prediction = Prediction(str(file.resolve()), chosen, workers, blocks, **own)
    if not chosen.plays:  # workers of programs train apart, but each has the whole model
        chosen.check(prediction)
    return prediction


def check_rows(x: Batch, batch_size: int) -> None:
    """Refuse what cannot be cut into rows.

    Raises:
        InvalidInput: no arrays, arrays of different lengths, a batch size below 1.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidInput(f"batch_size={batch_size!r} is impossible; give a whole number from 1")
    for leaf in leaves(x):
        if not getattr(leaf, "shape", ()):
            raise InvalidInput(
                f"x is an array, or a nest of arrays, with a row a sample; "
                f"got {type(leaf).__name__}: use numpy.asarray"
            )
    rows = {len(leaf) for leaf in leaves(x)}
    if len(rows) != 1:
        raise InvalidInput(f"the arrays of x must have the same number of rows; got {sorted(rows)}")


def together(parts: Sequence[Batch | None]) -> Batch:
    """One result of what the ranks returned, in their order; None where a rank holds nothing."""
    held = [part for part in parts if part is not None]
    # A nest of outputs is joined leaf by leaf.
    if named := [part for part in held if isinstance(part, dict)]:
        return {key: together([part[key] for part in named]) for key in named[0]}
    if arrays := [part for part in held if isinstance(part, np.ndarray)]:
        return np.concatenate(arrays)
    each = map(together, zip(*held, strict=True))
    return tuple(each) if isinstance(held[0], tuple) else list(each)
