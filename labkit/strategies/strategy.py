"""The base class of all strategies, and the protocols between a strategy and a rank."""

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
    from labkit.model_parallel.meter import LayerRow
    from labkit.model_parallel.weights import WeightShard
    from labkit.network import Network, Slowdown
    from labkit.programs import Program, Roles, ServerPieces
    from labkit.schedules.grid import Grid, GridLayer

# A batch is an array or tensor, or a nest of them, with one row per sample: the inputs or outputs
# of a Keras model.
Batch: TypeAlias = "np.ndarray | tf.Tensor | Sequence[Batch] | Mapping[str, Batch]"
# The result of one micro-batch has two values: its predictions, or None on ranks that do not
# receive them, and the sum of the losses that layers on this rank add.
Predicted: TypeAlias = "tuple[Batch | None, float]"
# A predictor maps micro-batches x, the same on all ranks of a replica, to their results.
Predictor: TypeAlias = "Callable[[Iterable[Batch]], Iterator[Predicted]]"
# A step trains on a batch (x, y, sample weight or None) and returns the loss, or None on ranks
# without the loss.
Step: TypeAlias = "Callable[[Batch, Batch, Batch | None], float | None]"
# A watcher receives a bucket's number, layers and compression statistics: see
# `labkit.exchange.Exchange`.
Watcher: TypeAlias = "Callable[[int, Sequence[Packed], ReductionRecord], None]"


class Serving(NamedTuple):
    """The function and the variables for predictions that all ranks of a replica compute together.

    Attributes:
        predict: The function that maps micro-batches to predictions: see `Predictor`.
        reads: Whether this rank reads the values of the input rows; if not, the rank needs only the
            number and the shape of the rows.
        variables: The variables that predictions on this rank need. The model's variables that this
            rank's predictions do not need may be freed.
    """

    predict: Predictor
    reads: bool
    variables: Sequence[keras.Variable]


class Stateful(Protocol):
    """An object with state between steps that is not stored in variables."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole state as arrays by name."""

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Load the state before the next step; a missing name keeps its initial value."""


@dataclass(frozen=True)
class TrainingState:
    """The state of a rank that a checkpoint needs in order to resume training.

    Attributes:
        variables: The variables of this rank's part of the model.
        optimizers: The optimizers, each with the variables that it updates.
        pairs: The variables on this rank that are slices of the whole model's variables.
        remembers: The objects with state outside variables (`Stateful`), by name.
        settle: Function to call before a checkpoint is written; it completes all pending updates
            and messages.
        release: Function to call after the whole model's weights have been loaded; it frees the
            weights that this rank does not train.
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
        """The network to emulate, or None."""

    @property
    def slowdowns(self) -> Mapping[int, Slowdown]:
        """The slowdown of each straggler, by worker, from the network and from `stragglers`."""

    @property
    def blocks(self) -> int | None:
        """The number of blocks that the model can be cut into; None: unknown before ranks start."""

    @property
    def max_slices(self) -> int | None:
        """The largest unit count of layers that can be sliced; None: unknown before ranks start."""

    @property
    def grid_layers(self) -> Sequence[GridLayer] | None:
        """The layers that a grid of machines would divide; None: unknown before ranks start."""

    @property
    def rows(self) -> int | None:
        """The number of rows in the training data; None: unknown before ranks start."""

    @property
    def epoch_steps(self) -> int | None:
        """The number of steps in an epoch; None: unknown before ranks start."""

    @property
    def time_steps(self) -> int | None:
        """The time steps in a sample of a recurrent model; None: unknown before ranks start."""

    @property
    def batch_size(self) -> int:
        """The number of rows in a global batch, over all workers."""

    @property
    def batch_weights(self) -> Sequence[float] | None:
        """The relative number of rows of each worker (`batch_weights`); None: equal numbers."""

    @property
    def input_mode(self) -> str:
        """The way in which ranks receive their rows of a batch (`input_mode`)."""

    @property
    def data_partition(self) -> str:
        """How samples are divided among the workers that read them (`data_partition`)."""

    @property
    def failed_workers(self) -> Sequence[int]:
        """The workers that fail before the end of training on the virtual clock."""

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
        """The arguments of the Keras optimizer."""

    @property
    def threads(self) -> int:
        """The number of threads with which a rank computes."""

    @property
    def callbacks(self) -> Callable[..., Sequence[keras.callbacks.Callback]] | None:
        """The factory of the user's callbacks, which may read and set weights; or None."""


class Session(Protocol):
    """The training session of one rank: its model, its data, and its communicators.

    Attributes:
        communicator: The communicator of all ranks.
        readers: The communicator of the ranks that divide a batch among them.
        watchers: The functions that receive statistics of compressed buckets.
        timeline: The log of the actions of this rank and their times.
        layers: The records of a strategy that slices layers; one `LayerRow` per layer.
        partition: The record of how the model was cut into stages.
        memory: The record of this rank's memory use, from a strategy that cuts the model.
        exchanged: The record of traffic between processes of another framework; None: no such
            processes.
        guard: The check of gradients before the exchange; None: no check.
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
        """Register the state that checkpoints of this rank save; call before `fit` or `loop`."""

    def once(self, name: str, measure: Callable[[], JSON]) -> JSON:
        """Measure once: a resumed training returns the value that its first run measured."""

    def play(self, strategy: ProgramStrategy) -> None:
        """Train by running the strategy's programs (`labkit.programs`) on the session's clock."""

    def tensorflow_process(
        self,
        name: str,
        config: dict[str, JSON] | None,
        folder: str,
        inside: Sequence[str] = (),
    ) -> Child:
        """Start a new process that trains the same model with a `tf.distribute` strategy."""

    def exported(
        self, name: str, environment: Installation, folder: str, inside: Sequence[str] = ()
    ) -> Child:
        """Start a new process that trains the same model with a framework other than TensorFlow."""

    def fit(
        self, callbacks: Sequence[keras.callbacks.Callback], exchange: Exchange | None = None
    ) -> None:
        """Train with `model.fit` on this rank's data for the experiment's epochs.

        Args:
            callbacks: The callbacks that the strategy needs.
            exchange: The exchange that the surviving ranks reset after a rank fails; None: a
                failure ends training.
        """

    def part(self, colour: int) -> Communicator:
        """Return a communicator of the ranks with the same colour, valid until training ends."""

    def loop(
        self, step: Step, collect: Callable[[], None], predict: Predictor | None = None
    ) -> None:
        """Train on this rank's data with the strategy's own training step.

        Args:
            step: Function that trains on one batch.
            collect: Function that copies the weights of the whole model to every rank.
            predict: Predictor for validation without collected weights; None: each rank validates
                with the whole model.
        """


@runtime_checkable
class ProgramStrategy(Protocol):
    """A strategy with one program per worker and per server: see `labkit.programs`."""

    @property
    def transport(self) -> Transport:
        """The transport of messages between ranks."""

    @property
    def serves_concurrently(self) -> bool:
        """Whether a server answers messages while the worker on the same rank computes."""

    @property
    def replica_cut(self) -> int | Grid:
        """The number of stages, or the grid, of each worker's model; 1: the model is not cut."""

    def copies(self, workers: int) -> Sequence[int]:
        """Return the processes whose weights are averaged into the final model; may be empty."""

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[ServerPieces]:
        """Return each server's part of weights with these shapes; empty without servers."""

    def hosts(self, workers: int) -> Sequence[int]:
        """Return the ranks of workers, of servers, and of workers' other stages or machines."""

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Return one process's program, from its start or from the mark of a restart point."""


class Strategy(Checked):
    """The base class of strategies; the fields of a subclass are the user's options.

    Attributes:
        architecture: The topology of the exchange: collective, parameter servers, or neighbours.
        synchronization: The rule by which workers wait for each other; the rule limits the
            staleness of gradients.
        parallelism: What is divided among ranks: the data, or parts of the model.
        scheduling: The order of computation and communication within a step.
        paper: The author, year and number of the source; the docstring has the full citation.
        normalizes_globally: Whether synchronized batch normalization computes statistics over all
            replicas.
        emulated: Whether labkit emulates the network between the ranks; False: the strategy has its
            own network.
        resumable: Whether a strategy without programs can resume training from a checkpoint; it
            then calls `Session.keeps`.
        no_forecast_reason: The reason why the strategy has no forecast, as a phrase that follows
            its name.

    The first four attributes contain names from `labkit.strategies.AXES`. The first name of each
    attribute applies with the default fields. Further names apply with other fields or numbers of
    workers. The method `cell` returns the names that apply.
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
        """Raise InvalidInput at class definition for a name that is not on its taxonomy axis."""
        super().__init_subclass__(**options)
        for axis in DECLARED_AXES:
            validate_places(cls.__name__, axis, getattr(cls, axis))

    @classmethod
    def incompatibility(cls, compressor: Compressor) -> str:
        """Return why the compressor is unsupported, as a phrase after its name; "" if supported."""
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
        """Return whether the strategy supports this cell, a combination of one name per axis."""
        return True

    @classmethod
    def cells(cls) -> list[Cell]:
        """Return all cells that the strategy supports; the cell of the default fields is first."""
        places = (
            *(cls.architecture, cls.synchronization, cls.parallelism),
            *(cls.compression(), cls.scheduling),
        )
        return [cell for cell in map(Cell._make, product(*places)) if cls.supports(cell)]

    def cell(self, workers: int) -> Cell:
        """Return the strategy's cell in the taxonomy, for these fields and number of workers."""
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
        """Whether the result equals that of one process on the global batch, up to rounding."""
        return False

    def is_exact_in(self, experiment: ExperimentSpec) -> bool:
        """Return whether the strategy is exact in this experiment."""
        return self.exact

    @property
    def lossy(self) -> Compressor | None:
        """The compressor whose conservation law the verification checks; None: no compressor."""
        return None

    @property
    def uses_programs(self) -> bool:
        """Whether the strategy runs programs on the wall clock too, not only the virtual clock."""
        return False

    @property
    def replays(self) -> bool:
        """Whether the programs compute each gradient at weights that servers have held."""
        return True

    @property
    def environment_key(self) -> str:
        """The versions of software other than labkit on which the trained weights depend."""
        return ""

    def optimizer_of(self, experiment: ExperimentSpec) -> str:
        """Return the name of the optimizer that applies gradients."""
        return experiment.optimizer

    def optimizer_options_of(self, experiment: ExperimentSpec) -> Mapping[str, JSON]:
        """Return the arguments of the optimizer that applies gradients."""
        return experiment.optimizer_options

    def keeps_optimizer(self, experiment: ExperimentSpec) -> bool:
        """Return whether one optimizer updates all variables, as after `model.compile`."""
        return False

    def rate_of(self, experiment: ExperimentSpec) -> float:
        """Return the factor by which the experiment's learning rate is multiplied."""
        return 1.0

    @property
    def replica_cut(self) -> int | Grid:
        """The number of stages, or the grid, of each worker's model; 1: the model is not cut."""
        return 1

    def extra_ranks(self, workers: int) -> int:
        """Return the number of ranks in addition to one per worker."""
        return 0

    def processes(self, workers: int) -> int:
        """Return the number of processes, or devices, that compute at the same time."""
        return workers + self.extra_ranks(workers)

    def places(self, worker: int, workers: int) -> list[int]:
        """Return the ranks of a worker."""
        return [worker]

    def tolerated_failures(self, workers: int) -> int:
        """Return how many workers may fail on the virtual clock before other workers deadlock."""
        return 0

    @property
    def fault_tolerant(self) -> bool:
        """Whether training continues after ranks fail, on `Cluster(fault_tolerant=True)`."""
        return False

    @property
    def stats_interval(self) -> int:
        """The number of steps between compression statistics; 0: no statistics."""
        return 0

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the largest number of rows that a rank processes at a time; 0 if unknown."""
        return 0

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput, before any rank starts, for an experiment that is not supported."""

    def readers(self, communicator: Communicator) -> Communicator:
        """Return the ranks that divide each batch among them; other ranks read the same rows."""
        return communicator

    def predictor(self, model: keras.Model, replica: Communicator) -> Predictor | None:
        """Return the function with which the ranks of a replica predict the same rows together.

        Args:
            model: The whole model, built, and the same on all ranks.
            replica: The communicator of the replica's ranks.

        Returns:
            The predictor, or None if each rank holds the whole model and predicts its own rows.

        Raises:
            InvalidInput: The strategy cannot divide this model.
        """
        return None

    def serving(self, model: keras.Model, replica: Communicator) -> Serving | None:
        """Return the predictor and the variables that it needs, for a rank that serves predictions.

        By default, the predictor needs all variables of the model. The arguments, and the result
        None, have the same meaning as in `predictor`.
        """
        predict = self.predictor(model, replica)
        return None if predict is None else Serving(predict, True, model.variables)

    def train(self, session: Session) -> None:
        """Train this rank's model."""
        raise NotImplementedError(f"{type(self).__name__} must define train")

    def forecast(self, query: Query) -> StepForecast:
        """Return the duration of a step, composed of measured and simulated parts.

        Raises:
            InvalidInput: The strategy has no forecast, or a measurement is missing; the message
                names the reason.
        """
        from labkit.strategies import STRATEGIES

        known = [n for n, kind in STRATEGIES.items() if kind.forecast is not Strategy.forecast]
        raise InvalidInput(
            f"{type(self).__name__} {self.no_forecast_reason}, so that it has no forecast; use "
            f"one of {', '.join(known)}"
        )

    def to_json(self) -> dict[str, JSON]:
        """Return the strategy's name and its fields as a JSON object."""
        return {"name": type(self).__name__, **self.model_dump(mode="json")}
