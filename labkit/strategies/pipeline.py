"""Pipelined models: stages on ranks, micro-batches on their way through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveInt, field_validator

from labkit.common.errors import InvalidInput
from labkit.forecast import Query, StepForecast, of_stages
from labkit.schedules import PIPELINE
from labkit.schedules.pipeline import Table, gpipe
from labkit.schedules.pipeline.wavefront import stretches
from labkit.strategies.pipeline_rank import Cut, recorder, split, through
from labkit.strategies.staged import Staged
from labkit.strategies.validation import one_of

if TYPE_CHECKING:
    import keras

    from labkit.model_parallel.losses import Losses
    from labkit.model_parallel.stages import Blocks, Parts, Stage
from labkit.strategies.strategy import Batch, ExperimentSpec, Predictor, Session
from labkit.strategies.taxonomy import Cell


class Pipeline(Staged):
    r"""Contiguous layers on each rank; a batch goes through them in micro-batches.

    With \(b_i\) of B rows in micro-batch i, \(g = \sum_i \frac{b_i}{B} g_i\): the gradient of the
    whole batch, whatever the schedule. Several pipelines (replicas) share a batch and average the
    gradients of each stage. Slices share a stage as those of `TensorParallel` share a model:
    workers are replicas × stages × slices, and neighbours share a stage.

    Args:
        schedule: a name of `labkit.schedules.PIPELINE`. "pipedream" changes weights after each
            micro-batch, by the mean gradient of its rows at the weights of its forward pass.
            "wavefront" takes recurrent models through time, stretch by stretch.
        microbatches: into which a replica's part of the batch is cut; of "wavefront" the stretches
            of time steps, of equal length up to one.
        stages: of one pipeline, each on one rank or on its slices; None: as many as workers allow.
            Workers are a multiple of stages × slices.
        slices: ranks that share each stage, see `TensorParallel`; scores at the end are gathered,
            and a stage of which no layer can be cut is whole on all of them. Not for "wavefront".
        chunks: stages a rank, for "interleaved".
        partition: "parameters": the largest stage has as few as can be; "time": the slowest stage
            is as fast as can be, by the seconds of each block, uncut, on rank 0; or how many blocks
            each stage has (or layers, where their sum is that of all layers).
        recompute: keep only the inputs of stages, and go forward twice.

    While it trains a rank holds the weights of its own stages alone. After an epoch callbacks of
    the user's own find those of all, after a batch only these. Weights that they set, then or then,
    count from the next step on; they do it on all ranks.

    A model need be no chain: each tensor, mask and gradient travels straight between the stage that
    makes it and those that read it; inputs are read by all ranks, and outputs meet in the last
    stage. Cuts are where one tensor alone passes, or, if that makes too few blocks, behind any
    layer; calls that share weights stand in one stage. Masked, weighted and summed losses count as
    in one process: \(g = \sum_i \frac{D_i}{D} g_i\), where Keras divides by \(D_i\).

    Batch normalisation sees a micro-batch at a time; dropout draws other numbers than one process,
    the same on all slices of a stage.

    A wavefront cuts time, not rows: while the second stage works on the first stretch of all rows,
    the first stage handles the second stretch. Each stage keeps its recurrent state, and backward
    its gradient, from stretch to stretch: back-propagation through all of time, never truncated.
    With T steps and \(t_i\) of them in stretch i, \(L = \sum_i \frac{t_i}{T} L_i\); what lies
    behind a recurrent layer with return_sequences=False sees the last stretch only. Allowed are
    LSTM, GRU and SimpleRNN without dropout of their own, and layers that act on each step alone,
    one behind the other or with skips inside a stage; a model with another one is refused with the
    list.

    Source: Y. Huang et al., GPipe, 2019, arXiv 1811.06965; D. Narayanan et al., PipeDream, 2019,
    and Megatron-LM, 2021, arXiv 2104.04473; P. Qi et al., Zero Bubble Pipeline Parallelism, 2024,
    arXiv 2401.10241; J. Appleyard et al., Optimizing Performance of Recurrent Neural Networks on
    GPUs, 2016, arXiv 1604.01946 (wavefront). Differs from them: pipedream's replicas average each
    micro-batch's gradient; the wavefront's layers are on ranks; each slice of a stage sends all of
    its output to the same slice of the next one, where Megatron-LM sends a part and gathers.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("synchronous", "stale synchronous")
    scheduling: ClassVar[tuple[str, ...]] = ("micro-batches", "sequential")
    paper: ClassVar[str] = "Huang 2019, arXiv 1811.06965"

    schedule: str = Field("1f1b", kw_only=False)
    microbatches: PositiveInt = 8
    stages: PositiveInt | None = None
    chunks: PositiveInt = 1
    recompute: bool = False

    @property
    def exact(self) -> bool:
        """All but the asynchronous one."""
        return PIPELINE[self.schedule].exact

    @field_validator("schedule")
    @classmethod
    def _schedule(cls, value: str) -> str:
        return one_of("schedule", value, PIPELINE)

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what does not fit together, before any rank starts."""
        self.check_stages(experiment)
        batch = min(experiment.batch_size, experiment.rows or experiment.batch_size)
        replicas = self.replicas(experiment.workers)
        rows = batch // replicas
        if self._recurrent and self.slices > 1:
            raise InvalidInput(
                f"slices={self.slices} share the units of a layer, but a wavefront is of recurrent "
                "layers, which have no slices; give slices=1"
            )
        if self._recurrent:
            if experiment.time_steps is not None:
                stretches(experiment.time_steps, self.microbatches)
        elif self.microbatches > rows:
            allowed = f"give at most {rows}, or " if rows else "give "
            raise InvalidInput(
                f"microbatches={self.microbatches} of {rows} rows a replica: a micro-batch has one "
                f"row at least; {allowed}batch_size={self.microbatches * replicas} or more"
            )
        chunked = [name for name, each in PIPELINE.items() if each.chunked]
        if self.chunks > 1 and self.schedule not in chunked:
            raise InvalidInput(
                f"chunks={self.chunks} belongs to schedule={' or '.join(map(repr, chunked))}, not "
                f"{self.schedule!r}"
            )
        if self.recompute and not self.exact:
            raise InvalidInput(
                f"recompute goes forward with the weights of now, but {self.schedule!r} must go "
                "back with those of its forward pass; use recompute=False"
            )
        self.table(self.ranks(experiment.workers))

    @classmethod
    def combines(cls, cell: Cell) -> bool:
        """What its schedules are."""
        kinds = {(each.synchronization, each.scheduling) for each in PIPELINE.values()}
        return (cell.synchronization, cell.scheduling) in kinds

    def cell(self, workers: int) -> Cell:
        """As its schedule says."""
        schedule = PIPELINE[self.schedule]
        places = {"synchronization": schedule.synchronization, "scheduling": schedule.scheduling}
        return super().cell(workers)._replace(**places)

    def depth(self, workers: int) -> int:
        """As many on each rank as it has chunks."""
        return self.ranks(workers) * self.chunks

    def table(self, ranks: int, iterations: int = 1) -> Table:
        """The schedule of one replica, the same in each iteration."""
        schedule = PIPELINE[self.schedule]
        cut = (self.microbatches, self.chunks) if schedule.chunked else (self.microbatches,)
        return schedule(ranks, *cut)

    @property
    def parts(self) -> int:
        """Micro-batches with an update together."""
        return self.microbatches if self.exact else 1

    @property
    def _recurrent(self) -> bool:
        """Whether stretches of time take the place of micro-batches."""
        return PIPELINE[self.schedule].recurrent

    def rows(self, batch_size: int, workers: int) -> int:
        """Of the largest micro-batch; stretches of time have all rows."""
        whole = super().rows(batch_size, workers)
        return whole if self._recurrent else -(-whole // self.microbatches)

    def blocks(self, model: keras.Model, workers: int) -> Blocks:
        """The blocks of a model; of a recurrent one those of a chain, which stretches pass."""
        from labkit.model_parallel.stages import Chain

        if not self._recurrent:
            return super().blocks(model, workers)
        chain = Chain(model)
        self.check_blocks(len(chain), workers)
        return chain

    def split(self, model: keras.Model, blocks: Blocks, edges: list[int]) -> Parts:
        """The stages of a model, of a recurrent one for stretches of any length."""
        from labkit.model_parallel.stages import Chain, open_time

        if self._recurrent:
            return Chain(open_time(model)).split(edges)
        return super().split(model, blocks, edges)

    def stage(
        self, model: keras.Model, loss: Losses | None, read: Sequence[bool], recompute: bool
    ) -> Stage:
        """What trains a stage, of a recurrent model from stretch to stretch."""
        from labkit.model_parallel.stages import RecurrentStage

        if self._recurrent:
            return RecurrentStage(
                model, loss, recompute=recompute, stretches=self.microbatches, read=read
            )
        return super().stage(model, loss, read, recompute)

    def forecast(self, asked: Query) -> StepForecast:
        """By its table."""
        return of_stages(asked, self, self.recompute)

    def train(self, session: Session) -> None:
        """Steps by the schedule, an optimizer a rank."""
        from labkit.model_parallel.stages import Runner, footprint

        optimizer, workers = session.optimizer(), session.communicator.size
        table = self.table(self.ranks(workers))
        cut = self.cut(session, optimizer, self.recompute)
        record = recorder(session.timeline)
        ends = cut.inputs, cut.outputs
        runner = Runner(cut.lane, table, cut.own, *ends, record, cut.losses, cut.parts.takes)
        apply = cut.updater(session, optimizer)

        def update(stage: int) -> None:
            if stage == max(cut.own):  # all stages of the rank at once
                apply(runner.rows)

        def step(x: Batch, y: Batch, weight: Batch | None) -> float | None:
            cut.begin()
            loss: float | None = runner.step(cut.batch(x, y, weight), update)
            return loss if cut.first else None

        session.loop(step, cut.whole.collect, self._validator(session, cut))
        rows = self.rows(session.experiment.batch_size, workers)
        models = cut.models
        if table.recurrent:  # when the last stretch goes back, a rank keeps those of all steps
            blocks = self.blocks(session.model, workers)
            models, table = blocks.split(cut.edges).models, gpipe(table.ranks, 1)
        expected = footprint.of_stages(models, table, cut.lane.rank, rows, self.recompute)
        cut.finish(session, optimizer, expected)

    def _validator(self, session: Session, cut: Cut) -> Predictor | None:
        """How stages predict while they train; None: the whole model does."""
        if not self._recurrent:
            return cut.predictor()
        if session.model.inputs[0].shape[1] is None:  # only the data say how many steps there are
            return None
        parts = split(self.blocks(session.model, session.communicator.size), cut.edges)
        return through(cut.lane, parts, {number: parts.models[number] for number in cut.own}, [])
