"""The training state of one rank, for a model that is cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.model_parallel.memory import Memory, nbytes, unique_nbytes
from labkit.strategies.strategy import Batch, Predicted, Predictor, Session, Stateful, TrainingState

if TYPE_CHECKING:
    import keras

    from labkit.communicator import Communicator
    from labkit.exchange import Exchange, Timeline
    from labkit.model_parallel.losses import Losses
    from labkit.model_parallel.stages import Batch as Rows
    from labkit.model_parallel.stages import Blocks, MemoryLedger, Stage, StageModels
    from labkit.model_parallel.tensor import Sliced
    from labkit.model_parallel.weights import WholeWeights


@dataclass
class PipelineRank:
    """The pipeline stages that one rank trains, with their communicators and records.

    Attributes:
        lane: The communicator of ranks in all stages of the replica, ordered by stage. All ranks of
            the communicator have the same slice number.
        stages: Mapping from each stage number of this rank to the object that trains the stage.
        sliced: Those stages of this rank whose layers are divided into slices.
        parts: The models of all stages, before they are divided into slices.
        edges: The boundaries of the stages, as block numbers.
        ledger: The counter of the memory that the stages on this rank use.
        all_weights: The manager of the whole model's weights. The manager gathers the weights on
            this rank, or frees the weights that other ranks store.
        has_callbacks: Whether the user's callbacks may set weights between steps.
        losses: The object that computes losses in the last stage.
        steps: The number of training steps taken so far.
        weight_bytes: The number of bytes of weights that this rank stores during training.
    """

    lane: Communicator
    stages: dict[int, Stage]
    sliced: list[Sliced]
    parts: StageModels
    edges: list[int]
    ledger: MemoryLedger
    all_weights: WholeWeights
    has_callbacks: bool
    losses: Losses
    steps: int = 0
    weight_bytes: int = 0

    @property
    def inputs(self) -> list[list[keras.KerasTensor]]:
        """The input tensors of each stage."""
        return [model.inputs for model in self.parts.models]

    @property
    def outputs(self) -> list[list[keras.KerasTensor]]:
        """The output tensors of each stage."""
        return [model.outputs for model in self.parts.models]

    @property
    def models(self) -> list[keras.Model]:
        """The models of all stages; for this rank's own stages, the models that it computes."""
        whole = self.parts.models
        return [self.stages[k].model if k in self.stages else m for k, m in enumerate(whole)]

    def batch(self, x: Batch, y: Batch, weight: Batch | None) -> Rows:
        """Convert a batch to the object that the trainers of stages accept."""
        from labkit.model_parallel.stages import Batch as Rows

        read = self.parts.read(x)
        return Rows(read if len(read) > 1 else read[0], y, weight)

    @property
    def first(self) -> bool:
        """Whether this rank reports results on behalf of all slices of its stages."""
        return all(part.first for part in self.sliced)

    def begin(self) -> None:
        """Start a training step."""
        self.all_weights.release(look=self.has_callbacks)
        # When the first step starts, the weights of other ranks are already freed.
        if self.steps == 0:
            self.weight_bytes = unique_nbytes(
                *(model.variables for model in (*self.parts.models, *self.models))
            )
        self.ledger.step()
        self.steps += 1

    def predictor(self) -> Predictor:
        """Return a predictor that uses the stage models that this rank trains."""
        models = {number: stage.model for number, stage in self.stages.items()}
        return stage_predictor(self.lane, self.parts, models, self.sliced)

    def updater(
        self, session: Session, optimizer: keras.optimizers.Optimizer, **remembers: Stateful
    ) -> Callable[[int], None]:
        """Return a function that updates the weights of this rank's stages.

        The returned function takes the number of rows in a step, and averages the gradients over
        all replicas. The method also registers this rank's state, and the state of the objects in
        `remembers`, for checkpoints. One optimizer updates all stages of a rank. The whole model is
        compiled with the rank's optimizer, so that callbacks can change its learning rate.
        """
        from labkit.communicator import computing
        from labkit.exchange import Exchange

        exchange, stages = Exchange(session.readers, paces=False, guard=session.guard), self.stages
        compute_scope = computing(session.communicator)
        variables = [variable for stage in stages.values() for variable in stage.variables]
        names = [variable.path for variable in variables]
        tracked = {
            id(variable): variable
            for stage in stages.values()
            for variable in stage.model.variables
        }
        session.keeps(
            TrainingState(
                [*tracked.values()],
                [(optimizer, variables)],
                [pair for part in self.sliced for pair in part.pairs()],
                {"exchange": exchange, **remembers},
                release=self.all_weights.release,
            )
        )

        def update(rows: int) -> None:
            gradients = [
                gradient for stage in stages.values() for gradient in stage.take_gradients()
            ]
            participates = bool(variables) or exchange.may_skip
            if participates and session.readers.total(rows, "the number of rows of an update") > 0:
                mean = exchange.mean(gradients, np.int64(rows), names) if variables else []
                start = session.timeline.clock.now()
                if all_ranks_finite(session, exchange) and variables:
                    with compute_scope():
                        optimizer.apply(mean, variables)
                session.timeline.add(f"update {max(stages)}", -1, start)

        return update

    def finish(
        self, session: Session, optimizer: keras.optimizers.Optimizer, expected: Mapping[str, int]
    ) -> None:
        """Record this rank's measured and predicted memory, and the messages between its slices.

        Args:
            session, optimizer: The session and the optimizer of the completed training.
            expected: The predicted bytes of activations and of weight versions.
        """
        from labkit.model_parallel.stages import footprint

        models = [stage.model for stage in self.stages.values()]
        weights = footprint.weights(models)
        slots = footprint.optimizer(session.optimizer(), weights["gradients"])
        session.memory = Memory(
            stages=sorted(self.stages),
            whole=nbytes(session.model.variables),
            measured={
                "weights": self.weight_bytes,
                "optimizer": nbytes(optimizer.variables),
                **{kind: peak or None for kind, peak in self.ledger.most.items()},
                "versions": self.ledger.most["versions"],
            },
            predicted={**weights, "optimizer": slots, **expected},
        )
        steps = max(1, self.steps)
        session.layers = [row for part in self.sliced for row in part.describe(steps)]


def all_ranks_finite(session: Session, exchange: Exchange) -> bool:
    """Return whether all gradients are finite on all ranks; if not, all ranks skip the step."""
    if not exchange.may_skip:
        return True
    flags = session.communicator.allgather_scalar(
        float(exchange.all_finite()), "whether a step is skipped"
    )
    return bool(np.all(flags))


def local_stages(
    models: Sequence[keras.Model], lane: Communicator, group: Communicator | None = None
) -> tuple[dict[int, keras.Model], list[Sliced]]:
    """Return a mapping from stage numbers to this rank's models, and a list of its sliced models.

    If no layer of a stage can be sliced, each rank computes the whole stage.

    Args:
        models: The models of all stages.
        lane: The communicator of the ranks of all stages, in order.
        group: The communicator of the ranks that share the slices of the same stages as this rank.
            If `group` is None, stages are not sliced.
    """
    from labkit.model_parallel.tensor import Sliced

    numbers = range(lane.rank, len(models), lane.size)
    if group is None or group.size == 1:
        return {number: models[number] for number in numbers}, []
    algorithm = "mpi" if group.network is None else "ring"
    parts = [Sliced(models[number], group, algorithm, required=False) for number in numbers]
    return dict(zip(numbers, (part.model for part in parts), strict=True)), parts


def stage_predictor(
    lane: Communicator,
    parts: StageModels,
    local_models: Mapping[int, keras.Model],
    sliced: Sequence[Sliced],
) -> Predictor:
    """Return a function that predicts with all stages of a pipeline.

    Args:
        lane: The communicator of the ranks of all stages, in order.
        parts: The models of all stages, before they are divided into slices.
        local_models: Mapping from stage numbers to the models that this rank computes.
        sliced: The models of this rank that share layers with other ranks.
    """
    from labkit.model_parallel.stages import Inference, StageMessages

    models = parts.models
    links = StageMessages(
        lane, [m.inputs for m in models], [m.outputs for m in models], parts.takes
    )
    inference = Inference(links, local_models, len(models))
    first = all(part.first for part in sliced)

    def predict(batches: Iterable[Batch]) -> Iterator[Predicted]:
        with ExitStack() as stack:
            for part in sliced:
                stack.enter_context(part.uncounted())
            for y, penalty in inference(parts.read(x) for x in batches):
                yield (y, penalty) if first else (None, 0.0)

    return predict


def recorder(timeline: Timeline) -> Callable[[str, int, int], AbstractContextManager[None]]:
    """Return a function whose context manager logs one schedule action with its times."""

    @contextmanager
    def record(action: str, stage: int, number: int) -> Iterator[None]:
        start = timeline.clock.now()
        yield
        timeline.add(f"{action} {stage}", number, start)

    return record


def split(blocks: Blocks, edges: list[int]) -> StageModels:
    """Return the stages of a model, as models that share the layers of the whole model."""
    from labkit.model_parallel.functional import is_masked, reject_lost_masks
    from labkit.model_parallel.stages import INPUTS

    parts = blocks.split(edges)
    if any(is_masked(x) for part in parts.models for x in part.inputs):
        reject_lost_masks(parts.whole)
    for part, sources in zip(parts.models, parts.takes, strict=True):
        passed = zip(part.inputs, sources, strict=True)
        for shape in (x.shape[1:] for x, source in passed if source.stage != INPUTS):
            if None not in shape:
                continue
            raise InvalidInput(
                f"a stage would send rows of shape {list(shape)}, but the next stage must know "
                "the size of a message; give keras.Input a shape of whole numbers"
            )
    return parts
