"""A process in which a strategy of TensorFlow's own trains an experiment's model, step by step."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import cloudpickle
import numpy as np

from labkit.communicator.clock import WallClock
from labkit.frameworks.child import serve
from labkit.strategies import TFDistribute
from labkit.worker.external_training import Task

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    # What `tf.distribute.Strategy.run` hands over or takes: a tensor a replica.
    Replicated: TypeAlias = "tf.Tensor | tf.distribute.DistributedValues"

AHEAD = 4  # steps that workers may be ahead of the slowest one


class Training:
    """A model and an optimizer in the scope of TensorFlow's strategy, and each worker's batches."""

    def __init__(self, task: Task, strategy: tf.distribute.Strategy) -> None:
        import tensorflow as tf

        from labkit.experiment.batches import plan_of
        from labkit.worker.feed import read
        from labkit.worker.session import build_model, reset

        experiment = task.experiment
        self.rank, self.number, self.strategy = task.rank, 0, strategy
        self.clock = WallClock()
        reset(experiment)
        self.source = read(experiment).first(task.rows)
        options = cloudpickle.loads(task.options)
        with strategy.scope():
            self.model: keras.Model = build_model(experiment, self.source)
            self.model.set_weights(task.weights)
            optimizer = cloudpickle.loads(task.optimizer).made()
            self.model.compile(optimizer=optimizer, jit_compile=False, **options)
            self.model.optimizer.build(self.model.trainable_variables)
        shares = experiment.capacities or (1.0,) * experiment.workers
        self.plan = plan_of(experiment, task.rows, tuple(shares), self.source.labels)
        self.compiled = tf.function(self.replicas)

    def weights(self) -> list[np.ndarray]:
        """All of the model's."""
        found: list[np.ndarray] = self.model.get_weights()
        return found

    def describe(self) -> str:
        """TensorFlow's class that trains."""
        kind = type(self.strategy)
        return f"{kind.__module__}.{kind.__qualname__}"

    def replicas(self, x: Replicated, y: Replicated, share: Replicated) -> Replicated:
        """One step of each replica."""
        return self.strategy.run(self._train, args=(x, y, share))

    def _train(self, x: tf.Tensor, y: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        """A replica's step: its loss by its share of the rows; the optimizer sums gradients."""
        import tensorflow as tf

        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            predicted = self.model(x, training=True)
            loss = self.model.compute_loss(x=x, y=y, y_pred=predicted, training=True)
            # Keras has divided it by their number, as if all had the same rows.
            loss = loss * share * self.strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        # One gradient a row of an embedding: what sums rows must come before what squares them.
        gradients = [
            None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients
        ]
        self.model.optimizer.apply(gradients, variables)
        return loss


class Synchronous(Training):
    """Each replica takes its part of every batch; TensorFlow sums their gradients."""

    def __init__(self, task: Task, strategy: tf.distribute.Strategy) -> None:
        from labkit.worker.session import sample_rank

        super().__init__(task, strategy)
        self._batches = self.source.batches(task.experiment, sample_rank(self.model))

    def step(self) -> tuple[float, float]:
        """Train on the next batch; the mean loss of this process's rows, and the step's seconds."""
        import keras
        import tensorflow as tf

        sizes = self.plan.sizes(self.number % self.plan.steps_per_epoch)
        dtype = keras.config.floatx()

        def own(part: int) -> Callable[[tf.distribute.InputReplicaContext], tf.Tensor]:
            def of(context: tf.distribute.InputReplicaContext) -> tf.Tensor:
                worker = max(self.rank, context.replica_id_in_sync_group)
                x, y, _ = self._batches(worker, self.number)
                return (x, y, tf.constant(sizes[worker] / sum(sizes), dtype))[part]

            return of

        spread = self.strategy.experimental_distribute_values_from_function
        given = [spread(own(part)) for part in range(3)]
        start = self.clock.now()  # as a data set of TensorFlow's has batches ready
        replicas = self.strategy.experimental_local_results(self.compiled(*given))
        losses = [loss.numpy() for loss in replicas]
        seconds = self.clock.now() - start
        self.number += 1
        workers = [self.rank] if len(losses) == 1 else range(len(losses))
        share = sum(sizes[worker] for worker in workers) / sum(sizes)
        return float(np.sum(losses) / share), seconds


class Coordinated(Training):
    """The coordinator hands steps to whichever worker is free; each reads batches of its own.

    Nobody waits for anybody, but that workers are at most `AHEAD` steps ahead of the answers, and
    that an epoch ends when all its steps are done.
    """

    def __init__(self, task: Task, strategy: tf.distribute.Strategy) -> None:
        import tensorflow as tf

        super().__init__(task, strategy)
        self._workers, self._epochs = task.experiment.workers, task.experiment.epochs
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        data = self._coordinator.create_per_worker_dataset(self._data(task.folder))
        self._batches = iter(data)
        self._scheduled: deque[list[tf.distribute.coordinator.RemoteValue]] = deque()
        self._given, self._ended = 0, 0.0
        self._taken = tf.function(self._one)

    def step(self) -> tuple[float, float]:
        """As many gradients as there are workers, whoever computes them.

        Returns:
            their mean loss, and the seconds since the step before: workers go on while nobody asks.
        """
        per_epoch = self.plan.steps_per_epoch
        epoch, place = divmod(self.number, per_epoch)
        if place == 0:
            self._ended = self.clock.now()
        # The first step stands alone, so that nothing of the next ones is counted with it.
        ahead, end = AHEAD if self.number else 1, (epoch + 1) * per_epoch
        while self._given < min(self.number + ahead, end):
            told = [
                self._coordinator.schedule(self._taken, args=(self._batches,))
                for _ in range(self._workers)
            ]
            self._scheduled.append(told)
            self._given += 1
        self.number += 1
        found = np.array([each.fetch() for each in self._scheduled.popleft()])  # (workers, 2)
        before, self._ended = self._ended, self.clock.now()
        losses, rows = found.T
        return float(np.sum(losses * rows) / np.sum(rows)), self._ended - before

    def weights(self) -> list[np.ndarray]:
        """Those of the servers, when all that was given to workers is done."""
        self._coordinator.join()
        return super().weights()

    def _one(self, batches: tf.data.Iterator) -> tf.Tensor:
        """What a worker does: its next batch, a gradient, an update; its loss and rows."""
        import keras
        import tensorflow as tf

        x, y = next(batches)
        one = tf.ones([], keras.config.floatx())
        loss = self.strategy.run(self._train, args=(x, y, one))
        rows = tf.shape(tf.nest.flatten(x)[0])[0]
        return tf.stack([tf.cast(loss, tf.float64), tf.cast(rows, tf.float64)])

    def _data(self, folder: str) -> tf.types.experimental.PolymorphicFunction:
        """What makes a worker's batches, of rows that it reads from a file once."""
        import keras
        import tensorflow as tf

        arrays = keras.tree.map_structure(tf.constant, self.source.arrays)
        tf.data.Dataset.from_tensors(arrays).save(folder)
        each = [
            [rows for epoch in range(self._epochs) for rows in self.plan.local(worker, epoch)]
            for worker in range(self._workers)
        ]
        steps = len(each[0])
        rows = np.concatenate([part for parts in each for part in parts]).astype(np.int64)
        ends = np.cumsum([0, *(len(part) for parts in each for part in parts)])

        def batches(_: tf.distribute.InputContext) -> tf.data.Dataset:
            first = tf.distribute.coordinator.experimental_get_current_worker_index() * steps

            def take(number: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
                at = first + number
                own = tf.constant(rows)[tf.gather(ends, at) : tf.gather(ends, at + 1)]
                return keras.tree.map_structure(lambda leaf: tf.gather(leaf, own), whole)

            # Again from the start: who is fast takes more batches than it has.
            numbers = tf.data.Dataset.range(steps).repeat()
            whole = tf.data.Dataset.load(folder).cache().repeat()
            return tf.data.Dataset.zip(numbers, whole).map(take).prefetch(2)

        return tf.function(lambda: self.strategy.distribute_datasets_from_function(batches))


def strategy_of(asked: TFDistribute, workers: int) -> tf.distribute.Strategy:
    """TensorFlow's object; called before anything else of TensorFlow has run."""
    import tensorflow as tf

    kinds = tf.distribute.experimental
    if asked.kind == "parameter_server":
        # A worker that is killed may look like a server that is gone; the rank watches those.
        os.environ["TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES"] = str(2**31)
        found = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        return tf.distribute.ParameterServerStrategy(found)
    if asked.kind == "multi_worker_mirrored":
        named = kinds.CommunicationImplementation
        implementation = named.RING if asked.communication == "ring" else named.AUTO
        options = kinds.CommunicationOptions(implementation=implementation)
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    (cpu,) = tf.config.list_physical_devices("CPU")
    each = [tf.config.LogicalDeviceConfiguration()] * workers
    tf.config.set_logical_device_configuration(cpu, each)
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    if asked.kind == "central_storage":
        return kinds.CentralStorageStrategy(devices, parameter_device=devices[0])
    sums = {
        "auto": None,
        "reduction_to_one_device": tf.distribute.ReductionToOneDevice(),
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce(),
    }[asked.cross_device_ops]
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=sums)


def start(task: Task) -> Mapping[str, Callable[..., object]]:
    """Build, and answer."""
    if task.config is not None:
        os.environ["TF_CONFIG"] = json.dumps(task.config)
    asked = task.experiment.strategy
    assert isinstance(asked, TFDistribute)  # for the type checker
    # Before anything else of TensorFlow runs.
    strategy = strategy_of(asked, task.experiment.workers)
    kind = Coordinated if asked.kind == "parameter_server" else Synchronous
    training = kind(task, strategy)
    calls = (training.step, training.weights, training.describe)
    return {call.__name__: call for call in calls}


if __name__ == "__main__":
    serve(start)
