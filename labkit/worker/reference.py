"""One process's steps, which serve every run on the same batches: its weights, kept by content."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.metadata import version
from typing import ClassVar

import keras
import numpy as np
import tensorflow as tf

from labkit.common.canonical_json import JSON, digest
from labkit.common.data_partition import IID
from labkit.common.paths import cache_folder, fingerprint
from labkit.communicator import alone
from labkit.exchange.hooks import Hook, Rows, Variables, seam
from labkit.experiment.batches import plan_of
from labkit.experiment.experiment import Experiment
from labkit.strategies import AllReduce
from labkit.worker.array_cache import ArrayCache
from labkit.worker.feed import Source, global_batches
from labkit.worker.session import TrainingSession

LIMIT = 2**29  # bytes of weights that are kept
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}  # of the largest weight
UNIT = 24  # rows: 2, 3, 4, 6, 8 and 12 parts have the same remainders as of a large batch

# What one process is not told, or what does not change its weights.
_OF_RANKS = (
    *("name", "strategy", "workers", "threads", "network", "capacities", "feed"),
    *("learning_rate", "learning_rate_scaling", "warmup_epochs", "optimizer_options"),
    *("validation", "metrics", "callbacks", "repeats", "gate", "clock", "compute", "slow"),
    *("later", "order"),
)


def fewer(rows: int, batch_size: int, parts: int) -> tuple[int, int]:
    """Rows of a data set and of a batch that leave the same remainders when they are cut.

    8,292 rows in batches of 1024, each in 8 parts -> 540 in batches of 64: there are as many
    batches, 8 whole ones and one of a part, and what is wrong with these is wrong with those.

    Args:
        rows: of the data set.
        batch_size: of a batch.
        parts: into which a batch is cut.
    """
    unit = math.lcm(UNIT, parts)
    if batch_size <= 3 * unit:
        return rows, batch_size
    full, rest = divmod(rows, batch_size)
    size = 2 * unit + 1 + (batch_size - 1) % unit  # more than any rest
    if rest > 2 * unit:
        rest = unit + 1 + (rest - 1) % unit
    return full * size + rest, size


def weights(
    short: Experiment,
    source: Source,
    parts: int,
    learning: TrainingSession,
) -> list[np.ndarray]:
    """The weights after one process's steps on the batches that ranks see together.

    Args:
        short: the experiment of the ranks.
        source: its data.
        parts: into which ranks divide a batch among them.
        learning: the ranks' session, which knows the effective learning rate.
    """
    shelf = ArrayCache(cache_folder("references"), LIMIT)
    key = _key(short, source, parts, learning.optimizer_record())
    found = shelf.take(key)
    if found is None:
        found = _train(short, source, parts, learning.optimizer())
        shelf.put(key, found)
    return found


def track(
    short: Experiment, source: Source, parts: int, optimizer: keras.optimizers.Optimizer
) -> None:
    """The same steps once more, by an optimizer that writes them down."""
    _train(short, source, parts, optimizer)


def _train(
    short: Experiment, source: Source, parts: int, optimizer: keras.optimizers.Optimizer
) -> list[np.ndarray]:
    process = alone()
    # Ranks may have been fed by rank 0; one process has all rows.
    off: dict[str, object] = {
        "clock": "wall",
        "compute": None,
        "slow": {},
        "later": (),
        "order": (),
    }
    single = short.replace(workers=1, capacities=None, strategy=AllReduce(), **off)
    one = TrainingSession(single, process, source)
    one.feed.validation = None
    if not callable(source.train):
        shares = short.capacities or (1.0,) * parts
        plan = plan_of(short, source.rows(process), shares, source.labels)
        one.feed.train = global_batches(source, plan, short.epochs)
    process.close()
    one.compile(optimizer)  # the rate is scaled by the number of ranks in both
    seam(one.model).put_on(AddUpRows())
    one.fit([])
    return [weight.numpy() for weight in one.model.weights]


def _key(short: Experiment, source: Source, parts: int, optimizer: JSON) -> str:
    """What the weights depend on, and nothing else: runs that differ in more share them."""
    record = {name: v for name, v in short.to_json().items() if name not in _OF_RANKS}
    batches: JSON = None
    if short.feed == "scatter" or short.shards != IID:  # then each rank shuffles its own rows
        batches = [parts, list(short.capacities or ())]
    versions = [version(name) for name in ("keras", "tensorflow", "numpy")]
    rows = None if source.arrays is None else len(keras.tree.flatten(source.arrays)[0])
    return digest([record, batches, rows, optimizer, fingerprint(), *versions])


class AddUpRows(Hook):
    """Lets the optimizer see one gradient a row of an embedding, as ranks that add up do.

    Of a word that comes twice, Keras's Adam and its kin square each part of its gradient alone.
    """

    name: ClassVar[str] = "dense"

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Each gradient as a tensor of its variable's shape."""
        whole = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
        return inner(whole, variables)
