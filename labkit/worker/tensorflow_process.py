"""A process that trains an experiment's model with a TensorFlow distribution strategy."""

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
from labkit.worker.external_training import TrainingTask

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    # A `Replicated` value is an argument or result of `tf.distribute.Strategy.run`, with one tensor
    # per replica.
    Replicated: TypeAlias = "tf.Tensor | tf.distribute.DistributedValues"

AHEAD = 4  # The coordinator schedules at most `AHEAD` steps beyond the last result.


class TensorFlowTraining:
    """A model and its optimizer in the scope of a TensorFlow strategy, and the batch plan."""

    def __init__(self, task: TrainingTask, strategy: tf.distribute.Strategy) -> None:
        import tensorflow as tf

        from labkit.experiment.batches import plan_of
        from labkit.worker.feed import read
        from labkit.worker.rank_state import build_model, reset

        experiment = task.experiment
        self.rank, self.number, self.strategy = task.rank, 0, strategy
        self.clock = WallClock()
        reset(experiment)
        self.source = read(experiment).first(task.rows)
        options = cloudpickle.loads(task.options)
        with strategy.scope():
            self.model: keras.Model = build_model(experiment, self.source)
            self.model.set_weights(task.weights)
            optimizer = cloudpickle.loads(task.optimizer).new()
            self.model.compile(optimizer=optimizer, jit_compile=False, **options)
            self.model.optimizer.build(self.model.trainable_variables)
        shares = experiment.batch_weights or (1.0,) * experiment.workers
        self.plan = plan_of(experiment, task.rows, tuple(shares), self.source.labels)
        self.compiled = tf.function(self.replicas)

    def weights(self) -> list[np.ndarray]:
        """Return the current weights of the model as NumPy arrays."""
        weights: list[np.ndarray] = self.model.get_weights()
        return weights

    def describe(self) -> str:
        """Return the name of the TensorFlow strategy class."""
        kind = type(self.strategy)
        return f"{kind.__module__}.{kind.__qualname__}"

    def replicas(self, x: Replicated, y: Replicated, share: Replicated) -> Replicated:
        """Run one training step on all replicas of the TensorFlow strategy."""
        return self.strategy.run(self._train, args=(x, y, share))

    def _train(self, x: tf.Tensor, y: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        """Train one replica for a step; weight its loss by its rows, and sum the gradients."""
        import tensorflow as tf

        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            predicted = self.model(x, training=True)
            loss = self.model.compute_loss(x=x, y=y, y_pred=predicted, training=True)
            # Keras has divided the loss by the number of replicas, as if all replicas had equally
            # many rows. The loss is multiplied by the share of rows and the number of replicas. The
            # two factors correct the loss for unequal row counts.
            loss = loss * share * self.strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        # Gradients of embeddings are made dense. The optimizer must add gradients of the same row
        # before it squares the sum.
        gradients = [
            None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients
        ]
        self.model.optimizer.apply(gradients, variables)
        return loss


class SynchronousTraining(TensorFlowTraining):
    """Synchronous training: replicas train on parts of a batch; TensorFlow sums gradients."""

    def __init__(self, task: TrainingTask, strategy: tf.distribute.Strategy) -> None:
        from labkit.worker.rank_state import sample_rank

        super().__init__(task, strategy)
        self._batches = self.source.batches(task.experiment, sample_rank(self.model))

    def step(self) -> tuple[float, float]:
        """Train on the next batch; return this process's mean loss, and the duration in seconds."""
        import keras
        import tensorflow as tf

        sizes = self.plan.sizes(self.number % self.plan.steps_per_epoch)
        dtype = keras.config.floatx()

        def make_value(part: int) -> Callable[[tf.distribute.InputReplicaContext], tf.Tensor]:
            def of(context: tf.distribute.InputReplicaContext) -> tf.Tensor:
                worker = max(self.rank, context.replica_id_in_sync_group)
                x, y, _ = self._batches(worker, self.number)
                return (x, y, tf.constant(sizes[worker] / sum(sizes), dtype))[part]

            return of

        distribute = self.strategy.experimental_distribute_values_from_function
        distributed = [distribute(make_value(part)) for part in range(3)]
        # The timer starts only after the batches have been read.
        start = self.clock.now()
        replicas = self.strategy.experimental_local_results(self.compiled(*distributed))
        losses = [loss.numpy() for loss in replicas]
        seconds = self.clock.now() - start
        self.number += 1
        workers = [self.rank] if len(losses) == 1 else range(len(losses))
        share = sum(sizes[worker] for worker in workers) / sum(sizes)
        return float(np.sum(losses) / share), seconds


class CoordinatedTraining(TensorFlowTraining):
    """Asynchronous training: a coordinator gives steps to idle workers.

    Each worker reads its own batches. Workers do not wait for each other. At most `AHEAD` steps are
    scheduled beyond the last result that was fetched. An epoch ends when all steps of the epoch
    have finished.
    """

    def __init__(self, task: TrainingTask, strategy: tf.distribute.Strategy) -> None:
        import tensorflow as tf

        super().__init__(task, strategy)
        self._workers, self._epochs = task.experiment.workers, task.experiment.epochs
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        data = self._coordinator.create_per_worker_dataset(self._data(task.folder))
        self._batches = iter(data)
        self._scheduled: deque[list[tf.distribute.coordinator.RemoteValue]] = deque()
        self._scheduled_steps, self._ended = 0, 0.0
        self._worker_step = tf.function(self._run_worker_step)

    def step(self) -> tuple[float, float]:
        """Wait for as many finished steps as there are workers, whichever workers took them.

        Returns: The mean loss of the fetched results, and the seconds since the previous call
            ended.
        """
        per_epoch = self.plan.steps_per_epoch
        epoch, place = divmod(self.number, per_epoch)
        if place == 0:
            self._ended = self.clock.now()
        # At first, only one step is scheduled. The time of the first step thus includes no work of
        # later steps.
        ahead, end = AHEAD if self.number else 1, (epoch + 1) * per_epoch
        while self._scheduled_steps < min(self.number + ahead, end):
            scheduled = [
                self._coordinator.schedule(self._worker_step, args=(self._batches,))
                for _ in range(self._workers)
            ]
            self._scheduled.append(scheduled)
            self._scheduled_steps += 1
        self.number += 1
        results = np.array([value.fetch() for value in self._scheduled.popleft()])  # (workers, 2)
        before, self._ended = self._ended, self.clock.now()
        losses, rows = results.T
        return float(np.sum(losses * rows) / np.sum(rows)), self._ended - before

    def weights(self) -> list[np.ndarray]:
        """Return the parameter servers' weights once all scheduled steps have finished."""
        self._coordinator.join()
        return super().weights()

    def _run_worker_step(self, batches: tf.data.Iterator) -> tf.Tensor:
        """Train one worker on its next batch; return the batch's mean loss and its row count."""
        import keras
        import tensorflow as tf

        x, y = next(batches)
        one = tf.ones([], keras.config.floatx())
        loss = self.strategy.run(self._train, args=(x, y, one))
        rows = tf.shape(tf.nest.flatten(x)[0])[0]
        return tf.stack([tf.cast(loss, tf.float64), tf.cast(rows, tf.float64)])

    def _data(self, folder: str) -> tf.types.experimental.PolymorphicFunction:
        """Save the samples in a folder; return a function that reads the batches of a worker."""
        import keras
        import tensorflow as tf

        arrays = keras.tree.map_structure(tf.constant, self.source.arrays)
        tf.data.Dataset.from_tensors(arrays).save(folder)
        rows_of_workers = [
            [rows for epoch in range(self._epochs) for rows in self.plan.local(worker, epoch)]
            for worker in range(self._workers)
        ]
        steps = len(rows_of_workers[0])
        rows = np.concatenate([part for parts in rows_of_workers for part in parts]).astype(
            np.int64
        )
        ends = np.cumsum([0, *(len(part) for parts in rows_of_workers for part in parts)])

        def batches(_: tf.distribute.InputContext) -> tf.data.Dataset:
            first = tf.distribute.coordinator.experimental_get_current_worker_index() * steps

            def gather_batch(number: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
                at = first + number
                batch_rows = tf.constant(rows)[tf.gather(ends, at) : tf.gather(ends, at + 1)]
                return keras.tree.map_structure(lambda leaf: tf.gather(leaf, batch_rows), whole)

            # After the last batch, the batch numbers start again from 0. A fast worker takes more
            # batches than an equal share.
            numbers = tf.data.Dataset.range(steps).repeat()
            whole = tf.data.Dataset.load(folder).cache().repeat()
            return tf.data.Dataset.zip(numbers, whole).map(gather_batch).prefetch(2)

        return tf.function(lambda: self.strategy.distribute_datasets_from_function(batches))


def strategy_of(tf_strategy: TFDistribute, workers: int) -> tf.distribute.Strategy:
    """Create the TensorFlow strategy; do this before any other code uses TensorFlow."""
    import tensorflow as tf

    kinds = tf.distribute.experimental
    if tf_strategy.kind == "parameter_server":
        # TensorFlow may mistake a killed worker for a failed server, so labkit makes TensorFlow
        # ignore short server failures. The labkit rank watches TensorFlow's parameter servers
        # itself.
        os.environ["TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES"] = str(2**31)
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        return tf.distribute.ParameterServerStrategy(resolver)
    if tf_strategy.kind == "multi_worker_mirrored":
        named = kinds.CommunicationImplementation
        implementation = named.RING if tf_strategy.communication == "ring" else named.AUTO
        options = kinds.CommunicationOptions(implementation=implementation)
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    (cpu,) = tf.config.list_physical_devices("CPU")
    configurations = [tf.config.LogicalDeviceConfiguration()] * workers
    tf.config.set_logical_device_configuration(cpu, configurations)
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    if tf_strategy.kind == "central_storage":
        return kinds.CentralStorageStrategy(devices, parameter_device=devices[0])
    sums = {
        "auto": None,
        "reduction_to_one_device": tf.distribute.ReductionToOneDevice(),
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce(),
    }[tf_strategy.cross_device_ops]
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=sums)


def start(task: TrainingTask) -> Mapping[str, Callable[..., object]]:
    """Build the model and the optimizer; return the functions that the parent process can call."""
    if task.config is not None:
        os.environ["TF_CONFIG"] = json.dumps(task.config)
    tf_strategy = task.experiment.strategy
    assert isinstance(tf_strategy, TFDistribute)
    # The `tf.distribute` strategy must be created before TensorFlow runs any operation.
    strategy = strategy_of(tf_strategy, task.experiment.workers)
    kind = CoordinatedTraining if tf_strategy.kind == "parameter_server" else SynchronousTraining
    training = kind(task, strategy)
    calls = (training.step, training.weights, training.describe)
    return {call.__name__: call for call in calls}


if __name__ == "__main__":
    serve(start)
