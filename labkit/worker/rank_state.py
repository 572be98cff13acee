"""The model, the data and the communicators of one rank."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from labkit import models
from labkit.common import keras_settings
from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator, Injector
from labkit.exchange import Guard, Timeline
from labkit.experiment import Experiment
from labkit.keras import (
    LARS,
    copy_of,
    evaluate,
    refuse_steps,
    refuse_variables,
    without_replica_sum,
)
from labkit.model_parallel.memory import Memory
from labkit.model_parallel.messages import LayerRow
from labkit.programs.event_log import Event
from labkit.programs.replica import Batches
from labkit.records.checkpoints import CheckpointContext
from labkit.strategies import TrainingState, Watcher
from labkit.worker.feed import DataSource, Feed
from labkit.worker.recorder import Progress, Recorder

# A `CompileOption` is an argument of `keras.Model.compile`. A `CompileOption` is a name, an object,
# or a nested structure of both.
CompileOption: TypeAlias = "str | keras.losses.Loss | Sequence[CompileOption] | None"


class RankState:
    """The model, the data and the communicators of one rank, and how far training has come.

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
        # The exchange calls each function in `watchers` for each compressed bucket.
        self.watchers: list[Watcher] = []
        policy = experiment.on_nonfinite
        self.guard = None if policy is None else Guard(policy, communicator.rank)
        # The keys of `injectors` are rank numbers, or worker numbers on the virtual clock.
        self.injectors: dict[int, Injector] = {}
        self.timeline = Timeline(communicator.clock)
        # The dict `partition` records where pipeline stages are cut, and why.
        self.partition: dict[str, JSON] = {}
        # Strategies that divide the model among ranks set the attribute `memory`.
        self.memory: Memory | None = None
        # For each divided layer, `layers` holds the rank's part and its sent bytes.
        self.layers: list[LayerRow] = []
        reset(experiment)
        self.model = build_model(experiment, source)
        self.divide_data()
        # Strategies that run programs add rows to the recorder directly, without Keras callbacks.
        self.recorder: Recorder | None = None
        self.interleaving: list[Event] = []
        # Strategies with other frameworks, and simulations, set `exchanged` to a description of
        # their exchange.
        self.exchanged: dict[str, JSON] | None = None
        user_callbacks = experiment.callbacks() if experiment.callbacks else []
        self.callbacks: list[keras.callbacks.Callback] = list(user_callbacks)
        self.progress = Progress(self.feed.steps)
        self.checkpoint_context: CheckpointContext | None = None
        self._training_state: TrainingState | None = None
        # Checkpoints keep measured values, so a resumed run does not measure again.
        self.chosen: dict[str, JSON] = {}
        # The dict `checkpoints` holds the number and the cost of saved checkpoints.
        self.checkpoints: dict[str, JSON] | None = None
        self.user_optimizer = self.model.optimizer if self.model.compiled else None
        if self.user_optimizer is not None and not experiment.strategy.keeps_optimizer(experiment):
            refuse_steps(self.user_optimizer)
            refuse_variables(self.user_optimizer)
        self._options = _compile_options(self.model, experiment, source)

    def divide_data(self) -> None:
        """Divide the training and validation data among the current ranks."""
        # Strategies that run programs read their training batches from the method `batches`.
        # Strategies that run programs use only the validation rows and the number of training steps
        # from `feed`.
        uses_programs = self.experiment.uses_programs
        experiment = self.experiment
        if uses_programs:
            experiment = experiment.replace(batch_weights=None)
        arguments = experiment, self.readers, self.communicator, sample_rank(self.model)
        self.feed: Feed = self._source.feed(*arguments)

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

    def state(self) -> list[keras.Variable]:
        """Return the variables of model and optimizers, which are equal on all replicas."""
        assert self._training_state is not None
        slots = [v for optimizer, _ in self._training_state.optimizers for v in optimizer.variables]
        return [*self._training_state.variables, *slots]

    def keeps(self, state: TrainingState) -> None:
        """Register the state that checkpoints save, see `labkit.strategies.Session`."""
        self._training_state = state

    def once(self, name: str, measure: Callable[[], JSON]) -> JSON:
        """Measure a value once and return it; a resumed training returns the first run's value."""
        if name not in self.chosen:
            self.chosen[name] = measure()
        return self.chosen[name]

    def batches(self) -> Batches:
        """Return a function (worker, batch number) that returns a training batch of this worker."""
        return self._source.batches(self.experiment, sample_rank(self.model))

    def evaluate(self) -> dict[str, float]:
        """Evaluate the whole model on the validation rows; return metrics, or {} without rows."""
        if self.feed.validation is None:
            return {}
        return evaluate(self.model, self.feed.validation, self.communicator, sharded=True)

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

        If Keras cannot save the model, the result is None. The output of this rank gives the reason
        for the error.
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
    r"""A learning rate that grows linearly from one worker's rate to the scaled rate.

    The rate is \(\eta_t = \eta (1 + (k - 1) \min(1, t / T))\). In the formula, η is the learning
    rate of one worker. The factor k scales the learning rate. The symbol t is the training step,
    and T the number of warmup steps.

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
        # The compile arguments are the user's original objects, because custom functions may not be
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
