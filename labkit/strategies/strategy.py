"""What every strategy is, and what a rank hands to it."""

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
from labkit.strategies.taxonomy import PLACED, Cell, check_places

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

    from labkit.common.canonical_json import JSON
    from labkit.communicator import Communicator, Transport
    from labkit.compression import Compressor
    from labkit.exchange import Exchange, Guard, Seen, Timeline
    from labkit.exchange import Layer as Packed
    from labkit.forecast import Query, StepForecast
    from labkit.frameworks.child import Child
    from labkit.frameworks.environments import Found
    from labkit.model_parallel.memory import Memory
    from labkit.model_parallel.meter import LayerRow
    from labkit.model_parallel.weights import Pair
    from labkit.network import Network, Slowdown
    from labkit.programs import Parts, Program, Roles
    from labkit.schedules.grid import Grid, Layer

# One array or tensor, or a nest of them, with a row a sample: what a Keras model takes and gives.
Batch: TypeAlias = "np.ndarray | tf.Tensor | Sequence[Batch] | Mapping[str, Batch]"
# Of micro-batches x, which all ranks of a replica bring: the predictions of each, or None on ranks
# that do not hold them, and what layers on this rank add to its loss.
Predicted: TypeAlias = "tuple[Batch | None, float]"
Predictor: TypeAlias = "Callable[[Iterable[Batch]], Iterator[Predicted]]"
# Of a batch (x, y, sample weight or None): its loss on the rank that knows it, elsewhere None.
Step: TypeAlias = "Callable[[Batch, Batch, Batch | None], float | None]"
# Of a bucket's number and layers: see `labkit.exchange.Exchange`.
Watcher: TypeAlias = "Callable[[int, Sequence[Packed], Seen], None]"


class Serving(NamedTuple):
    """How a rank answers rows together with the other ranks of a replica.

    Attributes:
        predict: see `Predictor`.
        reads: whether this rank reads the rows; elsewhere only their number and shape count.
        variables: what it computes with; nothing else of the model need be there.
    """

    predict: Predictor
    reads: bool
    variables: Sequence[keras.Variable]


class Stateful(Protocol):
    """What knows something from step to step beside variables."""

    def remembered(self) -> dict[str, np.ndarray]:
        """All of it, by name."""

    def recall(self, found: Mapping[str, np.ndarray]) -> None:
        """Know it again, before the next step; what is not found is as at the begin."""


@dataclass(frozen=True)
class TrainingState:
    """What a rank needs to go on with a training from where it stands.

    Attributes:
        variables: with which its part of the model computes.
        optimizers: each with the variables that it changes.
        pairs: of those variables that are a part of one of the whole model.
        remembers: what knows more than variables do, by name.
        settle: called before anything is kept: nothing may be on its way.
        release: called when the weights of the whole model have been set anew.
    """

    variables: Sequence[keras.Variable]
    optimizers: Sequence[tuple[keras.optimizers.Optimizer, Sequence[keras.Variable]]]
    pairs: Sequence[Pair] = ()
    remembers: Mapping[str, Stateful] = field(default_factory=dict)
    settle: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None


class ExperimentSpec(Protocol):
    """What a strategy looks at of an experiment."""

    @property
    def workers(self) -> int:
        """How many ranks there are."""

    @property
    def network(self) -> str | Network | None:
        """The network to emulate, or None."""

    @property
    def slowed(self) -> Mapping[int, Slowdown]:
        """Who is slow, on the network or by itself."""

    @property
    def blocks(self) -> int | None:
        """How many blocks its model has, each of which may stand alone; None: only ranks know."""

    @property
    def widest(self) -> int | None:
        """How many units the widest layer has that can be sliced; None: only ranks know."""

    @property
    def planes(self) -> Sequence[Layer] | None:
        """The layers of its model as machines in a grid see them; None: only ranks know."""

    @property
    def rows(self) -> int | None:
        """How many rows its training data have; None: only ranks know."""

    @property
    def epoch_steps(self) -> int | None:
        """How many steps an epoch has; None: only ranks know."""

    @property
    def time_steps(self) -> int | None:
        """How many time steps a sample of a recurrent model has; None: only ranks know."""

    @property
    def batch_size(self) -> int:
        """How many rows all ranks together see in a step."""

    @property
    def capacities(self) -> Sequence[float] | None:
        """The share of each rank in a batch; None: equal ones."""

    @property
    def feed(self) -> str:
        """How ranks get their rows."""

    @property
    def shards(self) -> str:
        """How samples are divided among those that read them."""

    @property
    def gone(self) -> Sequence[int]:
        """Which workers do not come to the end of the training on the virtual clock."""

    @property
    def precision(self) -> str:
        """A Keras policy, or "float64"."""

    @property
    def clock(self) -> str:
        """ "wall" or "virtual"."""

    @property
    def optimizer(self) -> str:
        """The name of a Keras optimizer."""

    @property
    def optimizer_options(self) -> Mapping[str, JSON]:
        """Its arguments."""

    @property
    def threads(self) -> int:
        """With how many threads a rank computes."""

    @property
    def callbacks(self) -> Callable[..., Sequence[keras.callbacks.Callback]] | None:
        """What makes callbacks of the user's own, which may look at weights and set them."""


class Session(Protocol):
    """One rank's share of an experiment: its model, its data, the ranks it works with.

    Attributes:
        communicator: all ranks.
        readers: those that divide a batch among them.
        watchers: what looks at compressed buckets.
        timeline: for strategies that write down what they do when.
        layers: what a strategy that cuts layers has to say of each, for the record.
        partition: likewise, where a model was cut into stages.
        memory: likewise, what this rank keeps of it.
        exchanged: likewise, where processes of another framework exchanged gradients.
        guard: looks at gradients before they meet; None: nobody does.
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
        """What is trained."""

    def compile(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Compile the model with the experiment's loss and metrics."""

    def optimizer(self) -> keras.optimizers.Optimizer:
        """The experiment's Keras optimizer, new."""

    def keeps(self, kept: TrainingState) -> None:
        """Say what this rank needs to go on from where it stands; before `fit` or `loop`."""

    def once(self, name: str, measure: Callable[[], JSON]) -> JSON:
        """What was measured; a training that is taken up again finds it as it was."""

    def play(self, played: ProgramStrategy) -> None:
        """Train by programs, on whichever clock the experiment names."""

    def elsewhere(
        self,
        name: str,
        config: dict[str, JSON] | None,
        folder: str,
        inside: Sequence[str] = (),
    ) -> Child:
        """A fresh process that trains the same model by TensorFlow's own strategy."""

    def exported(self, name: str, found: Found, folder: str, inside: Sequence[str] = ()) -> Child:
        """A fresh process that trains the same model by another framework."""

    def fit(
        self, callbacks: Sequence[keras.callbacks.Callback], exchange: Exchange | None = None
    ) -> None:
        """Train on this rank's data for the experiment's epochs.

        Args:
            callbacks: the strategy's own.
            exchange: which those that outlive a rank begin anew; None: training ends with it.
        """

    def part(self, colour: int) -> Communicator:
        """The ranks of the same colour, such as those of a replica, until training has ended."""

    def loop(
        self, step: Step, collect: Callable[[], None], predict: Predictor | None = None
    ) -> None:
        """Likewise, with steps of the strategy's own.

        Args:
            step: trains on a batch.
            collect: gives all ranks all weights.
            predict: validates without that; None: each rank predicts with the whole model.
        """


@runtime_checkable
class ProgramStrategy(Protocol):
    """A strategy that is a program for each worker and each server, see `labkit.programs`."""

    @property
    def transport(self) -> Transport:
        """How messages travel between ranks."""

    @property
    def serves_concurrently(self) -> bool:
        """Whether a server has something to say while the worker beside it computes."""

    @property
    def replica_cut(self) -> int | Grid:
        """Into how many stages a worker's model is cut, or over which grid; 1: it is whole."""

    def copies(self, workers: int) -> Sequence[int]:
        """Who holds weights of its own, whose mean is the result; none where all share them."""

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[Parts]:
        """What each server holds of weights of these shapes; nothing where there is none."""

    def hosts(self, workers: int) -> Sequence[int]:
        """The place of each worker, of each server, then of the other members of workers."""

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """What this one does, from its begin or from a mark that it has set."""


class Strategy(Checked):
    """What workers exchange, and when: fields are what a user names, methods what a rank does.

    Attributes:
        architecture: who exchanges with whom.
        synchronization: who waits for whom, and so how old the weights are that a gradient is of.
        parallelism: what is divided among ranks: the data, or the model and how.
        scheduling: the order of computation and communication within a step.
            All four are names of `labkit.strategies.AXES`, in the first place that of the
            defaults, then whatever else fields and workers can make of it: `cell` says what.
        paper: author, year and number of the source, which the docstring cites in full.
        emulated: whether a network is emulated between its ranks; else it uses one of its own.
        goes_on: whether its training on ranks, where it is no program, can be taken up again: it
            says what it `keeps`.
        unforeseen: why there is no forecast of it, as words behind its name.
    """

    architecture: ClassVar[tuple[str, ...]] = ("collective",)
    synchronization: ClassVar[tuple[str, ...]] = ("synchronous",)
    parallelism: ClassVar[tuple[str, ...]] = ("data",)
    scheduling: ClassVar[tuple[str, ...]] = ("sequential",)
    paper: ClassVar[str] = ""
    normalizes_globally: ClassVar[bool] = False
    emulated: ClassVar[bool] = True
    resumable: ClassVar[bool] = False
    no_forecast_reason: ClassVar[str] = "does not say of what its steps are made up"

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse places that no axis has, where the class is written."""
        super().__init_subclass__(**options)
        for axis in PLACED:
            check_places(cls.__name__, axis, getattr(cls, axis))

    @classmethod
    def incompatibility(cls, compressor: Compressor) -> str:
        """Why it cannot exchange so, as words behind the compressor's name; "" where it can."""
        return ""

    @classmethod
    def compression(cls) -> tuple[str, ...]:
        """Families of the compressors that it takes, and none."""
        fit = samples() if "compressor" in cls.model_fields else ()
        taken = {each.family for each in fit if not cls.incompatibility(each)}
        return ("none", *(family for family in FAMILIES if family in taken))

    @classmethod
    def combines(cls, cell: Cell) -> bool:
        """Whether it has this combination of its places."""
        return True

    @classmethod
    def cells(cls) -> list[Cell]:
        """Where it can stand, that of the defaults first."""
        places = (
            *(cls.architecture, cls.synchronization, cls.parallelism),
            *(cls.compression(), cls.scheduling),
        )
        return [cell for cell in map(Cell._make, product(*places)) if cls.combines(cell)]

    def cell(self, workers: int) -> Cell:
        """Where it stands with these fields, among so many workers."""
        said: Compressor | None = getattr(self, "compressor", None)
        return Cell(
            self.architecture[0],
            self.synchronization[0],
            self.parallelism[0],
            "none" if said is None else said.family,
            self.scheduling[0],
        )

    @property
    def exact(self) -> bool:
        """Whether the result equals that of one process on the global batch, up to rounding."""
        return False

    def exact_of(self, experiment: ExperimentSpec) -> bool:
        """Whether it is in this experiment."""
        return self.exact

    @property
    def lossy(self) -> Compressor | None:
        """What leaves something out of each exchange, and is held to its law of conservation."""
        return None

    @property
    def plays(self) -> bool:
        """Whether it trains by programs on the wall clock, too."""
        return False

    @property
    def replays(self) -> bool:
        """Whether each gradient of its programs is of weights that servers have had."""
        return True

    @property
    def environment_key(self) -> str:
        """On what of this machine its weights depend, beside labkit."""
        return ""

    def optimizer_of(self, experiment: ExperimentSpec) -> str:
        """The name of the optimizer that applies gradients."""
        return experiment.optimizer

    def optimizer_options_of(self, experiment: ExperimentSpec) -> Mapping[str, JSON]:
        """The arguments of that optimizer."""
        return experiment.optimizer_options

    def rate_of(self, experiment: ExperimentSpec) -> float:
        """By how much the learning rate is another than the experiment's."""
        return 1.0

    @property
    def replica_cut(self) -> int | Grid:
        """Stages or grid of each worker of its programs; 1 where workers have whole models."""
        return 1

    def extra_ranks(self, workers: int) -> int:
        """How many ranks it wants beside one for each worker."""
        return 0

    def processes(self, workers: int) -> int:
        """How many processes, or devices of one, compute at once, each with as many threads."""
        return workers + self.extra_ranks(workers)

    def places(self, worker: int, workers: int) -> list[int]:
        """The ranks of a worker."""
        return [worker]

    def tolerated_failures(self, workers: int) -> int:
        """How many workers may be lost on the virtual clock before others wait for ever."""
        return 0

    @property
    def outlives(self) -> bool:
        """Whether training goes on without ranks that die, on `Cluster(fault_tolerant=True)`."""
        return False

    @property
    def stats_interval(self) -> int:
        """The steps from one look at what compression does to the next; 0: never."""
        return 0

    def rows(self, batch_size: int, workers: int) -> int:
        """Rows that a rank sees at a time, the most; 0 where nobody knows."""
        return 0

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse an experiment that this strategy cannot run, before any rank starts."""

    def readers(self, communicator: Communicator) -> Communicator:
        """The ranks that divide each batch among them; elsewhere the same rows are read."""
        return communicator

    def predictor(self, model: keras.Model, replica: Communicator) -> Predictor | None:
        """How the ranks of a replica predict the same rows together.

        None: each rank has the whole model and predicts rows of its own.

        Args:
            model: the whole one, built, the same on all ranks.
            replica: the ranks.

        Raises:
            InvalidInput: the model cannot be divided so.
        """
        return None

    def serving(self, model: keras.Model, replica: Communicator) -> Serving | None:
        """The same for who keeps the model to answer by it; None, and arguments, as `predictor`.

        A strategy that does not say what of it a rank needs, needs all.
        """
        predict = self.predictor(model, replica)
        return None if predict is None else Serving(predict, True, model.variables)

    def train(self, session: Session) -> None:
        """Train this rank's model."""
        raise NotImplementedError(f"{type(self).__name__} does not say how a rank trains")

    def forecast(self, asked: Query) -> StepForecast:
        """What a step takes, made up of what was measured and what the simulator says.

        Raises:
            InvalidInput: it has no forecast, or something was not measured; the words say what.
        """
        from labkit.strategies import STRATEGIES

        known = [n for n, kind in STRATEGIES.items() if kind.forecast is not Strategy.forecast]
        raise InvalidInput(
            f"{type(self).__name__} {self.no_forecast_reason}, so that there is no forecast of it; "
            f"there is one of {', '.join(known)}"
        )

    def to_json(self) -> dict[str, JSON]:
        """Name and fields."""
        return {"name": type(self).__name__, **self.model_dump(mode="json")}
