"""A rank's training session: its model, its data, and the methods that strategies call."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import keras
import tensorflow as tf

from labkit import models
from labkit.common import keras_settings
from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator, Injector, RankDied
from labkit.exchange import Exchange, Guard, Timeline
from labkit.exchange.hooks import hooks_of
from labkit.experiment import Experiment
from labkit.experiment.batches import owns_rows
from labkit.keras import (
    LARS,
    Recipe,
    copy_of,
    evaluate,
    refuse_steps,
    refuse_variables,
    without_replica_sum,
)
from labkit.keras.sharding import EqualBatches
from labkit.model_parallel.memory import Memory
from labkit.model_parallel.messages import LayerRow
from labkit.programs.event_log import Event
from labkit.programs.replica import Batches
from labkit.records.checkpoints import CheckpointContext
from labkit.strategies import Predictor, ProgramStrategy, Step, TrainingState, Watcher
from labkit.worker import inference
from labkit.worker.checkpoint_keeper import CheckpointKeeper
from labkit.worker.feed import DataSource, Feed
from labkit.worker.local_state import build
from labkit.worker.loop import train
from labkit.worker.peer_memory_recovery import PeerMemoryRecovery
from labkit.worker.recorder import Progress, Recorder, StopTogether
from labkit.worker.recovery import Recovery

if TYPE_CHECKING:
    from labkit.frameworks.child import Child
    from labkit.frameworks.environments import Installation
    from labkit.worker.played import ComputeBackend

T = TypeVar("T")
# An argument of `keras.Model.compile`: a name, an object, or a nested structure of names and
# objects.
CompileOption: TypeAlias = "str | keras.losses.Loss | Sequence[CompileOption] | None"


class TrainingSession:
    """The training session of one rank, through which a strategy trains.

    Args:
        experiment: The experiment to train.
        communicator: Communicator of the ranks that train together.
        source: Training and validation data of the experiment.
    """

    def __init__(
        self, experiment: Experiment, communicator: Communicator, source: DataSource
    ) -> None:
        self.experiment = experiment
        self.communicator = communicator
        self.readers = experiment.strategy.readers(communicator)
        self._parts: list[Communicator] = []
        self._source = source
        self.seed = experiment.seed
        self.watchers: list[Watcher] = []  # functions that are called for each compressed bucket
        policy = experiment.on_nonfinite
        self.guard = None if policy is None else Guard(policy, communicator.rank)
        self.injectors: dict[int, Injector] = {}  # keys: ranks or, on the virtual clock, workers
        self.timeline = Timeline(communicator.clock)
        self.partition: dict[str, JSON] = {}  # where pipeline stages are cut, and why
        self.memory: Memory | None = None  # set by strategies that divide the model among ranks
        # For each divided layer, this rank's part and its sent bytes.
        self.layers: list[LayerRow] = []
        reset(experiment)
        self.model = build_model(experiment, source)
        self.divide_data()
        self.recorder: Recorder | None = None  # programs add rows to the recorder without callbacks
        self.interleaving: list[Event] = []
        self.stage: ComputeBackend | None = None  # set if the strategy runs as a set of programs
        # Set by training in other frameworks and by simulations.
        self.exchanged: dict[str, JSON] | None = None
        user_callbacks = experiment.callbacks() if experiment.callbacks else []
        self.callbacks: list[keras.callbacks.Callback] = list(user_callbacks)
        self.progress = Progress(self.feed.steps)
        self.checkpoint_context: CheckpointContext | None = None
        self.recovery: Recovery | None = None  # set if training can survive rank failures
        self.peer_recovery: PeerMemoryRecovery | None = (
            None  # set if spare ranks may replace failed ranks
        )
        self._training_state: TrainingState | None = None
        self.chosen: dict[str, JSON] = {}  # values that `once` measured; saved in checkpoints
        self.checkpoints: dict[str, JSON] | None = None  # number and cost of saved checkpoints
        self.user_optimizer = (
            self.model.optimizer if self.model.compiled else None
        )  # the user's optimizer
        if self.user_optimizer is not None and not experiment.strategy.keeps_optimizer(experiment):
            refuse_steps(self.user_optimizer)
            refuse_variables(self.user_optimizer)
        self._options = _compile_options(self.model, experiment, source)

    def divide_data(self) -> None:
        """Divide the training and validation data among the current ranks."""
        # Programs train on the batches from the method `batches`. From the feed, programs use only
        # the validation rows and the number of training steps.
        uses_programs = self.experiment.uses_programs
        experiment = self.experiment
        if uses_programs:
            experiment = experiment.replace(batch_weights=None)
        arguments = experiment, self.readers, self.communicator, sample_rank(self.model)
        self.feed: Feed = self._source.feed(*arguments)

    def _batch_checks(self) -> list[keras.callbacks.Callback]:
        """Return a callback that compares the batches of ranks, if a function creates the dataset.

        If the data are arrays, no comparison is needed, because their batches depend only on the
        seed.
        """
        return [EqualBatches(self.readers)] if callable(self.experiment.dataset) else []

    def optimizer(self) -> keras.optimizers.Optimizer:
        """Return a new optimizer: the experiment's, or a copy of the compiled model's optimizer."""
        if self.user_optimizer is not None:
            return copy_of(self.user_optimizer)
        return without_replica_sum(
            _optimizer_class(self._optimizer_name)(**self._optimizer_options())
        )

    @property
    def _optimizer_name(self) -> str:
        return self.experiment.strategy.optimizer_of(self.experiment)

    def optimizer_record(self) -> JSON:
        """Return the settings of the optimizer, with the learning rate that it actually uses."""
        if self.user_optimizer is not None:
            return "as the model was compiled"
        options = self._optimizer_options()
        rate = options.get("learning_rate")
        return options | ({"learning_rate": rate.get_config()} if isinstance(rate, WarmUp) else {})

    def compile(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Compile the model with the experiment's loss and metrics."""
        self.model.compile(optimizer=optimizer, jit_compile=False, **self._options)

    def fit(
        self, callbacks: Sequence[keras.callbacks.Callback], exchange: Exchange | None = None
    ) -> None:
        """Train from the current position to the last epoch, and validate after each epoch.

        A separate call of Keras's `fit` trains the rest of an interrupted epoch.

        Args:
            callbacks: Keras callbacks that the strategy needs.
            exchange: Gradient exchange, which the surviving ranks set up again after a rank
                failure. None: a rank failure ends training.
        """
        if exchange is not None and self.communicator.outlives and not owns_rows(self.experiment):
            self.recovery = Recovery(self, exchange)
            # for the type checker: the method `keeps` has set the training state
            assert self._training_state is not None
            build(self._training_state)
            callbacks = [self.recovery, *callbacks]
        elif (
            self.peer_recovery is not None
        ):  # no recovery from memory, because messages outlast steps
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

    def state(self) -> list[keras.Variable]:
        """Return the variables of model and optimizers, which are equal on all replicas."""
        assert self._training_state is not None
        slots = [v for optimizer, _ in self._training_state.optimizers for v in optimizer.variables]
        return [*self._training_state.variables, *slots]

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
        if self.progress.metrics:  # Keras creates metric states in the first step
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
            shuffle=False,  # the batch plan has already shuffled the rows
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

    def keeps(self, state: TrainingState) -> None:
        """Register the state that checkpoints save, see `labkit.strategies.Session`."""
        self._training_state = state

    def once(self, name: str, measure: Callable[[], JSON]) -> JSON:
        """Measure a value once and return it; a resumed training returns the first run's value."""
        if name not in self.chosen:
            self.chosen[name] = measure()
        return self.chosen[name]

    def set_checkpoints(self, checkpoint_context: CheckpointContext) -> None:
        """Save checkpoints during training, which starts from a checkpoint if there is one."""
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
        """Train by running one program per worker and server, see `labkit.worker.played`."""
        from labkit.worker.played import play

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
            config: Value of the environment variable TF_CONFIG; None: one process runs all workers.
            folder: Folder for data that other processes read, too.
            inside: Command prefix that starts the process in another place, such as a network
                namespace.
        """
        import cloudpickle

        from labkit.frameworks.child import Child
        from labkit.worker.exported import TrainingTask

        # Metrics are not sent to the child process, because they have variables. Unpickling
        # variables would start TensorFlow before the child process creates its strategy.
        options = {name: self._options.get(name) for name in ("loss", "loss_weights")}
        task = TrainingTask(
            self.experiment,
            self._source.rows(self.communicator),
            self.communicator.rank,
            config,
            self.model.get_weights(),
            # `TrainingSession.optimizer` is called directly, because its optimizer does not log
            # gradients.
            cloudpickle.dumps(Recipe.of(TrainingSession.optimizer(self))),
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

    def batches(self) -> Batches:
        """Return a function (worker, batch number) that returns a training batch of this worker."""
        return self._source.batches(self.experiment, sample_rank(self.model))

    def loop(
        self, step: Step, collect: Callable[[], None], predict: Predictor | None = None
    ) -> None:
        """Train with the step function of the strategy, see `labkit.strategies.Session`.

        After the last epoch, `collect` gathers the weights of all ranks. The function `collect`
        also runs after each epoch if the user's callbacks may read the weights, or if validation
        needs them.
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
            # the epoch's loss is the mean over steps, not a metric of Keras
            self.progress.metrics = []
            train(*arguments, keepers, step, validate, self.communicator)
        if not early:
            collect()

    def evaluate(self) -> dict[str, float]:
        """Evaluate the whole model on the validation rows; return metrics, or {} without rows."""
        if self.feed.validation is None:
            return {}
        return evaluate(self.model, self.feed.validation, self.communicator, sharded=True)

    def _evaluate_by(self, predict: Predictor) -> dict[str, float]:
        if self.feed.validation is None:
            return {}
        return inference.evaluate(self.model, self._held_out, predict, self.communicator)

    @cached_property
    def _held_out(self) -> tf.data.Dataset | None:
        """Validation batches, equal on all ranks of a replica and divided among replicas."""
        return self._source.held_out(self.experiment, self.readers, sample_rank(self.model))

    def part(self, colour: int) -> Communicator:
        """Return a communicator of all ranks of the same colour; `close` frees it (collective)."""
        self._parts.append(self.communicator.split(colour))
        return self._parts[-1]

    def close(self) -> None:
        """Close the communicators of this session (collective)."""
        for part in self._parts:
            part.close()
        if self.readers is not self.communicator:
            self.readers.close()

    def exchange(self) -> dict[str, JSON] | None:
        """Describe the gradient exchange (algorithm, reason, buckets); None without an exchange."""
        if self.exchanged is not None:
            return self.exchanged
        exchange = getattr(self.model.optimizer, "exchange", None)
        return exchange.describe() if exchange is not None and exchange.buckets else None

    def saved(self) -> bytes | None:
        """Return the trained model as the bytes of a .keras file, with a standard Keras optimizer.

        If Keras cannot save the model, the result is None, and the output of this rank gives the
        reason.
        """
        optimizer = self.optimizer()
        rate = getattr(optimizer, "_learning_rate", None)
        if isinstance(rate, WarmUp):
            config = optimizer.get_config() | {"learning_rate": rate.base * rate.factor}
            optimizer = type(optimizer).from_config(config)
        self.compile(optimizer)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.keras"
            try:
                self.model.save(file)
            except (NotImplementedError, TypeError, ValueError) as error:
                print(f"the trained model is not saved, because Keras cannot save it: {error}")
                return None
            return file.read_bytes()

    def _optimizer_options(self) -> dict[str, JSON]:
        strategy = self.experiment.strategy
        options: dict[str, Any] = dict(strategy.optimizer_options_of(self.experiment))
        if self.experiment.learning_rate is not None:
            options["learning_rate"] = self.experiment.learning_rate
        kind = self.experiment.learning_rate_scaling
        workers = self.experiment.workers
        factor = {"none": 1.0, "linear": float(workers), "sqrt": workers**0.5}[kind]
        factor *= strategy.rate_of(self.experiment)
        if factor != 1.0:
            base = options.get("learning_rate", _default_rate(self._optimizer_name))
            steps = self.experiment.warmup_epochs * (self.feed.steps or 0)
            options["learning_rate"] = WarmUp(base, factor, steps) if steps else base * factor
        return options


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    r"""A learning rate that grows linearly, from that of one worker to the scaled rate.

    The rate is \(\eta_t = \eta (1 + (k - 1) \min(1, t / T))\). Here η is the learning rate of one
    worker, k the scaling factor, t the training step, and T the number of warmup steps.

    Reference: P. Goyal et al.: Accurate, large minibatch SGD, 2017, arXiv 1706.02677.
    """

    def __init__(self, base: float, factor: float, steps: float) -> None:
        super().__init__()
        self.base, self.factor, self.steps = base, factor, steps

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Return the learning rate at training step `step`."""
        share = keras.ops.minimum(keras.ops.cast(step, keras.config.floatx()) / self.steps, 1.0)
        return self.base * (1.0 + (self.factor - 1.0) * share)

    def get_config(self) -> dict[str, float]:
        """Return the constructor's arguments: base, factor and steps."""
        return {"base": self.base, "factor": self.factor, "steps": self.steps}


@cache
def leave_modules() -> None:
    """Exclude imported modules from garbage collection, which halves the time of a collection.

    Only the first call in a process excludes objects, so the garbage of later runs is still
    collected.
    """
    gc.collect()
    gc.freeze()


def reset(experiment: Experiment) -> None:
    """Reset what earlier runs changed: Keras's graph, float type, dtype policy and random state."""
    leave_modules()
    keras.backend.clear_session()
    _apply(keras_settings.settings(), custom_model=callable(experiment.model))
    keras.config.set_floatx("float64" if experiment.precision == "float64" else "float32")
    keras.config.set_dtype_policy(experiment.precision)
    keras.utils.set_random_seed(experiment.seed)


def restore() -> None:
    """Restore Keras's initial settings, because a notebook cell may run in this process next."""
    keras.backend.clear_session()
    settings = keras_settings.settings()
    _apply(settings)
    keras.config.set_floatx(settings["floatx"])
    keras.config.set_dtype_policy(settings["floatx"])


def _apply(settings: Mapping[str, Any], custom_model: bool = True) -> None:
    """Apply the settings in keras.json; labkit's named models always use channels_last."""
    keras.config.set_epsilon(settings["epsilon"])
    channels = settings["image_data_format"] if custom_model else "channels_last"
    keras.config.set_image_data_format(channels)


def build_model(experiment: Experiment, source: DataSource) -> keras.Model:
    """Build the experiment's Keras model, with weights that depend only on the seed."""
    if callable(experiment.model):
        model = experiment.model()
        if not isinstance(model, keras.Model):
            raise InvalidInput(
                f"model={experiment.model.__name__} returned {type(model).__name__}; "
                "it must return a keras.Model"
            )
        return model
    if source.shapes is None:
        raise InvalidInput(
            f"model={experiment.model!r} needs arrays of one input and one output to know its "
            "shapes; give a callable that returns a keras.Model"
        )
    return models.build(experiment.model, source.shapes, **experiment.model_options)


def sample_rank(model: keras.Model) -> int | None:
    """Return the number of dimensions of one sample of the first input; None if it is unknown."""
    inputs = getattr(model, "inputs", None)
    return len(keras.tree.flatten(inputs)[0].shape) - 1 if inputs else None


def _compile_options(
    model: keras.Model, experiment: Experiment, source: DataSource
) -> dict[str, CompileOption]:
    options: dict[str, CompileOption] = {}
    if model.compiled:
        # The compile arguments are used as original objects, because custom functions may not be
        # registered with Keras.
        compile_arguments = model._compile_config.config
        options = {
            k: v for k, v in compile_arguments.items() if k not in ("optimizer", "jit_compile")
        }
    elif source.shapes is not None:
        task = source.shapes.task
        options = {"loss": models.task_loss(task), "metrics": models.task_metrics(task)}
    if experiment.loss is not None:
        options["loss"] = experiment.loss
    if experiment.metrics is not None:
        options["metrics"] = list(experiment.metrics)
    if options.get("loss") is None:
        raise InvalidInput("the experiment has no loss; give loss='…' or return a compiled model")
    return options


def _optimizer_class(name: str) -> type[keras.optimizers.Optimizer]:
    """Return LARS or the class in `keras.optimizers` whose name in lower case is `name`."""
    optimizer_class: type[keras.optimizers.Optimizer] = {
        name_in_module.lower(): kind
        for name_in_module, kind in (*vars(keras.optimizers).items(), ("LARS", LARS))
    }[name]
    return optimizer_class


def _default_rate(optimizer: str) -> float:
    return float(_optimizer_class(optimizer)().learning_rate)
