"""Training in one process, whose cached weights are the reference of the equivalence check."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, TypeAlias
from zipfile import BadZipFile

import keras
import numpy as np
import tensorflow as tf

from labkit.common.canonical_json import JSON, digest
from labkit.common.files import cache_folder, fingerprint
from labkit.common.rows import IID
from labkit.communicator import single_rank
from labkit.exchange.hooks import Hook, Rows, Variables, hooks_of
from labkit.experiment.batches import plan_of
from labkit.experiment.experiment import Experiment
from labkit.keras import without_replica_sum
from labkit.records.store import write_atomically
from labkit.strategies import AllReduce
from labkit.worker.feed import DataSource, global_batches
from labkit.worker.session import TrainingSession


class ArrayCache:
    """A folder of array files; each file is written atomically, so readers see complete files.

    Args:
        folder: Folder of the cached files.
        limit: Maximum number of bytes of all files together.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit

    def load(self, key: str) -> list[np.ndarray] | None:
        """Return a key's arrays and mark their file as used; None if no readable file exists."""
        file = self._file(key)
        try:
            data = file.read_bytes()
            os.utime(file)
        except FileNotFoundError:  # Another process may have just removed the file.
            return None
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                return [archive[f"arr_{number}"] for number in range(len(archive.files))]
        except (BadZipFile, EOFError, KeyError, ValueError):
            return None  # If the result is None, the caller computes and stores the arrays again.

    def store(self, key: str, arrays: Sequence[np.ndarray]) -> None:
        """Store arrays under a key; remove the least recently used files above the limit."""
        content = io.BytesIO()
        np.savez(content, *arrays)
        data = content.getvalue()
        if len(data) > self._limit:
            return
        write_atomically(self._file(key), data)
        self._make_room()

    def _make_room(self) -> None:
        files = [(file.stat(), file) for file in self._folder.glob("*.npz")]
        files.sort(key=lambda entry: entry[0].st_mtime_ns, reverse=True)
        total = 0
        for status, file in files:
            total += status.st_size
            if total > self._limit:
                file.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.npz"


# A `Watch` function returns a copy of an optimizer; the copy logs its steps.
Watch: TypeAlias = Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer]

LIMIT = 2**29  # The cached weights take at most `LIMIT` bytes in total.
# The tolerance of weights is relative to the largest absolute weight.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
# The unit of 24 rows keeps remainders the same. The number 24 is a multiple of 2, 3, 4, 6, 8 and
# 12.
UNIT = 24

# The fields in `_OF_RANKS` do not affect the weights from training in one process.
_OF_RANKS = (
    *("name", "strategy", "workers", "threads", "network", "batch_weights", "input_mode"),
    *("learning_rate", "learning_rate_scaling", "warmup_epochs", "optimizer_options"),
    *("validation", "metrics", "callbacks", "repeats", "verify", "clock", "virtual"),
    "stragglers",
)


def fewer(rows: int, batch_size: int, parts: int) -> tuple[int, int]:
    """Return smaller sizes of data set and batch that reveal the same errors.

    Example: for 8 parts, 8,292 rows in batches of 1024 become 540 rows in batches of 64. The large
        data set has 8 full batches and one partial batch. The small data set has equally many
        batches, and reveals the same errors.

    Args:
        rows: Number of rows in the data set.
        batch_size: Number of rows in a global batch.
        parts: Number of parts into which each batch is divided.
    """
    unit = math.lcm(UNIT, parts)
    if batch_size <= 3 * unit:
        return rows, batch_size
    full, rest = divmod(rows, batch_size)
    # The new batch size is larger than any remainder of rows.
    size = 2 * unit + 1 + (batch_size - 1) % unit
    if rest > 2 * unit:
        rest = unit + 1 + (rest - 1) % unit
    return full * size + rest, size


def weights(
    short: Experiment,
    source: DataSource,
    parts: int,
    learning: TrainingSession,
) -> list[np.ndarray]:
    """Return the weights after training in one process on the same global batches as the ranks.

    Args:
        short: Shortened experiment, which the ranks train as well.
        source: Training data of the shortened experiment.
        parts: Number of parts into which the ranks divide each batch.
        learning: Training session of the ranks, from which the actual learning rate is read.
    """
    cache = ArrayCache(cache_folder("references"), LIMIT)
    key = _key(short, source, parts, learning.optimizer_record())
    cached = cache.load(key)
    if cached is None:
        cached = _train(short, source, parts, learning.optimizer)
        cache.store(key, cached)
    return cached


def log_steps(
    short: Experiment, source: DataSource, parts: int, learning: TrainingSession, watch: Watch
) -> None:
    """Repeat the training in one process, with an optimizer that logs its steps."""
    _train(short, source, parts, lambda: TrainingSession.optimizer(learning), watch)


def _train(
    short: Experiment,
    source: DataSource,
    parts: int,
    make: Callable[[], keras.optimizers.Optimizer],
    watch: Watch = lambda optimizer: optimizer,
) -> list[np.ndarray]:
    process = single_rank()
    # The reference training reads all rows itself, even if rank 0 sends rows to the ranks.
    defaults: dict[str, object] = {
        "clock": "wall",
        "stragglers": {},
    }
    single = short.replace(workers=1, batch_weights=None, strategy=AllReduce(), **defaults)
    session = TrainingSession(single, process, source)
    session.feed.validation = None
    if not callable(source.train):
        shares = short.batch_weights or (1.0,) * parts
        plan = plan_of(short, source.rows(process), shares, source.labels)
        session.feed.train = global_batches(source, plan, short.epochs)
    process.close()
    # If the user compiled the model with an optimizer, training uses the same object. A copy of the
    # optimizer may be incomplete. Without an optimizer from the user, training creates an optimizer
    # with the learning rate of the ranks.
    session.compile(
        watch(
            make()
            if session.user_optimizer is None
            else without_replica_sum(session.user_optimizer)
        )
    )
    hooks_of(session.model).add_hook(DenseGradients())
    session.fit([])
    return [weight.numpy() for weight in session.model.weights]


def _key(short: Experiment, source: DataSource, parts: int, optimizer: JSON) -> str:
    """Return a cache key that covers everything that affects the trained weights."""
    record = {name: v for name, v in short.to_json().items() if name not in _OF_RANKS}
    batches: JSON = None
    if (
        short.input_mode == "scatter" or short.data_partition != IID
    ):  # With input_mode="scatter" or a data partition, each rank shuffles its own rows.
        batches = [parts, list(short.batch_weights or ())]
    versions = [version(name) for name in ("keras", "tensorflow", "numpy")]
    rows = None if source.arrays is None else len(keras.tree.flatten(source.arrays)[0])
    return digest([record, batches, rows, optimizer, fingerprint(), *versions])


class DenseGradients(Hook):
    """A hook that makes gradients of embeddings dense, as ranks do before they add gradients.

    A word that occurs twice in a batch has two sparse gradients. Keras's Adam squares the two
    sparse gradients separately, instead of their sum. Optimizers similar to Adam also square sparse
    gradients separately.
    """

    name: ClassVar[str] = "dense"

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Apply each gradient as a dense tensor."""
        dense = [
            None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients
        ]
        return inner(dense, variables)
