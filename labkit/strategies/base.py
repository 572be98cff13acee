"""What every strategy is, and what a rank hands to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from labkit.common.checked import Checked

if TYPE_CHECKING:
    from labkit.communicator import Communicator
    from labkit.schedules.grid import Layer


# Of micro-batches x, which all ranks of a replica bring: the predictions of each, or None on ranks
# that do not hold them, and what layers on this rank add to its loss.
Predictor: TypeAlias = Callable[[Iterable[Any]], Iterator[tuple[Any, float]]]


class Question(Protocol):
    """What a strategy looks at of an experiment."""

    @property
    def workers(self) -> int:
        """Ranks."""

    @property
    def network(self) -> Any:
        """The network to emulate, or None."""

    @property
    def blocks(self) -> int | None:
        """Of its model, between the places where it may be cut; None where only ranks know."""

    @property
    def widest(self) -> int | None:
        """Units of the widest layer of its model that has slices; None where only ranks know."""

    @property
    def planes(self) -> Sequence[Layer] | None:
        """Its model's layers as machines in a grid see them; None where only ranks know."""

    @property
    def rows(self) -> int | None:
        """Of its training data; None where only ranks know."""

    @property
    def time_steps(self) -> int | None:
        """Of a sample of a recurrent model; None where only ranks know."""

    @property
    def batch_size(self) -> int:
        """Rows of all ranks together."""

    @property
    def capacities(self) -> Sequence[float] | None:
        """Shares of the ranks, or None for equal ones."""

    @property
    def feed(self) -> str:
        """How ranks get their rows."""

    @property
    def precision(self) -> str:
        """A Keras policy, or "float64"."""

    @property
    def optimizer(self) -> str:
        """The name of a Keras optimizer."""

    @property
    def optimizer_options(self) -> Mapping[str, Any]:
        """Its arguments."""


class Session(Protocol):
    """One rank's share of an experiment: its model, its data, the ranks it works with.

    Attributes:
        communicator: all ranks. readers: those that divide a batch among them.
        watchers: what looks at compressed buckets, see `labkit.exchange.Exchange`.
        timeline: for strategies that write down what they do when.
        layers: what a strategy that cuts layers has to say of each, for the record.
        partition, memory: likewise, where a model was cut into stages, and what this rank keeps.
    """

    communicator: Communicator
    readers: Communicator
    model: Any
    seed: int
    watchers: list[Any]
    timeline: Any
    layers: list[dict[str, Any]]
    partition: dict[str, Any]
    memory: dict[str, Any]
    experiment: Any

    def compile(self, optimizer: Any) -> None:
        """Compile the model with the experiment's loss and metrics."""

    def optimizer(self) -> Any:
        """The experiment's Keras optimizer, new."""

    def fit(self, callbacks: list[Any]) -> None:
        """Train on this rank's data for the experiment's epochs."""

    def part(self, colour: int) -> Communicator:
        """The ranks of the same colour, such as those of a replica, until training has ended."""

    def loop(
        self,
        step: Callable[[Any, Any, Any], float | None],
        collect: Callable[[], None],
        predict: Predictor | None = None,
    ) -> None:
        """Likewise, with steps of the strategy's own.

        Args:
            step: takes a batch (x, y, sample weight); the loss on the rank that knows it.
            collect: gives all ranks all weights.
            predict: validates without that; None: each rank predicts with the whole model.
        """


class Strategy(Checked):
    """What workers exchange, and when: fields are what a user names, methods what a rank does."""

    @property
    def exact(self) -> bool:
        """Whether the result equals that of one process on the global batch, up to rounding."""
        return False

    def check(self, experiment: Question) -> None:
        """Refuse an experiment that this strategy cannot run, before any rank starts."""

    def readers(self, communicator: Communicator) -> Communicator:
        """The ranks that divide each batch among them; elsewhere the same rows are read."""
        return communicator

    def predictor(self, model: Any, replica: Communicator) -> Predictor | None:
        """How the ranks of a replica predict the same rows together.

        None: each rank has the whole model and predicts rows of its own.

        Args:
            model: the whole one, built, the same on all ranks.
            replica: the ranks.

        Raises:
            InvalidInput: the model cannot be divided so.
        """
        return None

    def train(self, session: Session) -> None:
        """Train this rank's model."""
        raise NotImplementedError(f"{type(self).__name__} does not say how a rank trains")

    def to_json(self) -> dict[str, Any]:
        """Name and fields."""
        return {"name": type(self).__name__, **self.model_dump(mode="json")}
