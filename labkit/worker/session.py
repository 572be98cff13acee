"""A rank's training session: its model, its data, and the methods that strategies call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import keras

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator, RankDied
from labkit.exchange import Exchange
from labkit.exchange.hooks import hooks_of
from labkit.experiment import Experiment
from labkit.experiment.batches import owns_rows
from labkit.keras import (
    Recipe,
)
from labkit.keras.sharding import EqualBatches
from labkit.records.checkpoints import CheckpointContext
from labkit.strategies import Predictor, ProgramStrategy, Step
from labkit.worker import inference
from labkit.worker.checkpoint_keeper import CheckpointKeeper
from labkit.worker.feed import DataSource
from labkit.worker.local_state import build
from labkit.worker.loop import train
from labkit.worker.peer_memory_recovery import PeerMemoryRecovery
from labkit.worker.rank_state import RankState
from labkit.worker.recorder import StopTogether
from labkit.worker.recovery import Recovery

if TYPE_CHECKING:
    from labkit.frameworks.child import Child
    from labkit.frameworks.environments import Installation
    from labkit.worker.compute_backend import ComputeBackend

T = TypeVar("T")


class TrainingSession(RankState):
    """The training session of one rank, through which a strategy trains.

    Args:
        experiment: The experiment to train.
        communicator: Communicator of the ranks that train together.
        source: Training and validation data of the experiment.
    """

    def __init__(
        self, experiment: Experiment, communicator: Communicator, source: DataSource
    ) -> None:
        super().__init__(experiment, communicator, source)
        self.stage: ComputeBackend | None = None
        # The attribute `recovery` is set if training can survive rank failures.
        self.recovery: Recovery | None = None
        # The attribute `peer_recovery` is set if spare ranks may replace failed ranks.
        self.peer_recovery: PeerMemoryRecovery | None = None

    def _batch_checks(self) -> list[keras.callbacks.Callback]:
        """Return a callback that compares the batches of ranks, if a function creates the dataset.

        If the data are arrays, no comparison is needed, because their batches depend only on the
        seed.
        """
        return [EqualBatches(self.readers)] if callable(self.experiment.dataset) else []

    def fit(
        self, callbacks: Sequence[keras.callbacks.Callback], exchange: Exchange | None = None
    ) -> None:
        """Train from the current position to the last epoch, and validate after each epoch.

        A separate call of Keras's `fit` trains the rest of an interrupted epoch.

        Args:
            callbacks: Keras callbacks that the strategy needs.
            exchange: Gradient exchange, which the surviving ranks set up again after a rank
                failure. If `exchange` is None, training ends when a rank fails.
        """
        if exchange is not None and self.communicator.outlives and not owns_rows(self.experiment):
            self.recovery = Recovery(self, exchange, self._provide_state)
            # The assertion tells the type checker that the method `keeps` has set the training
            # state.
            assert self._training_state is not None
            build(self._training_state)
            callbacks = [self.recovery, *callbacks]
        elif (
            self.peer_recovery is not None
        ):  # Recovery from the memory of other ranks needs messages that end within a step.
            self.peer_recovery.is_off, self.peer_recovery = True, None
        self.outlive(lambda: self._fit_from_here(callbacks))

    def outlive(self, work: Callable[[], T]) -> T:
        """Call `work`; if a rank fails, call it again with the surviving ranks."""
        while True:
            try:
                return work()
            except Exception:
                died = isinstance(self.communicator.wait_policy.first_error, RankDied)
                if self.recovery is None or not died:
                    raise
            self.recovery.recover()
            if (
                self.checkpoint_context is not None
            ):  # training has already restored the checkpoint to resume from
                self.checkpoint_context = self.checkpoint_context._replace(resume=None)

    def _fit_from_here(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self.model.stop_training = False
        with self._keepers() as keepers:
            stop = StopTogether(self.communicator, self.progress.taken)
            callback_list = [
                *callbacks,
                *self._batch_checks(),
                *self.callbacks,
                self.progress,
                stop,
                *keepers,
            ]
            try:
                self._fit_all(callback_list)
            finally:
                hooks_of(self.model).clear()
        if not self.progress.taken:
            raise InvalidInput("dataset has no rows; give data with one sample or more")

    def _fit_all(self, callbacks: list[keras.callbacks.Callback]) -> None:
        if self.progress.metrics:  # Keras would create the metric states only in the first step.
            self.model._symbolic_build(data_batch=self.feed.train.element_spec)
        if self.feed.ends_at(self.progress.position):
            self._end_epoch(callbacks)
        if self.progress.position.step:
            self._fit(callbacks, self.progress.position.epoch + 1)
        if not self.model.stop_training and self.progress.position.epoch < self.experiment.epochs:
            self._fit(callbacks, self.experiment.epochs)

    def _fit(self, callbacks: list[keras.callbacks.Callback], epochs: int) -> None:
        at, steps = self.progress.position, self.feed.steps
        self.model.fit(
            self.feed.after(at),
            initial_epoch=at.epoch,
            epochs=epochs,
            steps_per_epoch=steps and steps - at.step,
            shuffle=False,  # The batch plan of labkit has already shuffled the rows.
            validation_data=self.feed.validation,
            callbacks=callbacks,
            verbose=0,
        )

    def _end_epoch(self, callbacks: list[keras.callbacks.Callback]) -> None:
        """Run validation, then call the callbacks for the end of an epoch, as `fit` does."""
        callback_list, epoch = (
            keras.callbacks.CallbackList(callbacks, model=self.model),
            self.progress.position.epoch,
        )
        callback_list.on_train_begin()
        callback_list.on_epoch_begin(epoch)
        logs = dict(self.model.get_metrics_result())
        if self.feed.validation is not None:
            metrics = self.model.evaluate(
                self.feed.validation, callbacks=callback_list, return_dict=True, verbose=0
            )
            logs |= {f"val_{name}": value for name, value in metrics.items()}
        callback_list.on_epoch_end(epoch, logs)
        callback_list.on_train_end()

    def set_checkpoints(self, checkpoint_context: CheckpointContext) -> None:
        """Save checkpoints during training, and resume from a checkpoint if there is one."""
        self.checkpoint_context = checkpoint_context
        if checkpoint_context.resume is not None and checkpoint_context.resume.same:
            self.chosen = dict(checkpoint_context.resume.manifest["chosen"])

    @contextmanager
    def _keepers(self) -> Iterator[list[keras.callbacks.Callback]]:
        """Restore the state; yield the callbacks that save checkpoints ([] if none are saved)."""
        is_wanted = self.checkpoint_context is not None or self.peer_recovery is not None
        if not is_wanted or self._training_state is None or self.recorder is None:
            yield []
            return
        keeper = self.keeper(self.checkpoint_context)
        recovery_callback = self.peer_recovery and self.peer_recovery.prepare(
            keeper, replicas=self.recovery is not None
        )
        try:
            yield [keeper, recovery_callback] if recovery_callback else [keeper]
            keeper.close()
            self.checkpoints = keeper.summary()
        finally:
            keeper.stop_waiting()

    def keeper(self, checkpoint_context: CheckpointContext | None = None) -> CheckpointKeeper:
        """Return a callback that saves the training state or copies it for other ranks."""
        assert self._training_state is not None
        assert self.recorder is not None
        return CheckpointKeeper(
            self, checkpoint_context or CheckpointContext(None), self._training_state, self.recorder
        )

    def play(self, strategy: ProgramStrategy) -> None:
        """Train by running one program per worker and server, see
        `labkit.worker.program_runner`.
        """
        from labkit.worker.program_runner import play

        self.stage = play(self, strategy)

    def tensorflow_process(
        self,
        name: str,
        config: dict[str, JSON] | None,
        folder: str,
        inside: Sequence[str] = (),
    ) -> Child:
        """Start a child process that trains the model by a TensorFlow distribution strategy.

        Args:
            name: Name of the child's task, such as "worker 1".
            config: Value of the environment variable TF_CONFIG, or None if one process runs all
                workers.
            folder: Folder for data that other processes read, too.
            inside: Command prefix that starts the process in another place, such as a network
                namespace.
        """
        import cloudpickle

        from labkit.frameworks.child import Child
        from labkit.worker.external_training import TrainingTask

        # The child process gets no metrics, because metrics have variables. Unpickling variables
        # would start TensorFlow before the child process creates its strategy.
        options = {name: self._options.get(name) for name in ("loss", "loss_weights")}
        task = TrainingTask(
            self.experiment,
            self._source.rows(self.communicator),
            self.communicator.rank,
            config,
            self.model.get_weights(),
            # The code calls `RankState.optimizer` directly, because optimizers of subclasses may
            # log gradients.
            cloudpickle.dumps(Recipe.of(RankState.optimizer(self))),
            cloudpickle.dumps(options),
            folder,
        )
        local_workers = self.experiment.workers if config is None else 1
        module, threads = (
            "labkit.worker.tensorflow_process",
            local_workers * self.experiment.threads,
        )
        return Child(module, name, task, self.communicator, threads, inside=inside)

    def exported(
        self, name: str, installation: Installation, folder: str, inside: Sequence[str] = ()
    ) -> Child:
        """Start a child process that trains the model with another framework.

        Args:
            name: Name of the child's task, such as "worker 1".
            installation: Python environment in which the framework is installed.
            folder: Folder for exported arrays, the same on all ranks.
            inside: Command prefix that starts the process in another place, such as a network
                namespace.
        """
        from labkit.frameworks.child import Child
        from labkit.frameworks.environments import PEERS
        from labkit.worker.exported import export

        arguments = (self.experiment, self._source, self.communicator.rank, self.model)
        task = export(*arguments, self.optimizer(), self._options.get("loss"), folder)
        # Rank 0 must write the samples before the new processes read them.
        self.communicator.barrier("exported arrays")
        framework, threads = installation.name, self.experiment.threads
        module, python = f"labkit.frameworks.{PEERS[framework].module}", installation.python
        named = (framework, task)
        return Child(module, name, named, self.communicator, threads, python, inside)

    def loop(
        self, step: Step, collect: Callable[[], None], predict: Predictor | None = None
    ) -> None:
        """Train with the step function of the strategy, see `labkit.strategies.Session`.

        After the last epoch, `collect` gathers the weights of all ranks. After each epoch,
        `collect` also runs if the user's callbacks may read the weights. The function `collect`
        also runs after each epoch if validation needs the weights.
        """
        early = predict is None or self.experiment.callbacks is not None

        def validate() -> dict[str, float]:
            if early:
                collect()
            metrics = self.evaluate() if predict is None else self._evaluate_by(predict)
            return {f"val_{name}": value for name, value in metrics.items()}

        callbacks = [*self._batch_checks(), *self.callbacks]
        arguments = self.model, self.feed, self.experiment.epochs, callbacks, self.progress
        with self._keepers() as keepers:
            # The epoch's loss is the mean over steps, not a metric of Keras.
            self.progress.metrics = []
            train(*arguments, keepers, step, validate, self.communicator)
        if not early:
            collect()

    def _evaluate_by(self, predict: Predictor) -> dict[str, float]:
        if self.feed.validation is None:
            return {}
        return inference.evaluate(self.model, self._held_out, predict, self.communicator)

    def _provide_state(self, fault: dict[str, Any], noticed_at: float) -> None:
        """Provide this rank's state to spare ranks, see `PeerMemoryRecovery.provide_state`."""
        assert self.peer_recovery is not None
        self.peer_recovery.provide_state(self.keeper(), fault, noticed_at)
