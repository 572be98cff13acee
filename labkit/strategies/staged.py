"""What strategies that cut a model into stages have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import PositiveInt, field_validator

from labkit.errors import InvalidInput
from labkit.memory import nbytes
from labkit.plan import cut as divided
from labkit.strategies.base import Predictor, Question, Session, Strategy
from labkit.strategies.parts import AROUND, refuse_around, refuse_in_parts

if TYPE_CHECKING:
    from labkit.communicator import Communicator
    from labkit.stages import Ledger, Whole


class Cut(NamedTuple):
    """One rank's side of a model in stages: the ranks of its replica, and its stages by number.

    Inputs and outputs are the tensors at the ends of all stages, models the stages themselves,
    which begin with the blocks of edges. The ledger counts what this rank's stages keep; whole has
    the weights of all of them, or frees those of others.
    """

    communicator: Communicator
    own: dict[int, Any]
    inputs: list[Any]
    outputs: list[Any]
    models: list[Any]
    edges: list[int]
    ledger: Ledger
    whole: Whole


class Staged(Strategy):
    """Contiguous layers on each rank; replicas of them share a batch."""

    called: ClassVar[str] = "stages"  # the field with the ranks of a replica

    partition: str | tuple[PositiveInt, ...] = "parameters"

    @field_validator("partition")
    @classmethod
    def _partition(cls, value: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if isinstance(value, str) and value not in ("parameters", "time"):
            raise ValueError(
                f"partition={value!r} is not known; allowed: 'parameters', 'time', or a number of "
                "blocks for each stage"
            )
        return value

    def ranks(self, workers: int) -> int:
        """Of one replica."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many ranks it has")

    def depth(self, workers: int) -> int:
        """Stages of one replica: one a rank, where the strategy does not say otherwise."""
        return self.ranks(workers)

    def rows(self, batch_size: int, workers: int) -> int:
        """Of the largest batch that goes through a stage at a time."""
        return -(-batch_size // (workers // self.ranks(workers)))

    def readers(self, communicator: Communicator) -> Communicator:
        """The ranks of one place in all replicas: they divide the batch among them."""
        return communicator.split(communicator.rank % self.ranks(communicator.size))

    def check_stages(self, experiment: Question) -> None:
        """Refuse what no model in stages can do, or this one as far as it is known."""
        workers = experiment.workers
        ranks, stages = self.ranks(workers), self.depth(workers)
        if experiment.capacities is not None or experiment.feed == "scatter":
            raise InvalidInput(
                "capacities and feed='scatter' divide a batch among all workers, but the stages of "
                "a pipeline work on the same rows; leave both out"
            )
        refuse_in_parts(experiment)
        if workers % ranks:
            raise InvalidInput(
                f"{self.called}={ranks} does not divide workers={workers}; "
                f"allowed: {', '.join(str(n) for n in range(1, workers + 1) if workers % n == 0)}"
            )
        if not isinstance(self.partition, str) and len(self.partition) != stages:
            raise InvalidInput(
                f"partition={list(self.partition)} is of {len(self.partition)} stages; give "
                f"{stages} numbers, one a stage"
            )
        if experiment.blocks is not None:
            self.check_blocks(experiment.blocks, workers)
        _refuse_global_norm(experiment.optimizer_options.get("global_clipnorm"))

    def check_blocks(self, blocks: int, workers: int) -> None:
        """Refuse what a model of so many blocks, see `Question`, cannot do."""
        ranks, stages = self.ranks(workers), self.depth(workers)
        if stages > blocks:
            chunks = stages // ranks
            fit = [n for n in range(1, ranks) if workers % n == 0 and n * chunks <= blocks]
            allowed = " or ".join(map(str, fit)) if fit else "none: give fewer chunks"
            given = f"{self.called}={ranks}" + (f" of chunks={chunks}" if chunks > 1 else "")
            raise InvalidInput(
                f"{given} is of {stages} stages with a block at least, but the model is a chain of "
                f"{blocks}; allowed with workers={workers}: {allowed}"
            )
        if not isinstance(self.partition, str) and sum(self.partition) != blocks:
            spare = divided(blocks - stages, self.partition)
            near = [1 + b - a for a, b in pairwise(spare)]
            raise InvalidInput(
                f"partition={list(self.partition)} is of {sum(self.partition)} blocks, the model "
                f"has {blocks}; give {stages} numbers from 1 that add up to it, such as {near}"
            )

    def edges(self, model: Any, workers: int, seconds: Sequence[float] | None = None) -> list[int]:
        """The blocks with which the stages of a model begin, and how many there are.

        Args:
            model: the whole one.
            workers: of all replicas.
            seconds: of each block, where they were measured; else parameters stand for them.
        """
        from labkit.stages import Chain, by_hand, by_parameters, cheapest

        chain = Chain(model)
        self.check_blocks(len(chain), workers)
        if not isinstance(self.partition, str):
            return by_hand(self.partition, len(chain))
        if seconds is not None:
            return cheapest(seconds, self.depth(workers))
        counts = [chain.part(n, n + 1).count_params() for n in range(len(chain))]
        return by_parameters(counts, self.depth(workers))

    def predictor(self, model: Any, replica: Communicator) -> Predictor:
        """Through the stages, one micro-batch behind the other.

        With partition="time" they are cut by parameters here: nobody has measured.
        """
        return inference(model, self.edges(model, replica.size), replica)

    def cut(self, session: Session, optimizer: Any, recompute: bool = False, late: int = 1) -> Cut:
        """This rank's stages of the session's model, which is compiled with the optimizer.

        Args:
            session: of this rank.
            optimizer: of all its stages.
            recompute: as of `labkit.stages.Stage`.
            late: steps after which the stages keep as much as they ever will.
        """
        from labkit.stages import Ledger, Whole

        _refuse_global_norm(getattr(optimizer, "global_clipnorm", None))
        refuse_around({name: getattr(optimizer, name, None) for name in AROUND})
        session.compile(optimizer)
        workers = session.communicator.size
        ranks, last = self.ranks(workers), self.depth(workers) - 1
        replica = session.part(session.communicator.rank // ranks)
        seconds = self._seconds(session) if self.partition == "time" else None
        edges = self.edges(session.model, workers, seconds)
        models = self.models(session.model, edges)
        session.partition = _described(session.model, edges, seconds)

        def loss(y: Any, predicted: Any, weight: Any) -> Any:
            return session.model._compile_loss(y, predicted, weight)

        own = {
            number: self.stage(model, loss if number == last else None, number == 0, recompute)
            for number, model in enumerate(models)
            if number % ranks == replica.rank
        }
        ledger = Ledger(late)
        for stage in own.values():
            stage.ledger = ledger
        parts = {rank: models[rank::ranks] for rank in range(ranks)}
        whole = Whole(session.model, parts, replica, session.communicator)
        inputs, outputs = [m.inputs[0] for m in models], [m.outputs[0] for m in models]
        return Cut(replica, own, inputs, outputs, models, edges, ledger, whole)

    def _seconds(self, session: Session) -> list[float]:
        """Of each block on rank 0, the same for all: they must cut at the same places."""
        from labkit.stages import block_seconds

        found, workers = None, session.communicator.size
        if session.communicator.rank == 0:
            rows = self.rows(session.experiment.batch_size, workers)
            found = block_seconds(session.model, rows)
        return list(session.communicator.share(found, what="the seconds of the blocks"))

    def finish(
        self, session: Session, cut: Cut, optimizer: Any, expected: Mapping[str, int]
    ) -> None:
        """Put down what this rank has kept beside what was expected.

        While it trains a rank holds the weights of its own stages alone. Before and after it, and
        between epochs where callbacks of the user's own may look, it holds those of all.

        Args:
            session, cut, optimizer: of the training that has ended.
            expected: bytes of activations and of versions.
        """
        from labkit.stages import footprint

        own = [cut.models[number] for number in cut.own]
        predicted = footprint.weights(own)
        predicted["optimizer"] = footprint.optimizer(session.optimizer(), predicted["gradients"])
        weights = nbytes(v for model in own for v in model.variables)
        session.memory = {
            "stages": sorted(cut.own),
            "whole": nbytes(session.model.variables),
            "measured": {
                "weights": weights,
                "optimizer": nbytes(optimizer.variables),
                **{kind: most or None for kind, most in cut.ledger.most.items()},
                "versions": cut.ledger.most["versions"],
            },
            "predicted": predicted | dict(expected),
        }

    def models(self, model: Any, edges: list[int]) -> list[Any]:
        """The stages of a model, as models that share its layers."""
        return _split(model, edges)

    def stage(self, model: Any, loss: Any, first: bool, recompute: bool) -> Any:
        """What trains a stage on its rank; arguments as of `labkit.stages.Stage`."""
        from labkit.stages import Stage

        return Stage(model, loss, first, recompute)


def through(cut: Cut, stages: int) -> Predictor:
    """Predictions by the stages that are being trained."""
    from labkit.stages import Inference, Links

    links = Links(cut.communicator, cut.inputs, cut.outputs)
    return Inference(links, {k: stage.model for k, stage in cut.own.items()}, stages)


def inference(model: Any, edges: list[int], replica: Communicator) -> Predictor:
    """Predictions by stages of a model on the ranks of a replica."""
    from labkit.stages import Inference, Links

    models = _split(model, edges)
    links = Links(replica, [m.inputs[0] for m in models], [m.outputs[0] for m in models])
    own = {k: part for k, part in enumerate(models) if k % replica.size == replica.rank}
    return Inference(links, own, len(models))


def mean_and_apply(session: Session, own: dict[int, Any], optimizer: Any) -> Callable[[Any], None]:
    """A function of the rows behind this rank's gradients that changes the weights of its stages.

    Replicas average; one optimizer serves all stages of a rank, so that callbacks that change its
    rate find it in the model.
    """
    from labkit.exchange import Exchange

    exchange = Exchange(session.readers)
    variables = [variable for stage in own.values() for variable in stage.variables]
    names = [variable.path for variable in variables]

    def update(rows: int) -> None:
        gradients = [each for stage in own.values() for each in stage.take_gradients()]
        if variables and session.readers.total(rows, "the rows of an update") > 0:
            mean = exchange.mean(gradients, np.int64(rows), names)
            start = time.monotonic()
            optimizer.apply(mean, variables)
            session.timeline.add(f"update {max(own)}", -1, start)

    return update


def recorder(timeline: Any) -> Any:
    """Stands around each row of a schedule and writes it down."""

    @contextmanager
    def record(action: str, stage: int, number: int) -> Iterator[None]:
        start = time.monotonic()
        yield
        timeline.add(f"{action} {stage}", number, start)

    return record


def _split(model: Any, edges: list[int]) -> list[Any]:
    from labkit.stages import split_model

    models = split_model(model, edges)
    for shape in (part.inputs[0].shape[1:] for part in models[1:]):
        if None in shape:
            raise InvalidInput(
                f"a stage would pass on rows of shape {list(shape)}, but the next one must know "
                "how much to wait for: give keras.Input a shape of whole numbers"
            )
    return models


def _described(model: Any, edges: list[int], seconds: list[float] | None) -> dict[str, Any]:
    """The cut for the run's record; bytes are those of a row that leaves each stage."""
    from labkit.stages import Chain, footprint, split_model

    return {
        "blocks": Chain(model).names(),
        "edges": edges,
        "block_seconds": seconds,
        "bytes_a_row": [footprint.a_row(part.outputs) for part in split_model(model, edges)],
    }


def _refuse_global_norm(given: float | None) -> None:
    if given is not None:
        raise InvalidInput(
            f"global_clipnorm={given} needs the gradients of all layers on one rank, but each rank "
            "has those of its own; use clipnorm (by variable) or clipvalue"
        )
