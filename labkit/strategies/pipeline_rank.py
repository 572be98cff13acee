"""One rank's side of a model that is cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.model_parallel.memory import Memory, nbytes, together
from labkit.strategies.strategy import Batch, Predicted, Predictor, Session, Stateful, TrainingState

if TYPE_CHECKING:
    import keras

    from labkit.communicator import Communicator
    from labkit.exchange import Exchange, Timeline
    from labkit.model_parallel.losses import Losses
    from labkit.model_parallel.stages import Batch as Rows
    from labkit.model_parallel.stages import Blocks, Ledger, Parts, Stage
    from labkit.model_parallel.tensor import Sliced
    from labkit.model_parallel.weights import Whole


@dataclass
class Cut:
    """One rank's side of a model in stages while it trains.

    Attributes:
        lane: this rank's slice number in all stages of its replica, in their order.
        own: what trains this rank's stages, by number.
        sliced: those of them of which it has a slice.
        parts: all stages, whole; they begin with the blocks of edges.
        ledger: counts what this rank's stages keep.
        whole: has the weights of all stages, or frees those that are not this rank's.
        watched: whether callbacks of the user's own may set weights between steps.
        losses: what the last stage minimises.
        steps: taken so far.
        held: bytes of weights while it trains.
    """

    lane: Communicator
    own: dict[int, Stage]
    sliced: list[Sliced]
    parts: Parts
    edges: list[int]
    ledger: Ledger
    whole: Whole
    watched: bool
    losses: Losses
    steps: int = 0
    held: int = 0

    @property
    def inputs(self) -> list[list[keras.KerasTensor]]:
        """The tensors at the begin of all stages."""
        return [model.inputs for model in self.parts.models]

    @property
    def outputs(self) -> list[list[keras.KerasTensor]]:
        """The tensors at the end of all stages."""
        return [model.outputs for model in self.parts.models]

    @property
    def models(self) -> list[keras.Model]:
        """All stages, of which this rank's are as it computes them."""
        whole = self.parts.models
        return [self.own[k].model if k in self.own else m for k, m in enumerate(whole)]

    def batch(self, x: Batch, y: Batch, weight: Batch | None) -> Rows:
        """A batch as stages take it."""
        from labkit.model_parallel.stages import Batch as Rows

        read = self.parts.read(x)
        return Rows(read if len(read) > 1 else read[0], y, weight)

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all slices of its stages."""
        return all(part.first for part in self.sliced)

    def begin(self) -> None:
        """A training step begins."""
        self.whole.release(look=self.watched)
        if self.steps == 0:  # the weights of others are away now
            self.held = together(*(model.variables for model in (*self.parts.models, *self.models)))
        self.ledger.step()
        self.steps += 1

    def predictor(self) -> Predictor:
        """Predictions by the stages that are being trained."""
        own = {number: stage.model for number, stage in self.own.items()}
        return through(self.lane, self.parts, own, self.sliced)

    def updater(
        self, session: Session, optimizer: keras.optimizers.Optimizer, **remembers: Stateful
    ) -> Callable[[int], None]:
        """A function of the rows behind this rank's gradients that changes its stages' weights.

        It says what this rank keeps, those who remember more among it. Replicas average; one
        optimizer serves all stages of a rank, so that callbacks that change its rate find it in the
        model.
        """
        from labkit.communicator import computing
        from labkit.exchange import Exchange

        exchange, own = Exchange(session.readers, paces=False, guard=session.guard), self.own
        slowly = computing(session.communicator)
        variables = [variable for stage in own.values() for variable in stage.variables]
        names = [variable.path for variable in variables]
        held = {id(each): each for stage in own.values() for each in stage.model.variables}
        session.keeps(
            TrainingState(
                [*held.values()],
                [(optimizer, variables)],
                [pair for part in self.sliced for pair in part.pairs()],
                {"exchange": exchange, **remembers},
                release=self.whole.release,
            )
        )

        def update(rows: int) -> None:
            gradients = [gradient for stage in own.values() for gradient in stage.take_gradients()]
            takes_part = bool(variables) or exchange.may_skip
            if takes_part and session.readers.total(rows, "the rows of an update") > 0:
                mean = exchange.mean(gradients, np.int64(rows), names) if variables else []
                start = session.timeline.clock.now()
                if taken_by_all(session, exchange) and variables:
                    with slowly():
                        optimizer.apply(mean, variables)
                session.timeline.add(f"update {max(own)}", -1, start)

        return update

    def finish(
        self, session: Session, optimizer: keras.optimizers.Optimizer, expected: Mapping[str, int]
    ) -> None:
        """Put down what this rank has kept beside what was expected, and what slices have sent.

        Args:
            session, optimizer: of the training that has ended.
            expected: bytes of activations and of versions.
        """
        from labkit.model_parallel.stages import footprint

        own = [stage.model for stage in self.own.values()]
        weights = footprint.weights(own)
        kept = footprint.optimizer(session.optimizer(), weights["gradients"])
        session.memory = Memory(
            stages=sorted(self.own),
            whole=nbytes(session.model.variables),
            measured={
                "weights": self.held,
                "optimizer": nbytes(optimizer.variables),
                **{kind: most or None for kind, most in self.ledger.most.items()},
                "versions": self.ledger.most["versions"],
            },
            predicted={**weights, "optimizer": kept, **expected},
        )
        steps = max(1, self.steps)
        session.layers = [row for part in self.sliced for row in part.describe(steps)]


def taken_by_all(session: Session, exchange: Exchange) -> bool:
    """Whether the ranks take this step, for which no part of the model may have a bad gradient."""
    if not exchange.may_skip:
        return True
    everyone = session.communicator.everyone(
        float(exchange.all_finite()), "whether a step is skipped"
    )
    return bool(np.all(everyone))


def own_models(
    models: Sequence[keras.Model], lane: Communicator, group: Communicator | None = None
) -> tuple[dict[int, keras.Model], list[Sliced]]:
    """The models that this rank computes, by the number of the stage; and where they are slices.

    A stage of which no layer can be cut is whole on all ranks of its group.

    Args:
        models: all stages.
        lane: the ranks of all stages, in their order.
        group: those that share this rank's stages; None: it has them alone.
    """
    from labkit.model_parallel.tensor import Sliced

    numbers = range(lane.rank, len(models), lane.size)
    if group is None or group.size == 1:
        return {number: models[number] for number in numbers}, []
    algorithm = "mpi" if group.network is None else "ring"
    parts = [Sliced(models[number], group, algorithm, required=False) for number in numbers]
    return dict(zip(numbers, (part.model for part in parts), strict=True)), parts


def through(
    lane: Communicator,
    parts: Parts,
    own: Mapping[int, keras.Model],
    sliced: Sequence[Sliced],
) -> Predictor:
    """Predictions by the stages of a lane, which the last stage's first slice holds.

    Args:
        lane: the ranks of all stages, in their order.
        parts: all stages, whole.
        own: what this rank computes of them.
        sliced: where these are slices.
    """
    from labkit.model_parallel.stages import Inference, Links

    models = parts.models
    links = Links(lane, [m.inputs for m in models], [m.outputs for m in models], parts.takes)
    inference = Inference(links, own, len(models))
    first = all(part.first for part in sliced)

    def predict(batches: Iterable[Batch]) -> Iterator[Predicted]:
        with ExitStack() as stack:
            for part in sliced:
                stack.enter_context(part.uncounted())
            for y, penalty in inference(parts.read(x) for x in batches):
                yield (y, penalty) if first else (None, 0.0)

    return predict


def recorder(timeline: Timeline) -> Callable[[str, int, int], AbstractContextManager[None]]:
    """Stands around each row of a schedule and writes it down."""

    @contextmanager
    def record(action: str, stage: int, number: int) -> Iterator[None]:
        start = timeline.clock.now()
        yield
        timeline.add(f"{action} {stage}", number, start)

    return record


def split(blocks: Blocks, edges: list[int]) -> Parts:
    """The stages of a model, as models that share its layers."""
    from labkit.model_parallel.functional import is_masked, refuse_lost_masks
    from labkit.model_parallel.stages import INPUTS

    parts = blocks.split(edges)
    if any(is_masked(x) for part in parts.models for x in part.inputs):
        refuse_lost_masks(parts.whole)
    for part, takes in zip(parts.models, parts.takes, strict=True):
        passed = zip(part.inputs, takes, strict=True)
        for shape in (x.shape[1:] for x, source in passed if source.stage != INPUTS):
            if None not in shape:
                continue
            raise InvalidInput(
                f"a stage would pass on rows of shape {list(shape)}, but the next one must know "
                "how much to wait for: give keras.Input a shape of whole numbers"
            )
    return parts
