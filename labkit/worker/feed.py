"""A rank's side of the data: its part of every batch, as Keras takes it."""

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
from labkit.common.rows import Plan
from labkit.communicator import Communicator
from labkit.datasets import Shapes
from labkit.experiment import Experiment
from labkit.experiment.batches import plan_of
from labkit.experiment.data import labels_of
from labkit.keras import part_of, shard
from labkit.keras.whole_batch import say_on_first
from labkit.programs.replica import Batches, Triple
from labkit.strategies import Batch
from labkit.worker.progress import Position

VALIDATION_BATCH = 1024

Arrays: TypeAlias = tuple[Batch, Batch]  # x and y
OwnData: TypeAlias = Callable[[], tf.data.Dataset]


@dataclass
class Feed:
    """What one rank trains and validates on.

    Attributes:
        train: this rank's part of the global batches; over all epochs where `steps` is known.
        steps: steps of an epoch; None: until the data set of the user's own ends.
        validation: this rank's part of the held-out batches, or None.
        shapes: what a named model must fit; None for callables, whose models know.
        anew: makes `train` as it was before anybody read of it; None: it does not remember.
        begun: whether somebody has.
    """

    train: tf.data.Dataset
    steps: int | None
    validation: tf.data.Dataset | None
    shapes: Shapes | None

    anew: Callable[[], tf.data.Dataset] | None = None
    begun: bool = False

    def after(self, position: Position) -> tf.data.Dataset:
        """What is left of it from a place in training on; of one epoch where `steps` is None."""
        train = self.train
        # A data set of the user's own may be shuffled in another way each time that it is read.
        if self.begun and self.anew is not None:
            train = self.anew()
        self.begun = True
        if self.steps is None:
            for _ in range(position.epoch):
                next(iter(train), None)
        done = position.done(self.steps)
        return train.skip(done) if done else train

    def ends_at(self, position: Position) -> bool:
        """Whether all batches of the epoch that has been begun lie before it."""
        if self.steps is None and position.step:
            return next(iter(self.after(position)), None) is None
        return position.step == self.steps


@dataclass(frozen=True)
class Source:
    """An experiment's data as read once: arrays, or a data set of the user's own."""

    train: Arrays | OwnData | None  # None where another rank scatters them
    validation: Arrays | OwnData | None
    shapes: Shapes | None

    @property
    def arrays(self) -> Arrays | None:
        """x and y; None for a data set of the user's own, and where another rank scatters them."""
        return None if callable(self.train) else self.train

    @property
    def labels(self) -> np.ndarray | None:
        """y, where it has a label a row."""
        labels = None if self.arrays is None else self.arrays[1]
        return labels if isinstance(labels, np.ndarray) and labels.ndim == 1 else None

    def feed(
        self,
        experiment: Experiment,
        communicator: Communicator,
        everyone: Communicator,
        sample_rank: int | None,
    ) -> Feed:
        """This rank's part.

        Args:
            experiment: names batch size, epochs, seed, capacities.
            communicator: the ranks that divide the batches among them.
            everyone: the ranks that divide the validation data among them.
            sample_rank: dimensions of one sample of x, to tell samples from batches.
        """
        shares = _shares(experiment, communicator) or (1.0,) * communicator.size
        validation = self.held_out(experiment, everyone, sample_rank)
        if callable(self.train):
            own, size = self.train, experiment.batch_size

            def anew() -> tf.data.Dataset:
                whole = _with_end(_batched(own(), size, sample_rank), experiment.steps, "dataset")
                return shard(whole, communicator, shares)

            part = anew()
            if experiment.steps is None and part.cardinality() == tf.data.UNKNOWN_CARDINALITY:
                text = "the dataset does not tell its number of batches: without steps=…, an epoch "
                say_on_first(communicator, text + "lasts until it ends")
            return Feed(part, experiment.steps, validation, None, anew)
        plan = plan_of(experiment, self.rows(communicator), shares, self.labels)
        train = _scattered if experiment.feed == "scatter" else _sharded
        rows = train(self.arrays, plan, communicator, experiment.epochs)
        return Feed(rows, plan.steps_per_epoch, validation, self.shapes)

    def batches(self, experiment: Experiment, sample_rank: int | None) -> Batches:
        """Each worker's batches, by its number and theirs, as many as it asks for.

        Args:
            experiment: names batch size, seed, capacities, workers.
            sample_rank: dimensions of one sample of x, to tell samples from batches.
        """
        shares = experiment.capacities or (1.0,) * experiment.workers
        if callable(self.train):
            whole = _batched(self.train(), experiment.batch_size, sample_rank)
            whole = _with_end(whole, experiment.steps, "dataset")
            return _in_turn([part_of(whole, worker, shares) for worker in range(len(shares))])
        assert self.arrays is not None  # for the type checker: nobody scatters to programs
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

    def first(self, rows: int) -> Source:
        """The same with so many rows of the training data; all of a data set of the user's own."""
        if self.arrays is None:
            return self
        return replace(self, train=keras.tree.map_structure(lambda leaf: leaf[:rows], self.arrays))

    def rows(self, communicator: Communicator) -> int:
        """How many rows rank 0 has read of the training data (collective)."""
        own = None if self.arrays is None else len(keras.tree.flatten(self.arrays)[0])
        return int(communicator.share(own, what="the number of rows"))

    def held_out(
        self, experiment: Experiment, communicator: Communicator, sample_rank: int | None
    ) -> tf.data.Dataset | None:
        """This rank's part of the validation data, which these ranks divide among them."""
        if self.validation is None:
            return None
        if callable(self.validation):
            batches = _batched(self.validation(), experiment.batch_size, sample_rank)
            batches = _with_end(batches, None, "validation")
        else:
            batches = tf.data.Dataset.from_tensor_slices(self.validation).batch(VALIDATION_BATCH)
        return shard(batches, communicator, _shares(experiment, communicator)).cache()


def _shares(experiment: Experiment, communicator: Communicator) -> tuple[float, ...] | None:
    """Of each batch, of the ranks that live; None: equal ones."""
    given = experiment.capacities
    return None if given is None else tuple(given[number] for number in communicator.numbers)


def read(experiment: Experiment, communicator: Communicator | None = None) -> Source:
    """Read the experiment's data; with feed="scatter" rank 0 of these ranks alone does."""
    if isinstance(experiment.dataset, str):
        scattering = communicator if experiment.feed == "scatter" else None
        shapes = datasets.check(experiment.dataset, experiment.dataset_options)
        if scattering is not None and scattering.rank > 0:
            held_out = scattering.share(None, what="the validation data")
            return Source(None, experiment.validation or held_out, shapes)
        data = datasets.load(experiment.dataset, **experiment.dataset_options)
        held_out = (data.x_test, data.y_test)
        if scattering is not None:
            scattering.share(held_out, what="the validation data")
        return Source((data.x_train, data.y_train), experiment.validation or held_out, shapes)
    if callable(experiment.dataset):
        return Source(experiment.dataset, experiment.validation, None)
    task = datasets.shapes_of(experiment.dataset, labels_of(experiment.validation))
    return Source(experiment.dataset, experiment.validation, task)


def global_batches(source: Source, plan: Plan, epochs: int) -> tf.data.Dataset:
    """What one process would train on: the global batches of all epochs."""
    return _gather(source.arrays, [rows for epoch in range(epochs) for rows in plan.whole(epoch)])


def _sharded(
    arrays: Arrays | None, plan: Plan, communicator: Communicator, epochs: int
) -> tf.data.Dataset:
    own = [rows for epoch in range(epochs) for rows in plan.local(communicator.rank, epoch)]
    return _gather(arrays, own)


def _scattered(
    arrays: Arrays | None, plan: Plan, communicator: Communicator, epochs: int
) -> tf.data.Dataset:
    parts = None
    if communicator.rank == 0:
        owned = [plan.own_rows(rank) for rank in range(communicator.size)]
        parts = [keras.tree.map_structure(itemgetter(rows), arrays) for rows in owned]
    part = communicator.scatter(parts, what="the scattering of samples")
    own = [rows for epoch in range(epochs) for rows in plan.places(communicator.rank, epoch)]
    return _gather(part, own)


def _gather(arrays: Arrays | None, batches: list[np.ndarray]) -> tf.data.Dataset:
    """A data set that takes these rows of the arrays, a batch at a time; rows never move twice."""
    rows = np.concatenate(batches).astype(np.int64)
    lengths = [len(batch) for batch in batches]
    whole = keras.tree.map_structure(tf.constant, arrays)
    if len(set(lengths)) == 1 and lengths[0] > 0:
        indices = tf.data.Dataset.from_tensor_slices(rows.reshape(len(batches), lengths[0]))
    else:
        ragged = tf.RaggedTensor.from_row_lengths(rows, lengths)
        indices = tf.data.Dataset.from_tensor_slices(ragged)

    def take(rows: tf.Tensor) -> Batch:
        return keras.tree.map_structure(lambda leaf: tf.gather(leaf, rows), whole)

    return indices.map(tf.autograph.experimental.do_not_convert(take)).prefetch(2)


def _in_turn(parts: Sequence[tf.data.Dataset]) -> Batches:
    """Batches of data sets that know no numbers: each worker asks for its next one."""
    iterators = [iter(part.repeat()) for part in parts]

    def batch(worker: int, number: int) -> Triple:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(next(iterators[worker]))
        return x, y, weight

    return batch


def _batched(dataset: tf.data.Dataset, batch_size: int, sample_rank: int | None) -> tf.data.Dataset:
    """Global batches, whether the user's data set holds samples or batches of another size."""
    if sample_rank is None:
        raise InvalidInput(
            "a data set of your own wants a model that starts with keras.Input(shape), "
            "to tell samples from batches"
        )
    if not isinstance(dataset, tf.data.Dataset):
        raise InvalidInput(
            f"the callable of the data returned a {type(dataset).__name__}; it must return a "
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
            f"elements of the data set have the shape {shape}, and the model takes samples of "
            f"{sample_rank} dimensions: give samples, or batches of them, of known shape"
        )
    if shape.rank == sample_rank:
        return dataset.batch(batch_size)
    return dataset if shape[0] == batch_size else dataset.rebatch(batch_size)


def _with_end(batches: tf.data.Dataset, steps: int | None, field: str) -> tf.data.Dataset:
    """The same batches, unless a pass over them has no end, or no rows."""
    count = batches.cardinality()
    if count == 0:
        raise InvalidInput(f"{field} has no rows: give data with one sample or more")
    if steps is None and count == tf.data.INFINITE_CARDINALITY:
        advice = (
            "steps=…, or data without repeat()" if field == "dataset" else "it without repeat()"
        )
        raise InvalidInput(f"{field} has no end, and an epoch would have none: give {advice}")
    return batches
