"""One rank's share of an experiment: its model, its data, and how both meet."""

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
from labkit.exchange.hooks import seam
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
from labkit.keras.equal_batches import EqualBatches
from labkit.model_parallel.memory import Memory
from labkit.model_parallel.meter import LayerRow
from labkit.programs.event_log import Event
from labkit.programs.replica import Batches
from labkit.records.checkpoints import CheckpointContext
from labkit.strategies import Predictor, ProgramStrategy, Step, TrainingState, Watcher
from labkit.worker import inference
from labkit.worker.feed import Feed, Source
from labkit.worker.keeper import Keeper
from labkit.worker.local_state import build
from labkit.worker.loop import train
from labkit.worker.peer_memory_recovery import PeerMemoryRecovery
from labkit.worker.progress import Progress
from labkit.worker.recorder import Recorder, StopTogether
from labkit.worker.recovery import Recovery

if TYPE_CHECKING:
    from labkit.frameworks.child import Child
    from labkit.frameworks.environments import Found
    from labkit.worker.played import ComputeBackend

T = TypeVar("T")
# What `keras.Model.compile` takes: a name, an object, or a nest of them.
CompileOption: TypeAlias = "str | keras.losses.Loss | Sequence[CompileOption] | None"


class TrainingSession:
    """What a strategy works with on a rank.

    Args:
        experiment: what to train.
        communicator: the ranks that train it together.
        source: its data, as read.
    """

    def __init__(self, experiment: Experiment, communicator: Communicator, source: Source) -> None:
        self.experiment = experiment
        self.communicator = communicator
        self.readers = experiment.strategy.readers(communicator)
        self._parts: list[Communicator] = []
        self._source = source
        self.seed = experiment.seed
        self.watchers: list[Watcher] = []  # of compressed buckets
        policy = experiment.bad_numbers
        self.guard = None if policy is None else Guard(policy, communicator.rank)
        self.injectors: dict[int, Injector] = {}  # by rank, or by worker on the virtual clock
        self.timeline = Timeline(communicator.clock)
        self.partition: dict[str, JSON] = {}  # where a model was cut into stages, and why there
        self.memory: Memory | None = None  # of a strategy that trains parts
        self.layers: list[LayerRow] = []  # what this rank has and sends of each, when cut
        reset(experiment)
        self.model = build_model(experiment, source)
        self.read_anew()
        self.recorder: Recorder | None = None  # of programs' steps, which no callback sees
        self.interleaving: list[Event] = []
        self.stage: ComputeBackend | None = None  # on which they play
        self.exchanged: dict[str, JSON] | None = None  # by whom else, or by which laws
        own = experiment.callbacks() if experiment.callbacks else []
        self.callbacks: list[keras.callbacks.Callback] = list(own)
        self.progress = Progress(self.feed.steps)
        self.keeping: CheckpointContext | None = None
        self.recovery: Recovery | None = None  # where training outlives ranks
        self.comeback: PeerMemoryRecovery | None = (
            None  # where spares may take the places of the dead
        )
        self._kept: TrainingState | None = None
        self.chosen: dict[str, JSON] = {}  # what was measured once
        self.checkpoints: dict[str, JSON] | None = None  # how many, at what cost
        self.given = self.model.optimizer if self.model.compiled else None  # by the user
        if self.given is not None and not experiment.strategy.keeps_optimizer(experiment):
            refuse_steps(self.given)
            refuse_variables(self.given)
        self._options = _compile_options(self.model, experiment, source)

    def read_anew(self) -> None:
        """Divide the data among the ranks that there are."""
        # Programs ask for each worker's batches; what they need here are the held-out rows.
        plays = self.experiment.plays
        read = self.experiment.replace(capacities=None) if plays else self.experiment
        given = read, self.readers, self.communicator, sample_rank(self.model)
        self.feed: Feed = self._source.feed(*given)

    def _checks(self) -> list[keras.callbacks.Callback]:
        """What compares the batches of a callable; those of arrays follow from the seed."""
        return [EqualBatches(self.readers)] if callable(self.experiment.dataset) else []

    def optimizer(self) -> keras.optimizers.Optimizer:
        """A new optimizer: the experiment's, or that of a model that came compiled."""
        if self.given is not None:
            return copy_of(self.given)
        return without_replica_sum(
            _optimizer_class(self._optimizer_name)(**self._optimizer_options())
        )

    @property
    def _optimizer_name(self) -> str:
        return self.experiment.strategy.optimizer_of(self.experiment)

    def optimizer_record(self) -> JSON:
        """What its settings are, the effective learning rate among them."""
        if self.given is not None:
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
        """Train from where it stands to the last of the experiment's epochs, validating after each.

        To Keras an epoch that had been begun is a fit of its own.

        Args:
            callbacks: the strategy's own.
            exchange: which those that outlive a rank begin anew; None: training ends with it.
        """
        if exchange is not None and self.communicator.outlives and not owns_rows(self.experiment):
            self.recovery = Recovery(self, exchange)
            assert self._kept is not None  # as who has an exchange has said before
            build(self._kept)
            callbacks = [self.recovery, *callbacks]
        elif self.comeback is not None:  # it ends: messages are on their way between steps
            self.comeback.is_off, self.comeback = True, None
        self.outlive(lambda: self._fit_from_here(callbacks))

    def outlive(self, work: Callable[[], T]) -> T:
        """Do something, and again with the ranks that live when others are gone."""
        while True:
            try:
                return work()
            except Exception:
                died = isinstance(self.communicator.patience.trouble, RankDied)
                if self.recovery is None or not died:
                    raise
            self.recovery.recover()
            if self.keeping is not None:  # it has gone on from what it began with
                self.keeping = self.keeping._replace(resume=None)

    def state(self) -> list[keras.Variable]:
        """All that replicas share: variables of the model and of its optimizers."""
        assert self._kept is not None
        slots = [v for optimizer, _ in self._kept.optimizers for v in optimizer.variables]
        return [*self._kept.variables, *slots]

    def _fit_from_here(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        self.model.stop_training = False
        with self._keepers() as keepers:
            stop = StopTogether(self.communicator, self.progress.taken)
            everyone = [*callbacks, *self._checks(), *self.callbacks, self.progress, stop, *keepers]
            try:
                self._fit_all(everyone)
            finally:
                seam(self.model).clear()
        if not self.progress.taken:
            raise InvalidInput("dataset has no rows: give data with one sample or more")

    def _fit_all(self, everyone: list[keras.callbacks.Callback]) -> None:
        if self.progress.metrics:  # what they are is known to Keras after the first step
            self.model._symbolic_build(data_batch=self.feed.train.element_spec)
        if self.feed.ends_at(self.progress.position):
            self._end_epoch(everyone)
        if self.progress.position.step:
            self._fit(everyone, self.progress.position.epoch + 1)
        if not self.model.stop_training and self.progress.position.epoch < self.experiment.epochs:
            self._fit(everyone, self.experiment.epochs)

    def _fit(self, callbacks: list[keras.callbacks.Callback], epochs: int) -> None:
        at, steps = self.progress.position, self.feed.steps
        self.model.fit(
            self.feed.after(at),
            initial_epoch=at.epoch,
            epochs=epochs,
            steps_per_epoch=steps and steps - at.step,
            shuffle=False,  # the plan has shuffled
            validation_data=self.feed.validation,
            callbacks=callbacks,
            verbose=0,
        )

    def _end_epoch(self, callbacks: list[keras.callbacks.Callback]) -> None:
        """What `fit` does behind the last step of an epoch."""
        told, epoch = (
            keras.callbacks.CallbackList(callbacks, model=self.model),
            self.progress.position.epoch,
        )
        told.on_train_begin()
        told.on_epoch_begin(epoch)
        logs = dict(self.model.get_metrics_result())
        if self.feed.validation is not None:
            found = self.model.evaluate(
                self.feed.validation, callbacks=told, return_dict=True, verbose=0
            )
            logs |= {f"val_{name}": value for name, value in found.items()}
        told.on_epoch_end(epoch, logs)
        told.on_train_end()

    def keeps(self, kept: TrainingState) -> None:
        """See `labkit.strategies.Session`, as for `once`."""
        self._kept = kept

    def once(self, name: str, measure: Callable[[], JSON]) -> JSON:
        """What was measured, also by the training that this one takes up."""
        if name not in self.chosen:
            self.chosen[name] = measure()
        return self.chosen[name]

    def keep(self, keeping: CheckpointContext) -> None:
        """Keep the state of training, and begin with one that was kept."""
        self.keeping = keeping
        if keeping.resume is not None and keeping.resume.same:
            self.chosen = dict(keeping.resume.manifest["chosen"])

    @contextmanager
    def _keepers(self) -> Iterator[list[keras.callbacks.Callback]]:
        """What keeps the state, having put back what was kept; nothing where nobody wants it."""
        wanted = self.keeping is not None or self.comeback is not None
        if not wanted or self._kept is None or self.recorder is None:
            yield []
            return
        keeper = self.keeper(self.keeping)
        beside = self.comeback and self.comeback.beside(keeper, replicas=self.recovery is not None)
        try:
            yield [keeper, beside] if beside else [keeper]
            keeper.close()
            self.checkpoints = keeper.summary()
        finally:
            keeper.give_up()

    def keeper(self, keeping: CheckpointContext | None = None) -> Keeper:
        """One that keeps the state, or copies it for others."""
        assert self._kept is not None
        assert self.recorder is not None
        return Keeper(self, keeping or CheckpointContext(None), self._kept, self.recorder)

    def play(self, played: ProgramStrategy) -> None:
        """Train by programs, see `labkit.worker.played`."""
        from labkit.worker.played import play

        self.stage = play(self, played)

    def elsewhere(
        self,
        name: str,
        config: dict[str, JSON] | None,
        folder: str,
        inside: Sequence[str] = (),
    ) -> Child:
        """A fresh process with the model in the scope of TensorFlow's own strategy.

        Args:
            name: of its task.
            config: TF_CONFIG; None: one process has all workers.
            folder: where it may leave what other processes read.
            inside: words before its command, that say where it runs.
        """
        import cloudpickle

        from labkit.frameworks.child import Child
        from labkit.worker.external_training import Task

        # Metrics have variables: to read them would start TensorFlow before its strategy.
        options = {name: self._options.get(name) for name in ("loss", "loss_weights")}
        task = Task(
            self.experiment,
            self._source.rows(self.communicator),
            self.communicator.rank,
            config,
            self.model.get_weights(),
            cloudpickle.dumps(Recipe.of(TrainingSession.optimizer(self))),  # none that is watched
            cloudpickle.dumps(options),
            folder,
        )
        here = self.experiment.workers if config is None else 1
        module, threads = "labkit.worker.tensorflow_process", here * self.experiment.threads
        return Child(module, name, task, self.communicator, threads, inside=inside)

    def exported(self, name: str, found: Found, folder: str, inside: Sequence[str] = ()) -> Child:
        """A fresh process with the model in another framework, in a Python of its own.

        Args:
            name: of its task.
            found: the framework.
            folder: where arrays are exported to; the same on all ranks.
            inside: words before its command, that say where it runs.
        """
        from labkit.frameworks.child import Child
        from labkit.worker.exported import export

        given = (self.experiment, self._source, self.communicator.rank, self.model)
        told = export(*given, self.optimizer(), self._options.get("loss"), folder)
        # Whoever has the samples has written them before anybody's process reads.
        self.communicator.meet("exported arrays")
        module, threads = f"labkit.frameworks.{found.name}", self.experiment.threads
        return Child(module, name, told, self.communicator, threads, found.python, inside)

    def batches(self) -> Batches:
        """Each worker's batches, by its number and theirs."""
        return self._source.batches(self.experiment, sample_rank(self.model))

    def loop(
        self, step: Step, collect: Callable[[], None], predict: Predictor | None = None
    ) -> None:
        """Train by the strategy's own steps, see `labkit.strategies.Session`.

        Weights are collected after the last epoch, and after each one where callbacks of the
        user's own may look at them or nothing else can validate.
        """
        early = predict is None or self.experiment.callbacks is not None

        def validate() -> dict[str, float]:
            if early:
                collect()
            found = self.evaluate() if predict is None else self._evaluate_by(predict)
            return {f"val_{name}": value for name, value in found.items()}

        callbacks = [*self._checks(), *self.callbacks]
        given = self.model, self.feed, self.experiment.epochs, callbacks, self.progress
        with self._keepers() as keepers:
            self.progress.metrics = []  # an epoch's loss is that of its steps
            train(*given, keepers, step, validate, self.communicator)
        if not early:
            collect()

    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out rows by the whole model; empty where there are none."""
        if self.feed.validation is None:
            return {}
        return evaluate(self.model, self.feed.validation, self.communicator, sharded=True)

    def _evaluate_by(self, predict: Predictor) -> dict[str, float]:
        if self.feed.validation is None:
            return {}
        return inference.evaluate(self.model, self._held_out, predict, self.communicator)

    @cached_property
    def _held_out(self) -> tf.data.Dataset | None:
        """Where the ranks of a replica predict the same rows, replicas divide them."""
        return self._source.held_out(self.experiment, self.readers, sample_rank(self.model))

    def part(self, colour: int) -> Communicator:
        """The ranks of the same colour, until the session is closed (collective)."""
        self._parts.append(self.communicator.split(colour))
        return self._parts[-1]

    def close(self) -> None:
        """Let go of the ranks that trained or read together (collective)."""
        for part in self._parts:
            part.close()
        if self.readers is not self.communicator:
            self.readers.close()

    def exchange(self) -> dict[str, JSON] | None:
        """How gradients met: algorithm, why, buckets; None where they did not."""
        if self.exchanged is not None:
            return self.exchanged
        exchange = getattr(self.model.optimizer, "exchange", None)
        return exchange.describe() if exchange is not None and exchange.buckets else None

    def saved(self) -> bytes | None:
        """The trained model as a .keras file, with a plain optimizer, so that it opens anywhere.

        None for a model that Keras cannot save; the rank's log then says why.
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
                print(f"the trained model is not kept, Keras cannot save it: {error}")
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
    r"""A rate that grows linearly from that of one worker to the scaled one.

    \(\eta_t = \eta (1 + (k - 1) \min(1, t / T))\) with factor k over T steps.

    Source: P. Goyal et al.: Accurate, large minibatch SGD, 2017, arXiv 1706.02677.
    """

    def __init__(self, base: float, factor: float, steps: float) -> None:
        super().__init__()
        self.base, self.factor, self.steps = base, factor, steps

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """The rate at this step."""
        share = keras.ops.minimum(keras.ops.cast(step, keras.config.floatx()) / self.steps, 1.0)
        return self.base * (1.0 + (self.factor - 1.0) * share)

    def get_config(self) -> dict[str, float]:
        """The three numbers."""
        return {"base": self.base, "factor": self.factor, "steps": self.steps}


@cache
def leave_modules() -> None:
    """Let the collection of garbage pass over what is imported by now; more than half of its time.

    Once a process: what a run leaves behind must be found.
    """
    gc.collect()
    gc.freeze()


def reset(experiment: Experiment) -> None:
    """Forget the run before: Keras's graph, float type, policy and random state."""
    leave_modules()
    keras.backend.clear_session()
    _apply(keras_settings.settings(), own=callable(experiment.model))
    keras.config.set_floatx("float64" if experiment.precision == "float64" else "float32")
    keras.config.set_dtype_policy(experiment.precision)
    keras.utils.set_random_seed(experiment.seed)


def restore() -> None:
    """Leave Keras as a new process has it: a user's cell may be next in this engine."""
    keras.backend.clear_session()
    found = keras_settings.settings()
    _apply(found)
    keras.config.set_floatx(found["floatx"])
    keras.config.set_dtype_policy(found["floatx"])


def _apply(found: Mapping[str, Any], own: bool = True) -> None:
    """Set what keras.json says; named models expect channels last, whatever it says."""
    keras.config.set_epsilon(found["epsilon"])
    channels = found["image_data_format"] if own else "channels_last"
    keras.config.set_image_data_format(channels)


def build_model(experiment: Experiment, source: Source) -> keras.Model:
    """The experiment's model, with weights that depend on its seed alone."""
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
    """Dimensions of one sample of the model's first input; None for a model that does not say."""
    inputs = getattr(model, "inputs", None)
    return len(keras.tree.flatten(inputs)[0].shape) - 1 if inputs else None


def _compile_options(
    model: keras.Model, experiment: Experiment, source: Source
) -> dict[str, CompileOption]:
    options: dict[str, CompileOption] = {}
    if model.compiled:
        # As given, not as serialized: functions of the user's own are not registered with Keras.
        given = model._compile_config.config
        options = {k: v for k, v in given.items() if k not in ("optimizer", "jit_compile")}
    elif source.shapes is not None:
        task = source.shapes.task
        options = {"loss": models.task_loss(task), "metrics": models.task_metrics(task)}
    if experiment.loss is not None:
        options["loss"] = experiment.loss
    if experiment.metrics is not None:
        options["metrics"] = list(experiment.metrics)
    if options.get("loss") is None:
        raise InvalidInput("no loss: give loss='…' or return a compiled model")
    return options


def _optimizer_class(name: str) -> type[keras.optimizers.Optimizer]:
    """By the names of the module: `keras.optimizers.get` does not know all of them; and LARS."""
    found: type[keras.optimizers.Optimizer] = {
        known.lower(): kind for known, kind in (*vars(keras.optimizers).items(), ("LARS", LARS))
    }[name]
    return found


def _default_rate(optimizer: str) -> float:
    return float(_optimizer_class(optimizer)().learning_rate)
