"""Pipelined models: stages on ranks, with several micro-batches in progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveInt, field_validator

from labkit.common.errors import InvalidInput
from labkit.forecast import Query, StepForecast, of_stages
from labkit.schedules import PIPELINE
from labkit.schedules.pipeline import ScheduleTable, gpipe
from labkit.schedules.pipeline.wavefront import time_segments
from labkit.strategies.pipeline_rank import PipelineRank, recorder, split, stage_predictor
from labkit.strategies.staged import Staged
from labkit.strategies.validation import one_of

if TYPE_CHECKING:
    import keras

    from labkit.model_parallel.losses import Losses
    from labkit.model_parallel.stages import Blocks, Stage, StageModels
from labkit.strategies.strategy import Batch, ExperimentSpec, Predictor, Session
from labkit.strategies.taxonomy import Cell


class Pipeline(Staged):
    r"""Each rank holds contiguous layers (stages), through which micro-batches of a batch pass.

    The gradient is \(g = \sum_i \frac{b_i}{B} g_i\), where micro-batch i has \(b_i\) of the B rows
    and the mean gradient \(g_i\). It equals the gradient of the whole batch with every schedule
    but "pipedream", which updates the weights after each micro-batch. Several pipelines (replicas)
    share a batch and average the gradients of each stage. The layers of a stage may be sliced over
    several ranks, as `TensorParallel` slices a model. The number of workers is replicas × stages ×
    slices; ranks with consecutive numbers share a stage.

    Args:
        schedule: The order of forward and backward passes: "layerwise", "gpipe", "1f1b",
            "interleaved", "zero_bubble", "zero_bubble_h2", "pipedream" or "wavefront".
            "pipedream" updates weights after each micro-batch, with the gradient at the weights
            that the forward pass of the micro-batch has read. "wavefront" divides the time steps of
            recurrent models into ranges.
        microbatches: The number of micro-batches that form a replica's batch; with "wavefront" the
            number of ranges of time steps, whose lengths differ by at most one.
        stages: The number of ranks in one pipeline, where the ranks that share a sliced stage count
            as one; None: as many as the workers allow. The number of workers is a multiple of
            stages × tensor_parallel_size.
        tensor_parallel_size: The number of ranks that share each stage, see `TensorParallel`.
            The scores of the last layer are gathered. If no layer of a stage can be sliced, each
            of these ranks computes the whole stage. Not for "wavefront".
        virtual_stages_per_rank: The number of model stages on each rank, for "interleaved".
        partition: Rule that cuts the model into stages. "parameters" minimizes the parameter count
            of the largest stage. "time" minimizes the time of the slowest stage, from the time of
            each undivided block as measured on rank 0. A tuple gives the number of blocks of each
            stage, or of layers if its sum is the number of all layers.
        recompute: Whether ranks store only the inputs of stages, and repeat the forward pass during
            the backward pass.

    During training a rank holds only the weights of its own stages. The user's callbacks find the
    weights of all stages after an epoch, and only those of the rank's stages after a batch. Weights
    that callbacks set take effect from the next step; callbacks must set them on all ranks.

    A model need not be a chain: each tensor, mask and gradient travels directly between the stage
    that produces it and those that read it. All ranks read the inputs, and the last stage collects
    the outputs. Cuts are at points where a single tensor passes, or, if these give too few blocks,
    after any layer. Layer calls that share weights belong to one stage. Masked, weighted and summed
    losses have the same gradient as in one process: \(g = \sum_i \frac{D_i}{D} g_i\), where
    \(D_i\) is the number by which Keras divides the loss of micro-batch i, and \(D = \sum_i D_i\).

    Batch normalisation normalizes one micro-batch at a time. Dropout draws other random numbers
    than training in one process does; they are equal on all slices of a stage.

    A wavefront cuts time, not rows: while the second stage processes the first range of all rows,
    the first stage processes the second range. Each stage passes its recurrent state, and in the
    backward pass the state's gradient, from range to range. This is back-propagation through all
    time steps, without truncation. With T steps and \(t_i\) of them in range i, \(L = \sum_i
    \frac{t_i}{T} L_i\); layers after a recurrent layer with return_sequences=False process the last
    range only. Allowed are LSTM, GRU and SimpleRNN without their dropout, and layers that act on
    each time step separately, in a chain or with skip connections inside a stage. The error for
    other layers lists the allowed ones.

    Source: Y. Huang et al., GPipe, 2019, arXiv 1811.06965; D. Narayanan et al., PipeDream, 2019,
    and Megatron-LM, 2021, arXiv 2104.04473; P. Qi et al., Zero Bubble Pipeline Parallelism, 2024,
    arXiv 2401.10241; J. Appleyard et al., Optimizing Performance of Recurrent Neural Networks on
    GPUs, 2016, arXiv 1604.01946 (wavefront). Differs from them: pipedream's replicas average each
    micro-batch's gradient; the wavefront's layers are on ranks; each slice of a stage sends all of
    its output to the same slice of the next stage, where Megatron-LM sends a part and gathers.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("synchronous", "stale synchronous")
    scheduling: ClassVar[tuple[str, ...]] = ("micro-batches", "sequential")
    paper: ClassVar[str] = "Huang 2019, arXiv 1811.06965"

    schedule: str = Field("1f1b", kw_only=False)
    microbatches: PositiveInt = 8
    stages: PositiveInt | None = None
    virtual_stages_per_rank: PositiveInt = 1
    recompute: bool = False

    @property
    def exact(self) -> bool:
        """Whether the schedule is synchronous, so that the result equals that of one process."""
        return PIPELINE[self.schedule].exact

    @field_validator("schedule")
    @classmethod
    def _schedule(cls, value: str) -> str:
        return one_of("schedule", value, PIPELINE)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput, before any rank starts, for conflicting options."""
        self.check_stages(experiment)
        batch = min(experiment.batch_size, experiment.rows or experiment.batch_size)
        replicas = self.replicas(experiment.workers)
        rows = batch // replicas
        if self._recurrent and self.tensor_parallel_size > 1:
            raise InvalidInput(
                f"tensor_parallel_size={self.tensor_parallel_size} divides the units of layers, "
                "but schedule='wavefront' is for recurrent layers, which cannot be divided; give "
                "tensor_parallel_size=1"
            )
        if self._recurrent:
            if experiment.time_steps is not None:
                time_segments(experiment.time_steps, self.microbatches)
        elif self.microbatches > rows:
            allowed = f"give at most {rows}, or " if rows else "give "
            raise InvalidInput(
                f"microbatches={self.microbatches} exceeds the {rows} rows per replica, of which a "
                f"micro-batch needs at least one; {allowed}"
                f"batch_size={self.microbatches * replicas} or more"
            )
        chunked = [name for name, schedule in PIPELINE.items() if schedule.chunked]
        if self.virtual_stages_per_rank > 1 and self.schedule not in chunked:
            raise InvalidInput(
                f"virtual_stages_per_rank={self.virtual_stages_per_rank} applies to "
                f"schedule={' or '.join(map(repr, chunked))}, not to "
                f"{self.schedule!r}"
            )
        if self.recompute and not self.exact:
            raise InvalidInput(
                "recompute repeats the forward pass with the current weights, but "
                f"{self.schedule!r} needs the weights of the original forward pass; use "
                "recompute=False"
            )
        self.table(self.ranks(experiment.workers))

    @classmethod
    def supports(cls, cell: Cell) -> bool:
        """Return whether one of the schedules has this synchronization and scheduling."""
        kinds = {(schedule.synchronization, schedule.scheduling) for schedule in PIPELINE.values()}
        return (cell.synchronization, cell.scheduling) in kinds

    def cell(self, workers: int) -> Cell:
        """Return the cell, whose synchronization and scheduling depend on the schedule."""
        schedule = PIPELINE[self.schedule]
        places = {"synchronization": schedule.synchronization, "scheduling": schedule.scheduling}
        return super().cell(workers)._replace(**places)

    def depth(self, workers: int) -> int:
        """Return the number of stages: ranks times stages per rank."""
        return self.ranks(workers) * self.virtual_stages_per_rank

    def table(self, ranks: int, iterations: int = 1) -> ScheduleTable:
        """Return the schedule of one replica, which is the same in each iteration."""
        schedule = PIPELINE[self.schedule]
        cut = (
            (self.microbatches, self.virtual_stages_per_rank)
            if schedule.chunked
            else (self.microbatches,)
        )
        return schedule(ranks, *cut)

    @property
    def parts(self) -> int:
        """The number of micro-batches per update of the weights."""
        return self.microbatches if self.exact else 1

    @property
    def _recurrent(self) -> bool:
        """Whether ranges of time steps replace micro-batches."""
        return PIPELINE[self.schedule].recurrent

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the number of rows in the largest micro-batch; a time range has all rows."""
        whole = super().rows(batch_size, workers)
        return whole if self._recurrent else -(-whole // self.microbatches)

    def blocks(self, model: keras.Model, workers: int) -> Blocks:
        """Return the blocks of a model; with a wavefront, the blocks form a chain."""
        from labkit.model_parallel.stages import BlockChain

        if not self._recurrent:
            return super().blocks(model, workers)
        chain = BlockChain(model)
        self.check_blocks(len(chain), workers)
        return chain

    def split(self, model: keras.Model, blocks: Blocks, edges: list[int]) -> StageModels:
        """Return the stages of a model; with a wavefront, they accept time ranges of any length."""
        from labkit.model_parallel.stages import BlockChain, open_time

        if self._recurrent:
            return BlockChain(open_time(model)).split(edges)
        return super().split(model, blocks, edges)

    def stage(
        self, model: keras.Model, loss: Losses | None, read: Sequence[bool], recompute: bool
    ) -> Stage:
        """Return the trainer of a stage; with a wavefront, it trains one time range at a time."""
        from labkit.model_parallel.stages import RecurrentStage

        if self._recurrent:
            return RecurrentStage(
                model, loss, recompute=recompute, stretches=self.microbatches, read=read
            )
        return super().stage(model, loss, read, recompute)

    def forecast(self, query: Query) -> StepForecast:
        """Forecast the duration of a step from the schedule."""
        return of_stages(query, self, self.recompute)

    def train(self, session: Session) -> None:
        """Train the stages in the order of the schedule, with one optimizer per rank."""
        from labkit.model_parallel.stages import Runner, footprint

        optimizer, workers = session.optimizer(), session.communicator.size
        table = self.table(self.ranks(workers))
        cut = self.cut(session, optimizer, self.recompute)
        record = recorder(session.timeline)
        ends = cut.inputs, cut.outputs
        runner = Runner(cut.lane, table, cut.stages, *ends, record, cut.losses, cut.parts.takes)
        apply = cut.updater(session, optimizer)

        def update(stage: int) -> None:
            if stage == max(cut.stages):  # one update covers all stages of the rank
                apply(runner.rows)

        def step(x: Batch, y: Batch, weight: Batch | None) -> float | None:
            cut.begin()
            loss: float | None = runner.step(cut.batch(x, y, weight), update)
            return loss if cut.first else None

        session.loop(step, cut.all_weights.collect, self._validator(session, cut))
        rows = self.rows(session.experiment.batch_size, workers)
        models = cut.models
        if table.recurrent:  # in the last backward pass, a rank holds the activations of all steps
            blocks = self.blocks(session.model, workers)
            models, table = blocks.split(cut.edges).models, gpipe(table.ranks, 1)
        expected = footprint.of_stages(models, table, cut.lane.rank, rows, self.recompute)
        cut.finish(session, optimizer, expected)

    def _validator(self, session: Session, cut: PipelineRank) -> Predictor | None:
        """Return the predictor for validation during training; None: use the whole model."""
        if not self._recurrent:
            return cut.predictor()
        if session.model.inputs[0].shape[1] is None:  # only the data define the number
            return None
        parts = split(self.blocks(session.model, session.communicator.size), cut.edges)
        return stage_predictor(
            cut.lane, parts, {number: parts.models[number] for number in cut.stages}, []
        )
