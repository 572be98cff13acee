"""Input pipelines, which give Keras each rank's part of every batch as a `tf.data.Dataset`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from labkit import datasets
from labkit.common.errors import InvalidInput
from labkit.common.rows import BatchPlan
from labkit.communicator import Communicator
from labkit.datasets import Shapes
from labkit.experiment import Experiment
from labkit.experiment.batches import plan_of
from labkit.experiment.data import labels_of
from labkit.keras import part_of, shard
from labkit.keras.whole_batch import print_on_first_rank
from labkit.programs.replica import Batches, Triple
from labkit.strategies import Batch
from labkit.worker.recorder import Position

VALIDATION_BATCH = 1024

Arrays: TypeAlias = tuple[Batch, Batch]  # `Arrays` holds the features x and the labels y.
OwnData: TypeAlias = Callable[[], tf.data.Dataset]


@dataclass
class Feed:
    """The training and validation data of one rank.

    Attributes:
        train: This rank's part of the global batches of all epochs. If `steps` is None, `train`
            contains one epoch only.
        steps: Number of training steps per epoch. If None, an epoch lasts until the user's dataset
            ends.
        validation: This rank's part of the validation batches, or None.
        shapes: Input and output shapes with which labkit builds a model that the experiment gives
            by name. If None, a callable must create the model.
        remake: Function that creates `train` again from its first batch. If None, each new iterator
            over `train` starts from the first batch.
        is_begun: Whether an iterator has already read from `train`.
    """

    train: tf.data.Dataset
    steps: int | None
    validation: tf.data.Dataset | None
    shapes: Shapes | None

    remake: Callable[[], tf.data.Dataset] | None = None
    is_begun: bool = False

    def after(self, position: Position) -> tf.data.Dataset:
        """Return the batches after a position; if `steps` is None, stop at the epoch's end."""
        train = self.train
        # A second iterator over the user's dataset may shuffle differently, so a new dataset is
        # created.
        if self.is_begun and self.remake is not None:
            train = self.remake()
        self.is_begun = True
        if self.steps is None:
            for _ in range(position.epoch):
                next(iter(train), None)
        steps_done = position.done(self.steps)
        return train.skip(steps_done) if steps_done else train

    def ends_at(self, position: Position) -> bool:
        """Return whether a position is the end of its epoch, so that no batch follows."""
        if self.steps is None and position.step:
            return next(iter(self.after(position)), None) is None
        return position.step == self.steps


@dataclass(frozen=True)
class DataSource:
    """The data of an experiment: arrays, or a function that creates a `tf.data.Dataset`."""

    # The field `train` is None if another rank sends the rows to this rank.
    train: Arrays | OwnData | None
    validation: Arrays | OwnData | None
    shapes: Shapes | None

    @property
    def arrays(self) -> Arrays | None:
        """The arrays x and y, or None for a dataset or rows from rank 0."""
        return None if callable(self.train) else self.train

    @property
    def labels(self) -> np.ndarray | None:
        """The labels y if each row has exactly one number as label, else None."""
        labels = None if self.arrays is None else self.arrays[1]
        return labels if isinstance(labels, np.ndarray) and labels.ndim == 1 else None

    def feed(
        self,
        experiment: Experiment,
        communicator: Communicator,
        validation_ranks: Communicator,
        sample_rank: int | None,
    ) -> Feed:
        """Return the training and validation data of this rank.

        Args:
            experiment: Experiment that defines batch size, epochs, seed and batch weights.
            communicator: Communicator of the ranks that divide the training batches.
            validation_ranks: Communicator of the ranks that divide the validation data.
            sample_rank: Number of dimensions of one sample of x. The number of dimensions shows
                whether a dataset contains samples or batches.
        """
        shares = _shares(experiment, communicator) or (1.0,) * communicator.size
        validation = self.held_out(experiment, validation_ranks, sample_rank)
        if callable(self.train):
            make_dataset, size = self.train, experiment.batch_size

            def make_part() -> tf.data.Dataset:
                whole = _refuse_endless(
                    _batched(make_dataset(), size, sample_rank),
                    experiment.steps_per_epoch,
                    "dataset",
                )
                return shard(whole, communicator, shares)

            part = make_part()
            if (
                experiment.steps_per_epoch is None
                and part.cardinality() == tf.data.UNKNOWN_CARDINALITY
            ):
                text = (
                    "the dataset does not report its number of batches: without "
                    "steps_per_epoch=…, an epoch lasts until the dataset ends"
                )
                print_on_first_rank(communicator, text)
            return Feed(part, experiment.steps_per_epoch, validation, None, make_part)
        plan = plan_of(experiment, self.rows(communicator), shares, self.labels)
        train = _scattered if experiment.input_mode == "scatter" else _sharded
        rows = train(self.arrays, plan, communicator, experiment.epochs)
        return Feed(rows, plan.steps_per_epoch, validation, self.shapes)

    def batches(self, experiment: Experiment, sample_rank: int | None) -> Batches:
        """Return a function (worker, batch number) that returns the worker's training batch.

        Args:
            experiment: Experiment that defines batch size, seed, batch weights and workers.
            sample_rank: Number of dimensions of one sample of x. The number of dimensions shows
                whether a dataset contains samples or batches.
        """
        shares = experiment.batch_weights or (1.0,) * experiment.workers
        if callable(self.train):
            whole = _batched(self.train(), experiment.batch_size, sample_rank)
            whole = _refuse_endless(whole, experiment.steps_per_epoch, "dataset")
            return _in_turn([part_of(whole, worker, shares) for worker in range(len(shares))])
        # Arrays are None only with input_mode="scatter", which strategies that run programs never
        # use.
        assert self.arrays is not None
        arrays = keras.tree.map_structure(tf.constant, self.arrays)
        rows = len(keras.tree.flatten(self.arrays)[0])
        plan = plan_of(experiment, rows, shares, self.labels)
        local = lru_cache(2 * len(shares))(plan.local)

        def batch(worker: int, number: int) -> Triple:
            epoch, step = divmod(number, plan.steps_per_epoch)
            rows = local(worker, epoch)[step]
            x, y = keras.tree.map_structure(lambda leaf: tf.gather(leaf, rows), arrays)
            return x, y, None

        return batch

    def first(self, rows: int) -> DataSource:
        """Return a data source with only the first training rows; `tf.data` datasets stay whole."""
        if self.arrays is None:
            return self
        return replace(self, train=keras.tree.map_structure(lambda leaf: leaf[:rows], self.arrays))

    def rows(self, communicator: Communicator) -> int:
        """Return the number of training rows that rank 0 has read (collective)."""
        rows = None if self.arrays is None else len(keras.tree.flatten(self.arrays)[0])
        return int(communicator.broadcast_object(rows, label="the number of rows"))

    def held_out(
        self, experiment: Experiment, communicator: Communicator, sample_rank: int | None
    ) -> tf.data.Dataset | None:
        """Return this rank's part of the validation batches; None without validation data."""
        if self.validation is None:
            return None
        if callable(self.validation):
            batches = _batched(self.validation(), experiment.batch_size, sample_rank)
            batches = _refuse_endless(batches, None, "validation")
        else:
            batches = tf.data.Dataset.from_tensor_slices(self.validation).batch(VALIDATION_BATCH)
        return shard(batches, communicator, _shares(experiment, communicator)).cache()


def _shares(experiment: Experiment, communicator: Communicator) -> tuple[float, ...] | None:
    """Return the relative batch sizes of the surviving ranks, or None if the sizes are equal."""
    weights = experiment.batch_weights
    return None if weights is None else tuple(weights[number] for number in communicator.numbers)


def read(experiment: Experiment, communicator: Communicator | None = None) -> DataSource:
    """Read the experiment's data; with input_mode="scatter", only rank 0 reads training data."""
    if isinstance(experiment.dataset, str):
        scattering = communicator if experiment.input_mode == "scatter" else None
        shapes = datasets.check(experiment.dataset, experiment.dataset_options)
        if scattering is not None and scattering.rank > 0:
            held_out = scattering.broadcast_object(None, label="the validation data")
            return DataSource(None, experiment.validation or held_out, shapes)
        data = datasets.load(experiment.dataset, **experiment.dataset_options)
        held_out = (data.x_test, data.y_test)
        if scattering is not None:
            scattering.broadcast_object(held_out, label="the validation data")
        return DataSource((data.x_train, data.y_train), experiment.validation or held_out, shapes)
    if callable(experiment.dataset):
        return DataSource(experiment.dataset, experiment.validation, None)
    task = datasets.shapes_of(experiment.dataset, labels_of(experiment.validation))
    return DataSource(experiment.dataset, experiment.validation, task)


def global_batches(source: DataSource, plan: BatchPlan, epochs: int) -> tf.data.Dataset:
    """Return the global batches of all epochs, as a single process would read them."""
    return _gather(
        source.arrays, [rows for epoch in range(epochs) for rows in plan.global_batches(epoch)]
    )


def _sharded(
    arrays: Arrays | None, plan: BatchPlan, communicator: Communicator, epochs: int
) -> tf.data.Dataset:
    batches = [rows for epoch in range(epochs) for rows in plan.local(communicator.rank, epoch)]
    return _gather(arrays, batches)


def _scattered(
    arrays: Arrays | None, plan: BatchPlan, communicator: Communicator, epochs: int
) -> tf.data.Dataset:
    parts = None
    if communicator.rank == 0:
        rows_of_ranks = [plan.own_rows(rank) for rank in range(communicator.size)]
        parts = [keras.tree.map_structure(itemgetter(rows), arrays) for rows in rows_of_ranks]
    part = communicator.scatter(parts, label="the scatter of samples")
    batches = [rows for epoch in range(epochs) for rows in plan.places(communicator.rank, epoch)]
    return _gather(part, batches)


def _gather(arrays: Arrays | None, batches: list[np.ndarray]) -> tf.data.Dataset:
    """Return a dataset of batches; the rows of a batch are copied when the batch is read."""
    rows = np.concatenate(batches).astype(np.int64)
    lengths = [len(batch) for batch in batches]
    whole = keras.tree.map_structure(tf.constant, arrays)
    if len(set(lengths)) == 1 and lengths[0] > 0:
        indices = tf.data.Dataset.from_tensor_slices(rows.reshape(len(batches), lengths[0]))
    else:
        ragged = tf.RaggedTensor.from_row_lengths(rows, lengths)
        indices = tf.data.Dataset.from_tensor_slices(ragged)

    def gather_rows(rows: tf.Tensor) -> Batch:
        return keras.tree.map_structure(lambda leaf: tf.gather(leaf, rows), whole)

    return indices.map(tf.autograph.experimental.do_not_convert(gather_rows)).prefetch(2)


def _in_turn(parts: Sequence[tf.data.Dataset]) -> Batches:
    """Return a function (worker, number) that ignores the number and returns the next batch."""
    iterators = [iter(part.repeat()) for part in parts]

    def batch(worker: int, number: int) -> Triple:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(next(iterators[worker]))
        return x, y, weight

    return batch


def _batched(dataset: tf.data.Dataset, batch_size: int, sample_rank: int | None) -> tf.data.Dataset:
    """Convert a user's dataset of samples, or of batches of any size, to global batches."""
    if sample_rank is None:
        raise InvalidInput(
            "a dataset requires a model that starts with keras.Input(shape), "
            "which distinguishes samples from batches"
        )
    if not isinstance(dataset, tf.data.Dataset):
        raise InvalidInput(
            f"the callable for the data returned a {type(dataset).__name__}; it must return a "
            "tf.data.Dataset, such as tf.data.Dataset.from_tensor_slices((x, y))"
        )
    kinds = keras.tree.flatten(dataset.element_spec)
    if isinstance(dataset.element_spec, tuple):
        labels = keras.tree.flatten(dataset.element_spec[1:])
        if any(getattr(kind, "dtype", None) == tf.string for kind in labels):
            raise InvalidInput("the dataset has texts as labels: map them to whole numbers from 0")
    shape = kinds[0].shape
    if shape.rank not in (sample_rank, sample_rank + 1):
        raise InvalidInput(
            f"elements of the dataset have the shape {shape}, but the model takes samples of "
            f"{sample_rank} dimensions: give samples, or batches of them, of static shape"
        )
    if shape.rank == sample_rank:
        return dataset.batch(batch_size)
    return dataset if shape[0] == batch_size else dataset.rebatch(batch_size)


def _refuse_endless(batches: tf.data.Dataset, steps: int | None, field: str) -> tf.data.Dataset:
    """Return the batches unchanged; raise InvalidInput if they never end or have no rows."""
    count = batches.cardinality()
    if count == 0:
        raise InvalidInput(f"{field} has no rows; give data with one sample or more")
    if steps is None and count == tf.data.INFINITE_CARDINALITY:
        advice = (
            "steps_per_epoch=…, or data without repeat()"
            if field == "dataset"
            else "it without repeat()"
        )
        raise InvalidInput(f"{field} has no end, so an epoch would not end; give {advice}")
    return batches
