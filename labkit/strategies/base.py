"""What every strategy is, and what a rank hands to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from labkit.checked import Checked

if TYPE_CHECKING:
    from labkit.communicator import Communicator


class Question(Protocol):
    """What a strategy looks at of an experiment."""

    @property
    def workers(self) -> int:
        """Ranks."""

    @property
    def network(self) -> Any:
        """The network to emulate, or None."""

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
        owners: the rank that trains each variable, by its id, where ranks train parts.
    """

    communicator: Communicator
    readers: Communicator
    model: Any
    seed: int
    watchers: list[Any]
    timeline: Any
    owners: dict[int, int]

    def compile(self, optimizer: Any) -> None:
        """Compile the model with the experiment's loss and metrics."""

    def optimizer(self) -> Any:
        """The experiment's Keras optimizer, new."""

    def fit(self, callbacks: list[Any]) -> None:
        """Train on this rank's data for the experiment's epochs."""

    def loop(
        self, step: Callable[[Any, Any, Any], float | None], collect: Callable[[], None]
    ) -> None:
        """Likewise, with steps of the strategy's own; `collect` gives all ranks all weights."""


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

    def train(self, session: Session) -> None:
        """Train this rank's model."""
        raise NotImplementedError(f"{type(self).__name__} does not say how a rank trains")

    def to_json(self) -> dict[str, Any]:
        """Name and fields."""
        return {"name": type(self).__name__, **self.model_dump(mode="json")}
