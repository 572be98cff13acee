"""The base class of all strategies, and the interfaces between a strategy and a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    TypeAlias,
    runtime_checkable,
)

from labkit.common.errors import InvalidInput
from labkit.common.validated import Checked
from labkit.compression import FAMILIES, samples
from labkit.strategies.taxonomy import DECLARED_AXES, Cell, validate_places

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

    from labkit.common.canonical_json import JSON
    from labkit.communicator import Communicator, Transport
    from labkit.compression import Compressor
    from labkit.exchange import BucketLayer as Packed
    from labkit.exchange import Exchange, Guard, ReductionRecord, Timeline
    from labkit.forecast import Query, StepForecast
    from labkit.frameworks.child import Child
    from labkit.frameworks.environments import Installation
    from labkit.model_parallel.memory import Memory
    from labkit.model_parallel.messages import LayerRow
    from labkit.model_parallel.weights import WeightShard
    from labkit.network import Network, Slowdown
    from labkit.programs import Program, Roles, ServerPieces
    from labkit.schedules.grid_layers import Grid, GridLayer

# A batch is an array or tensor, or a nested structure of them, with one row per sample. A batch
# contains the inputs or the outputs of a Keras model.
Batch: TypeAlias = "np.ndarray | tf.Tensor | Sequence[Batch] | Mapping[str, Batch]"
# A `Predicted` is the result for one micro-batch: predictions and a sum of losses. The predictions
# are None on ranks that do not receive predictions. The sum of losses covers the losses that the
# rank's own layers add to the model.
Predicted: TypeAlias = "tuple[Batch | None, float]"
# A predictor maps micro-batches of inputs to results; all ranks of a replica get the same
# micro-batches.
Predictor: TypeAlias = "Callable[[Iterable[Batch]], Iterator[Predicted]]"
# A `Step` is a function that trains on a batch (x, y, and sample weights or None). A step function
# returns the loss, or None on ranks that do not know the loss.
Step: TypeAlias = "Callable[[Batch, Batch, Batch | None], float | None]"
# A `Watcher` is a function that receives the compression statistics of a gradient bucket.
Watcher: TypeAlias = "Callable[[int, Sequence[Packed], ReductionRecord], None]"


class Serving(NamedTuple):
    """A predictor that all ranks of a replica run together, and the variables that it needs.

    Attributes:
        predict: The function that maps micro-batches to predictions (a `Predictor`).
        reads: Whether this rank needs the values of the input rows. A rank without the values needs
            only their number and shape.
        variables: The variables that predictions on this rank need. The rank may free all variables
            that its predictions do not need.
    """

    predict: Predictor
    reads: bool
    variables: Sequence[keras.Variable]


class Stateful(Protocol):
    """An object whose state between training steps is not stored in variables."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole state as arrays by name."""

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Load the state before the next step; missing names keep their initial values."""


@dataclass(frozen=True)
class TrainingState:
    """The state of a rank that a checkpoint stores, so that training can resume.

    Attributes:
        variables: The variables of the model part on this rank.
        optimizers: Pairs of an optimizer and the variables that it updates.
        pairs: Those variables on this rank that are slices of variables of the whole model.
        remembers: Mapping from names to objects whose state is not in variables (`Stateful`).
        settle: Function to call before a checkpoint is written; it completes all pending updates
            and messages.
        release: Function to call after the weights of the whole model have been loaded. The
            function frees weights that this rank does not train.
    """

    variables: Sequence[keras.Variable]
    optimizers: Sequence[tuple[keras.optimizers.Optimizer, Sequence[keras.Variable]]]
    pairs: Sequence[WeightShard] = ()
    remembers: Mapping[str, Stateful] = field(default_factory=dict)
    settle: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None


class ExperimentSpec(Protocol):
    """The properties of an experiment that a strategy reads."""

    @property
    def workers(self) -> int:
        """The number of workers."""

    @property
    def network(self) -> str | Network | None:
        """The network to emulate, or None for no emulation."""

    @property
    def slowdowns(self) -> Mapping[int, Slowdown]:
        """The slowdown of each straggler, as defined by the network and by `stragglers`."""

    @property
    def blocks(self) -> int | None:
        """The number of blocks into which the model can be cut; None before ranks start."""

    @property
    def max_slices(self) -> int | None:
        """The number of units of the widest sliceable layer; None before ranks start."""

    @property
    def grid_layers(self) -> Sequence[GridLayer] | None:
        """The layers that a grid of machines would divide; None before ranks start."""

    @property
    def rows(self) -> int | None:
        """The number of rows in the training data; None if unknown before ranks start."""

    @property
    def epoch_steps(self) -> int | None:
        """The number of steps in an epoch; None if unknown before ranks start."""

    @property
    def time_steps(self) -> int | None:
        """The number of time steps in a sample of a recurrent model; None before ranks start."""

    @property
    def batch_size(self) -> int:
        """The number of rows in a global batch, over all workers."""

    @property
    def batch_weights(self) -> Sequence[float] | None:
        """The relative row count of each worker (`batch_weights`), or None for equal counts."""

    @property
    def input_mode(self) -> str:
        """How ranks receive their rows of a batch (`input_mode`)."""

    @property
    def data_partition(self) -> str:
        """How samples are divided among the workers that read data (`data_partition`)."""

    @property
    def failed_workers(self) -> Sequence[int]:
        """The workers that fail during training on the virtual clock."""

    @property
    def precision(self) -> str:
        """The name of a Keras dtype policy, or "float64"."""

    @property
    def clock(self) -> str:
        """The clock of the experiment: "wall" or "virtual"."""

    @property
    def optimizer(self) -> str:
        """The name of a Keras optimizer."""

    @property
    def optimizer_options(self) -> Mapping[str, JSON]:
        """The constructor arguments of the Keras optimizer."""

    @property
    def threads(self) -> int:
        """The number of threads with which a rank computes."""

    @property
    def callbacks(self) -> Callable[..., Sequence[keras.callbacks.Callback]] | None:
        """Function that creates the user's callbacks, or None; callbacks may change weights."""


class Session(Protocol):
    """The training session of one rank: its model, its data, and its communicators.

    Attributes:
        communicator: The communicator of all ranks of the training.
        readers: The communicator of the ranks among which each batch is divided.
        watchers: The functions that are called with the statistics of compressed buckets.
        timeline: The log of what this rank does, with times.
        layers: For strategies that divide layers, one `LayerRow` per layer for the run's record.
        partition: How the model was cut into stages, for the run's record.
        memory: The memory use of this rank for the run's record, if the strategy cuts the model.
        exchanged: Traffic of another framework such as PyTorch, for the run's record. If
            `exchanged` is None, the strategy uses no other framework.
        guard: The object that checks gradients before the exchange, or None for no check.
    """

    communicator: Communicator
    readers: Communicator
    model: keras.Model
    seed: int
    watchers: list[Watcher]
    timeline: Timeline
    layers: list[LayerRow]
    partition: dict[str, JSON]
    memory: Memory | None
    exchanged: dict[str, JSON] | None
    guard: Guard | None

    @property
    def experiment(self) -> ExperimentSpec:
        """The experiment of this session."""

    def compile(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Compile the model with the experiment's loss and metrics."""

    def optimizer(self) -> keras.optimizers.Optimizer:
        """Return a new instance of the experiment's Keras optimizer."""

    def keeps(self, state: TrainingState) -> None:
        """Register the state that checkpoints save; call this before `fit` or `loop`."""

    def once(self, name: str, measure: Callable[[], JSON]) -> JSON:
        """Measure once and return the value; a resumed training reuses the first value."""

    def play(self, strategy: ProgramStrategy) -> None:
        """Train by running the strategy's programs (`labkit.programs`) on the session's clock."""

    def tensorflow_process(
        self,
        name: str,
        config: dict[str, JSON] | None,
        folder: str,
        inside: Sequence[str] = (),
    ) -> Child:
        """Start a process that trains the same model with a strategy of `tf.distribute`."""

    def exported(
        self, name: str, environment: Installation, folder: str, inside: Sequence[str] = ()
    ) -> Child:
        """Start a process that trains the same model with a framework other than TensorFlow."""

    def fit(
        self, callbacks: Sequence[keras.callbacks.Callback], exchange: Exchange | None = None
    ) -> None:
        """Train with `model.fit` on this rank's data, for all epochs of the experiment.

        Args:
            callbacks: The Keras callbacks that the strategy needs.
            exchange: The gradient exchange, which the surviving ranks reset after a rank fails.
                If `exchange` is None, training ends when a rank fails.
        """

    def part(self, colour: int) -> Communicator:
        """Return a communicator of the ranks with the same colour, valid until training ends."""

    def loop(
        self, step: Step, collect: Callable[[], None], predict: Predictor | None = None
    ) -> None:
        """Train on this rank's data with the training step of the strategy itself.

        Args:
            step: Function that trains on one batch.
            collect: Function that copies the weights of the whole model to every rank.
            predict: Predictor for validation, which does not need the weights of the whole model.
                If `predict` is None, each rank validates with the whole model.
        """


@runtime_checkable
class ProgramStrategy(Protocol):
    """A strategy that runs a program for each worker and each server: see `labkit.programs`."""

    @property
    def transport(self) -> Transport:
        """The transport of messages between ranks."""

    @property
    def serves_concurrently(self) -> bool:
        """Whether a server answers messages while the worker on the same rank computes."""

    @property
    def replica_cut(self) -> int | Grid:
        """The number of stages or the grid that cuts each worker's model; 1 means no cut."""

    def copies(self, workers: int) -> Sequence[int]:
        """Return the processes whose weights are averaged into the final model; can be empty."""

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[ServerPieces]:
        """Return each server's part of weights with the given shapes; empty without servers."""

    def hosts(self, workers: int) -> Sequence[int]:
        """Return the rank that runs each process."""

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Return the program of one process, from its start or from the restart point `mark`."""


class Strategy(Checked):
    """The base class of strategies; the fields of its subclasses are the options of the user.

    Attributes:
        architecture: How ranks exchange values: collectively, through parameter servers, or with
            neighbours.
        synchronization: How workers wait for each other, which limits the staleness of gradients.
        parallelism: What is divided among ranks: the data, or the model.
        scheduling: The order of computation and communication in a training step.
        paper: The first author, year and arXiv number or conference of the paper; the docstring has
            the full citation.
        normalizes_globally: Whether synchronized batch normalization uses statistics over all
            replicas.
        emulated: Whether labkit emulates the network between the ranks. If False, the strategy
            brings its own network.
        resumable: Whether a strategy that does not run as programs can resume training from a
            checkpoint. A resumable strategy calls `Session.keeps`.
        no_forecast_reason: Why the strategy has no forecast, as a phrase that follows the name of
            the strategy.

    The attributes for architecture, synchronization, parallelism and scheduling contain names from
    `labkit.strategies.AXES`. The first name in each attribute describes the strategy with default
    settings. Later names of a taxonomy attribute are valid for other values of fields. Some later
    names are valid for other numbers of workers. The method `cell` returns the names that are valid
    for given fields and workers.
    """

    architecture: ClassVar[tuple[str, ...]] = ("collective",)
    synchronization: ClassVar[tuple[str, ...]] = ("synchronous",)
    parallelism: ClassVar[tuple[str, ...]] = ("data",)
    scheduling: ClassVar[tuple[str, ...]] = ("sequential",)
    paper: ClassVar[str] = ""
    normalizes_globally: ClassVar[bool] = False
    emulated: ClassVar[bool] = True
    resumable: ClassVar[bool] = False
    no_forecast_reason: ClassVar[str] = "has no model of its step time"

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise InvalidInput if a subclass declares a name that is not on its taxonomy axis."""
        super().__init_subclass__(**options)
        for axis in DECLARED_AXES:
            validate_places(cls.__name__, axis, getattr(cls, axis))

    @classmethod
    def incompatibility(cls, compressor: Compressor) -> str:
        """Return why a compressor does not work, as a phrase after its name; "" if it works."""
        return ""

    @classmethod
    def compression(cls) -> tuple[str, ...]:
        """Return "none" and the families of the compressors that the strategy supports."""
        compressors = samples() if "compressor" in cls.model_fields else ()
        families = {
            compressor.family for compressor in compressors if not cls.incompatibility(compressor)
        }
        return ("none", *(family for family in FAMILIES if family in families))

    @classmethod
    def supports(cls, cell: Cell) -> bool:
        """Return whether the strategy supports a cell, which combines one name per axis."""
        return True

    @classmethod
    def cells(cls) -> list[Cell]:
        """Return all combinations of taxonomy names that the strategy supports."""
        places = (
            *(cls.architecture, cls.synchronization, cls.parallelism),
            *(cls.compression(), cls.scheduling),
        )
        return [cell for cell in map(Cell._make, product(*places)) if cls.supports(cell)]

    def cell(self, workers: int) -> Cell:
        """Return the place of the strategy in the taxonomy of methods."""
        compressor: Compressor | None = getattr(self, "compressor", None)
        return Cell(
            self.architecture[0],
            self.synchronization[0],
            self.parallelism[0],
            "none" if compressor is None else compressor.family,
            self.scheduling[0],
        )

    @property
    def exact(self) -> bool:
        """Whether the result equals one-process training on the global batch, up to rounding."""
        return False

    def is_exact_in(self, experiment: ExperimentSpec) -> bool:
        """Return whether the strategy is exact in this experiment."""
        return self.exact

    @property
    def lossy(self) -> Compressor | None:
        """The compressor whose conservation law is verified, or None without compression."""
        return None

    @property
    def uses_programs(self) -> bool:
        """Whether the strategy runs as programs on every clock, not only on the virtual clock."""
        return False

    @property
    def replays(self) -> bool:
        """Whether all gradients are computed at weights that servers once held."""
        return True

    @property
    def environment_key(self) -> str:
        """Versions of software other than labkit that affect the trained weights."""
        return ""

    def optimizer_of(self, experiment: ExperimentSpec) -> str:
        """Return the name of the optimizer that applies gradients."""
        return experiment.optimizer

    def optimizer_options_of(self, experiment: ExperimentSpec) -> Mapping[str, JSON]:
        """Return the constructor arguments of the optimizer that applies gradients."""
        return experiment.optimizer_options

    def keeps_optimizer(self, experiment: ExperimentSpec) -> bool:
        """Return whether one optimizer updates all variables, as after `model.compile`."""
        return False

    def rate_of(self, experiment: ExperimentSpec) -> float:
        """Return the factor by which the experiment's learning rate is multiplied."""
        return 1.0

    @property
    def replica_cut(self) -> int | Grid:
        """The number of stages or the grid that cuts each worker's model; 1 means no cut."""
        return 1

    def extra_ranks(self, workers: int) -> int:
        """Return the number of ranks minus the number of workers."""
        return 0

    def processes(self, workers: int) -> int:
        """Return the number of processes, or devices, that compute at the same time."""
        return workers + self.extra_ranks(workers)

    def places(self, worker: int, workers: int) -> list[int]:
        """Return the ranks of a worker."""
        return [worker]

    def tolerated_failures(self, workers: int) -> int:
        """Return how many workers may fail on the virtual clock before the others wait forever."""
        return 0

    @property
    def fault_tolerant(self) -> bool:
        """Whether training continues if ranks of a `Cluster(fault_tolerant=True)` fail."""
        return False

    @property
    def stats_interval(self) -> int:
        """The number of steps between compression statistics, or 0 for no statistics."""
        return 0

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the maximum number of rows that a rank processes at a time, or 0 if unknown."""
        return 0

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for an unsupported experiment, before any rank starts."""

    def readers(self, communicator: Communicator) -> Communicator:
        """Return the ranks that divide each batch; all ranks of one replica read the same rows."""
        return communicator

    def predictor(self, model: keras.Model, replica: Communicator) -> Predictor | None:
        """Return the function with which all ranks of a replica jointly predict the same rows.

        Args:
            model: The whole model, which is built and is equal on all ranks.
            replica: The communicator of the replica's ranks.

        Returns:
            The predictor, or None if each rank holds the whole model and predicts its own rows.

        Raises:
            InvalidInput: If the strategy cannot divide this model.
        """
        return None

    def serving(self, model: keras.Model, replica: Communicator) -> Serving | None:
        """Return the predictor for inference, and the variables that it needs on this rank.

        By default, the predictor needs all variables of the model. The arguments, and a result of
        None, have the same meaning as in `predictor`.
        """
        predict = self.predictor(model, replica)
        return None if predict is None else Serving(predict, True, model.variables)

    def train(self, session: Session) -> None:
        """Train this rank's model."""
        raise NotImplementedError(f"{type(self).__name__} must define train")

    def forecast(self, query: Query) -> StepForecast:
        """Forecast the duration of a training step from measured and simulated times.

        Raises:
            InvalidInput: If the strategy has no forecast, or if a measurement is missing; the
                message gives the reason.
        """
        known = [n for n, kind in STRATEGIES.items() if kind.forecast is not Strategy.forecast]
        raise InvalidInput(
            f"{type(self).__name__} {self.no_forecast_reason}, so that it has no forecast; use "
            f"one of {', '.join(known)}"
        )

    def to_json(self) -> dict[str, JSON]:
        """Return the strategy's name and its fields as a JSON object."""
        return {"name": type(self).__name__, **self.model_dump(mode="json")}


# The package `labkit.strategies` fills the dict `STRATEGIES`, because the package imports all
# strategies.
STRATEGIES: dict[str, type[Strategy]] = {}
