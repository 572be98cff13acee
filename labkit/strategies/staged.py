"""The base class of strategies that cut a model into pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveInt, field_validator

from labkit.common.errors import InvalidInput
from labkit.common.nearest import hint
from labkit.common.rows import cut as divided
from labkit.strategies.pipeline_rank import PipelineRank, local_stages, split, stage_predictor
from labkit.strategies.strategy import (
    Batch,
    ExperimentSpec,
    Predicted,
    Predictor,
    Serving,
    Session,
    Strategy,
)
from labkit.strategies.taxonomy import Cell
from labkit.strategies.validation import (
    norms,
    refuse_batch_division,
    refuse_keras_step_options,
    refuse_narrow,
    refuse_norms,
    refuse_optimizer,
    refuse_remainder,
)

if TYPE_CHECKING:
    import keras

    from labkit.common.canonical_json import JSON
    from labkit.communicator import Communicator
    from labkit.model_parallel.losses import Losses
    from labkit.model_parallel.stages import Blocks, Stage, StageModels
    from labkit.schedules.pipeline import ScheduleTable


class Staged(Strategy):
    """The base class of pipelines: each stage is on one rank, or is sliced over several ranks.

    Several replicas of the model divide each batch. The rank of a slice of a stage is (replica ×
    stages + stage) × slices + slice. The ranks that have the same slice number in all stages of a
    replica form a lane. A batch passes through the ranks of a lane from stage to stage. The ranks
    of one stage form a group, which divides the stage's layers.
    """

    resumable: ClassVar[bool] = True
    # The attribute `stages_field` names the option that sets the number of ranks in one pipeline.
    stages_field: ClassVar[str] = "stages"
    architecture: ClassVar[tuple[str, ...]] = ("neighbours",)
    parallelism: ClassVar[tuple[str, ...]] = ("model by layers", "hybrid")
    # If `unlocked` is true, stages start the next training step before the current step ends.
    unlocked: ClassVar[bool] = False

    partition: str | tuple[PositiveInt, ...] = "parameters"
    tensor_parallel_size: PositiveInt = 1

    @field_validator("partition")
    @classmethod
    def _partition(cls, value: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if isinstance(value, str) and value not in ("parameters", "time"):
            raise ValueError(
                f"partition={value!r} is not known{hint(value, ('parameters', 'time'))}; allowed: "
                "'parameters', 'time', or a number of blocks for each stage"
            )
        return value

    def ranks(self, workers: int) -> int:
        """Return the number of pipeline ranks per slice, by default the maximum."""
        return getattr(self, self.stages_field) or workers // self.tensor_parallel_size

    def depth(self, workers: int) -> int:
        """Return the number of stages of one replica, by default one per rank."""
        return self.ranks(workers)

    def cell(self, workers: int) -> Cell:
        """Return the place in the taxonomy, hybrid with several replicas or slices."""
        cell = super().cell(workers)
        hybrid = self.tensor_parallel_size > 1 or self.replicas(workers) > 1
        return cell._replace(parallelism="hybrid") if hybrid else cell

    def table(self, ranks: int, iterations: int = 1) -> ScheduleTable:
        """Return the schedule table of one replica, for several successive iterations."""
        raise NotImplementedError

    @property
    def parts(self) -> int:
        """The number of parts of a replica's batch that have separate losses; default: 1."""
        return 1

    def replicas(self, workers: int) -> int:
        """Return the number of model replicas that divide each batch."""
        return workers // (self.ranks(workers) * self.tensor_parallel_size)

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the row count of the largest batch that a stage processes at a time."""
        return -(-batch_size // self.replicas(workers))

    def readers(self, communicator: Communicator) -> Communicator:
        """Return the ranks that divide batches; they have the same stage and slice number."""
        ranks = self.ranks(communicator.size) * self.tensor_parallel_size
        return communicator.split(communicator.rank % ranks)

    def colours(self, rank: int, workers: int) -> tuple[int, int]:
        """Return the numbers of a rank's lane (one slice, all stages) and group (one stage)."""
        replica = rank // (self.ranks(workers) * self.tensor_parallel_size)
        return (
            replica * self.tensor_parallel_size + rank % self.tensor_parallel_size,
            rank // self.tensor_parallel_size,
        )

    def check_stages(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for options that do not work with stages or with the model."""
        workers = experiment.workers
        refuse_keras_step_options(experiment)
        refuse_remainder("tensor_parallel_size", self.tensor_parallel_size, workers)
        ranks, stages = self.ranks(workers), self.depth(workers)
        total_name = (
            "workers"
            if self.tensor_parallel_size == 1
            else f"workers/tensor_parallel_size={workers}/{self.tensor_parallel_size}"
        )
        refuse_remainder(self.stages_field, ranks, workers // self.tensor_parallel_size, total_name)
        refuse_batch_division(experiment, "the stages of a pipeline", self.replicas(workers))
        if not isinstance(self.partition, str) and len(self.partition) != stages:
            raise InvalidInput(
                f"partition={list(self.partition)} has {len(self.partition)} stages; give "
                f"{stages} numbers, one per stage"
            )
        if experiment.blocks is not None:
            self.check_blocks(experiment.blocks, workers)
        if self.tensor_parallel_size > 1:
            refuse_narrow(
                self.tensor_parallel_size, experiment, getattr(self, self.stages_field) or 1
            )
        self.check_optimizer(experiment.optimizer, experiment.optimizer_options)

    def check_blocks(self, blocks: int, workers: int) -> None:
        """Raise InvalidInput if the model has too few blocks for the stages of one replica."""
        ranks, stages = self.ranks(workers), self.depth(workers)
        if stages > blocks:
            chunks, lane = stages // ranks, workers // self.tensor_parallel_size
            divisors = [n for n in range(1, ranks) if lane % n == 0 and n * chunks <= blocks]
            allowed = (
                " or ".join(map(str, divisors)) if divisors else "none: give fewer virtual stages"
            )
            option = f"{self.stages_field}={ranks}" + (
                f" of virtual_stages_per_rank={chunks}" if chunks > 1 else ""
            )
            raise InvalidInput(
                f"{option} has {stages} stages, which need at least one block each, but the "
                f"model is a chain of {blocks} blocks; allowed with workers={workers}: "
                f"{allowed}"
            )
        if not isinstance(self.partition, str) and sum(self.partition) != blocks:
            extra = divided(blocks - stages, self.partition)
            example = [1 + b - a for a, b in pairwise(extra)]
            raise InvalidInput(
                f"partition={list(self.partition)} has {sum(self.partition)} blocks, but the "
                f"model has {blocks}; give {stages} positive numbers with this sum, such as "
                f"{example}"
            )

    def check_optimizer(self, optimizer: str, options: Mapping[str, JSON]) -> None:
        """Raise InvalidInput for an optimizer that needs the gradients of several ranks.

        Args:
            optimizer: The name of the optimizer, in lower case.
            options: The constructor arguments of the optimizer.
        """
        if self.tensor_parallel_size > 1:
            refuse_norms(optimizer, options)
        norm = options.get("global_clipnorm")
        if norm is not None:
            raise InvalidInput(
                f"global_clipnorm={norm} needs the gradients of all layers on one rank, but "
                "each rank has only those of its layers; use clipnorm (by variable) or "
                "clipvalue"
            )

    def edges(
        self, model: keras.Model, workers: int, seconds: Sequence[float] | None = None
    ) -> list[int]:
        """Return the index of the first block of each stage, then the number of all blocks.

        Args:
            model: The whole model.
            workers: The total number of workers of all replicas.
            seconds: The measured time of each block in seconds. If `seconds` is None, the cuts
                balance the numbers of parameters.
        """
        from labkit.model_parallel.stages import (
            balance_costs,
            balance_parameters,
            explicit_partition,
        )

        blocks = self.blocks(model, workers)
        if not isinstance(self.partition, str):
            return explicit_partition(self.partition, len(blocks))
        if seconds is not None:
            return balance_costs(seconds, self.depth(workers))
        parts = blocks.split(range(len(blocks) + 1)).models
        return balance_parameters([part.count_params() for part in parts], self.depth(workers))

    def blocks(self, model: keras.Model, workers: int) -> Blocks:
        """Return the blocks of a model; two blocks meet where only one tensor passes.

        If one tensor passes at too few places, each layer is a block. Each layer is also a block if
        the field `partition` counts layers.
        """
        from labkit.model_parallel.stages import Blocks

        blocks = Blocks(model)
        wanted = None if isinstance(self.partition, str) else sum(self.partition)
        if self.depth(workers) > len(blocks) or wanted not in (None, len(blocks)):
            wide = Blocks(model, wide=True)
            if self.depth(workers) <= len(wide) and wanted in (None, len(wide)):
                return wide
            if self.depth(workers) > len(wide) and wide.shared():
                raise InvalidInput(
                    f"{self.depth(workers)} stages are too many: calls that share weights "
                    f"({', '.join(wide.shared())}) and all layers between them belong to one "
                    f"stage, which leaves {len(wide)} stages; give at most "
                    f"{len(wide)} stages, or layers that share no weights"
                )
        self.check_blocks(len(blocks), workers)
        return blocks

    def predictor(self, model: keras.Model, replica: Communicator) -> Predictor:
        """Return a predictor that sends several micro-batches through the stages as a pipeline.

        The predictor does not measure block times, so with partition="time" the cuts balance the
        numbers of parameters.
        """
        edges = self.edges(model, replica.size)
        parts = split(self.blocks(model, replica.size), edges)
        models = parts.models
        if self.tensor_parallel_size == 1:
            return stage_predictor(replica, parts, *local_stages(models, replica))
        self._refuse_whole(models)

        def predict(batches: Iterable[Batch]) -> Iterator[Predicted]:
            lane, group = (
                replica.split(colour) for colour in self.colours(replica.rank, replica.size)
            )
            yield from stage_predictor(lane, parts, *local_stages(models, lane, group))(batches)
            group.close()
            lane.close()

        return predict

    def serving(self, model: keras.Model, replica: Communicator) -> Serving | None:
        """Return the predictor and the variables of this rank's stages, or all if sliced."""
        from labkit.model_parallel.stages import INPUTS

        if self.tensor_parallel_size > 1:
            return super().serving(model, replica)
        parts = split(self.blocks(model, replica.size), self.edges(model, replica.size))
        models, sliced = local_stages(parts.models, replica)
        reads = any(source.stage == INPUTS for number in models for source in parts.takes[number])
        variables = [variable for part in models.values() for variable in part.variables]
        return Serving(stage_predictor(replica, parts, models, sliced), reads, variables)

    def cut(
        self,
        session: Session,
        optimizer: keras.optimizers.Optimizer,
        recompute: bool = False,
        late: int = 1,
    ) -> PipelineRank:
        """Compile the session's model with the optimizer; return this rank's stages of the model.

        Args:
            session: The session of this rank.
            optimizer: The optimizer of all stages.
            recompute: Whether stages recompute activations, see
                `labkit.model_parallel.stages.Stage`.
            late: The number of training steps after which stages use the most memory.
        """
        from labkit.communicator import computing
        from labkit.model_parallel.losses import Losses
        from labkit.model_parallel.stages import INPUTS, MemoryLedger
        from labkit.model_parallel.weights import WholeWeights

        self.check_optimizer(type(optimizer).__name__.lower(), norms(optimizer))
        refuse_optimizer(optimizer)
        session.compile(optimizer)
        communicator, model = session.communicator, session.model
        lane, group = (
            session.part(colour) for colour in self.colours(communicator.rank, communicator.size)
        )
        seconds: Any = None
        if self.partition == "time":
            seconds = session.once("seconds of blocks", lambda: self._seconds(session))
        edges = self.edges(model, communicator.size, seconds)
        blocks = self.blocks(model, communicator.size)
        parts = self.split(model, blocks, edges)
        models = parts.models
        self._refuse_whole(models)
        session.partition = blocks.described(edges, seconds)
        local_models, sliced = local_stages(models, lane, group)
        ledger, stages = MemoryLedger(late), {}
        losses = Losses(model, session.readers, self.parts)
        for number, part in local_models.items():
            loss = losses if number == len(models) - 1 else None
            read = [source.stage == INPUTS for source in parts.takes[number]]
            stages[number] = self.stage(part, loss, read, recompute)
            stages[number].ledger, stages[number].computing = ledger, computing(communicator)
        # In the first replica, the rank with a stage's first slice broadcasts the weights of the
        # stage.
        senders = {
            rank * self.tensor_parallel_size: models[rank :: lane.size] for rank in range(lane.size)
        }
        all_weights = WholeWeights(
            model, senders, lane.rank * self.tensor_parallel_size, communicator, sliced
        )
        has_callbacks = session.experiment.callbacks is not None
        return PipelineRank(
            lane, stages, sliced, parts, edges, ledger, all_weights, has_callbacks, losses
        )

    def split(self, model: keras.Model, blocks: Blocks, edges: list[int]) -> StageModels:
        """Return the models of all stages, which share their layers with the whole model."""
        return split(blocks, edges)

    def stage(
        self, model: keras.Model, loss: Losses | None, read: Sequence[bool], recompute: bool
    ) -> Stage:
        """Return the trainer of a stage; for arguments see `labkit.model_parallel.stages.Stage`."""
        from labkit.model_parallel.stages import Stage

        return Stage(model, loss, recompute=recompute, read=read)

    def _refuse_whole(self, models: list[keras.Model]) -> None:
        """Raise InvalidInput if no stage has any layer that can be sliced."""
        from labkit.model_parallel.tensor import require_divisible

        if self.tensor_parallel_size > 1:
            require_divisible(models, self.tensor_parallel_size)

    def _seconds(self, session: Session) -> list[float]:
        """Return the seconds of each block, measured on rank 0 and sent to all ranks."""
        from labkit.model_parallel.stages import block_seconds

        seconds, workers = None, session.communicator.size
        if session.communicator.rank == 0:
            rows = self.rows(session.experiment.batch_size, workers)
            blocks = self.blocks(session.model, workers)
            seconds = block_seconds(session.model, rows, session.communicator.clock, blocks)
        return list(
            session.communicator.broadcast_object(seconds, label="the measured times of the blocks")
        )
