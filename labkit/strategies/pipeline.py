"""Pipelined training: the strategies Pipeline, Layerwise and DelayedGradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from labkit.common.errors import InvalidInput
from labkit.forecast import Query, StepForecast, of_stages
from labkit.schedules import PIPELINE
from labkit.schedules.pipeline import ScheduleTable, delayed, gpipe, time_segments
from labkit.strategies.pipeline_rank import PipelineRank, recorder, split, stage_predictor
from labkit.strategies.staged import Staged
from labkit.strategies.strategy import Batch, ExperimentSpec, Predictor, Session
from labkit.strategies.taxonomy import Cell
from labkit.strategies.validation import one_of

if TYPE_CHECKING:
    import keras

    from labkit.model_parallel.losses import Losses
    from labkit.model_parallel.stages import Blocks, Stage, StageModels


class Pipeline(Staged):
    r"""Each rank holds stages (contiguous layers), through which the micro-batches of a batch pass.

    The gradient is \(g = \sum_i \frac{b_i}{B} g_i\). Micro-batch i has \(b_i\) of the batch's B
    rows. The mean gradient of micro-batch i is \(g_i\). The gradient g equals the gradient of the
    whole batch. The schedule "pipedream" differs, because it updates the weights after each
    micro-batch. Several pipelines (replicas) can divide a batch, and then average the gradients of
    each stage. The layers of a stage may be divided into slices over several ranks, as in
    `TensorParallel`. The number of workers is replicas × stages × slices. The slices of a stage are
    on consecutive ranks.

    Args:
        schedule: The order of forward and backward passes. "layerwise": one batch passes all
            stages, so only one rank computes at a time. "gpipe": all forward passes of a batch,
            then all backward passes. "1f1b": each rank alternates one forward and one backward
            pass, and stores fewer activations. "interleaved": "1f1b" with several stages per rank.
            "zero_bubble": gradients of weights fill times in which "1f1b" waits.
            "zero_bubble_h2": the same with fewer waits and more stored activations. "pipedream":
            the weights are updated after each micro-batch. The forward and backward pass of a
            micro-batch use the same weights. "wavefront": the time steps of a recurrent model are
            divided into ranges.
        microbatches: The number of micro-batches in the batch of a replica. With "wavefront",
            `microbatches` is the number of ranges of time steps, whose lengths differ by at most
            one.
        stages: The number of ranks in one pipeline; the ranks that share a sliced stage count as
            one. If `stages` is None, the pipeline has as many ranks as the number of workers
            allows. The number of workers is a multiple of stages × tensor_parallel_size.
        tensor_parallel_size: The number of ranks that share each stage, see `TensorParallel`.
            The output scores of the last layer are gathered on all ranks that share the last stage.
            If no layer of a stage can be sliced, each rank of the stage computes the whole stage.
            "wavefront" does not allow `tensor_parallel_size` above 1.
        virtual_stages_per_rank: The number of model stages on each rank, for the schedule
            "interleaved".
        partition: The rule by which the model is cut into stages. "parameters": the largest stage
            has as few parameters as possible. "time": the slowest stage takes as little time as
            possible. Rank 0 measures the time of each undivided block. A tuple gives the number of
            blocks in each stage. If the numbers add up to the number of layers, each layer is a
            block.
        recompute: Whether ranks store only the inputs of stages and repeat the forward pass before
            the backward pass.

    During training a rank holds only the weights of its own stages. After an epoch, the user's
    callbacks see the weights of all stages. After a batch, the callbacks see only the weights of
    the rank's own stages. If callbacks set weights, the next step uses them; the callbacks must set
    them on all ranks.

    A model need not be a chain of layers. A stage sends each of its tensors directly to the stages
    that read it. Masks and gradients also go directly from stage to stage. All ranks read the
    inputs, and the last stage collects the outputs. The model is cut at places where only a single
    tensor passes. If a single tensor passes at too few places of the model, cuts are made after any
    layer. If several calls of layers share weights, these calls belong to one stage. A pipeline
    computes the same gradient as one process, even for masked losses. The gradient of a masked,
    weighted or summed loss is \(g = \sum_i \frac{D_i}{D} g_i\). Keras divides the loss of
    micro-batch i by \(D_i\), and \(D = \sum_i D_i\).

    Batch normalisation uses the statistics of one micro-batch at a time. Dropout draws different
    random numbers than in one process; all slices of a stage draw the same numbers.

    A wavefront divides time, not rows. The first stage processes the second time range while the
    second processes the first. Each stage passes its recurrent state from one time range to the
    next. In the backward pass, each stage computes the gradient of its recurrent state. The stage
    passes the gradient back to the previous time range. A wavefront computes back-propagation
    through all time steps, without truncation. If range i has \(t_i\) of the T time steps, the loss
    is \(L = \sum_i \frac{t_i}{T} L_i\). Layers after a recurrent layer with return_sequences=False
    process only the last range. Allowed layers are LSTM, GRU and SimpleRNN without dropout, and
    layers that process each time step separately. The allowed layers form a chain, or have skip
    connections inside a stage. For a layer that is not allowed, the error lists the allowed layers.

    Source: Y. Huang et al., GPipe, 2019, arXiv 1811.06965. D. Narayanan et al., PipeDream, 2019,
    and Megatron-LM, 2021, arXiv 2104.04473. P. Qi et al., Zero Bubble Pipeline Parallelism, 2024,
    arXiv 2401.10241. J. Appleyard et al., Optimizing Performance of Recurrent Neural Networks on
    GPUs, 2016, arXiv 1604.01946 (wavefront). Difference from the papers: replicas with "pipedream"
    average the gradient of each micro-batch, and the layers of a wavefront run on several ranks,
    not one GPU. A slice sends its complete output to the same slice of the next stage. In
    Megatron-LM, a slice sends only a part of its output. The receiving slices of Megatron-LM gather
    the parts.
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
        """Whether the schedule is synchronous, so that results equal training on one process."""
        return PIPELINE[self.schedule].exact

    @field_validator("schedule")
    @classmethod
    def _schedule(cls, value: str) -> str:
        return one_of("schedule", value, PIPELINE)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for conflicting options, before any rank starts."""
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
                f"microbatches={self.microbatches} exceeds the {rows} rows per replica, but each "
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
        """Return whether any schedule has the synchronization and scheduling of `cell`."""
        kinds = {(schedule.synchronization, schedule.scheduling) for schedule in PIPELINE.values()}
        return (cell.synchronization, cell.scheduling) in kinds

    def cell(self, workers: int) -> Cell:
        """Return the place in the taxonomy, which depends on the schedule."""
        schedule = PIPELINE[self.schedule]
        places = {"synchronization": schedule.synchronization, "scheduling": schedule.scheduling}
        return super().cell(workers)._replace(**places)

    def depth(self, workers: int) -> int:
        """Return the number of stages of one replica: ranks times stages per rank."""
        return self.ranks(workers) * self.virtual_stages_per_rank

    def table(self, ranks: int, iterations: int = 1) -> ScheduleTable:
        """Return the schedule table of one replica; all iterations have the same schedule."""
        schedule = PIPELINE[self.schedule]
        cut = (
            (self.microbatches, self.virtual_stages_per_rank)
            if schedule.chunked
            else (self.microbatches,)
        )
        return schedule(ranks, *cut)

    @property
    def parts(self) -> int:
        """The number of micro-batches for each update of the weights."""
        return self.microbatches if self.exact else 1

    @property
    def _recurrent(self) -> bool:
        """Whether the schedule divides time steps into ranges, not rows into micro-batches."""
        return PIPELINE[self.schedule].recurrent

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the row count of the largest micro-batch; a wavefront does not divide rows."""
        whole = super().rows(batch_size, workers)
        return whole if self._recurrent else -(-whole // self.microbatches)

    def blocks(self, model: keras.Model, workers: int) -> Blocks:
        """Return the blocks of a model; for a wavefront, the blocks form a chain."""
        from labkit.model_parallel.stages import BlockChain

        if not self._recurrent:
            return super().blocks(model, workers)
        chain = BlockChain(model)
        self.check_blocks(len(chain), workers)
        return chain

    def split(self, model: keras.Model, blocks: Blocks, edges: list[int]) -> StageModels:
        """Return all stages' models; for a wavefront, they accept any number of time steps."""
        from labkit.model_parallel.stages import BlockChain, open_time

        if self._recurrent:
            return BlockChain(open_time(model)).split(edges)
        return super().split(model, blocks, edges)

    def stage(
        self, model: keras.Model, loss: Losses | None, read: Sequence[bool], recompute: bool
    ) -> Stage:
        """Return the trainer of a stage; for a wavefront, it trains one range of time at a time."""
        from labkit.model_parallel.stages import RecurrentStage

        if self._recurrent:
            return RecurrentStage(
                model, loss, recompute=recompute, stretches=self.microbatches, read=read
            )
        return super().stage(model, loss, read, recompute)

    def forecast(self, query: Query) -> StepForecast:
        """Forecast the duration of a training step from the pipeline schedule."""
        return of_stages(query, self, self.recompute)

    def train(self, session: Session) -> None:
        """Train the stages in the order of the schedule; each rank has one optimizer."""
        from labkit.model_parallel.stages import Runner, footprint

        optimizer, workers = session.optimizer(), session.communicator.size
        table = self.table(self.ranks(workers))
        cut = self.cut(session, optimizer, self.recompute)
        record = recorder(session.timeline)
        ends = cut.inputs, cut.outputs
        runner = Runner(cut.lane, table, cut.stages, *ends, record, cut.losses, cut.parts.takes)
        apply = cut.updater(session, optimizer)

        def update(stage: int) -> None:
            if stage == max(cut.stages):  # One optimizer update covers all stages of a rank.
                apply(runner.rows)

        def step(x: Batch, y: Batch, weight: Batch | None) -> float | None:
            cut.begin()
            loss: float | None = runner.step(cut.batch(x, y, weight), update)
            return loss if cut.first else None

        session.loop(step, cut.all_weights.collect, self._validator(session, cut))
        rows = self.rows(session.experiment.batch_size, workers)
        models = cut.models
        # In the last backward pass of a recurrent pipeline, a rank stores the activations of all
        # time steps.
        if table.recurrent:
            blocks = self.blocks(session.model, workers)
            models, table = blocks.split(cut.edges).models, gpipe(table.ranks, 1)
        expected = footprint.of_stages(models, table, cut.lane.rank, rows, self.recompute)
        cut.finish(session, optimizer, expected)

    def _validator(self, session: Session, cut: PipelineRank) -> Predictor | None:
        """Return the predictor for validation, or None if validation uses the whole model."""
        if not self._recurrent:
            return cut.predictor()
        # If the model's input shape leaves the number of time steps open, only the data define the
        # number.
        if session.model.inputs[0].shape[1] is None:
            return None
        parts = split(self.blocks(session.model, session.communicator.size), cut.edges)
        return stage_predictor(
            cut.lane, parts, {number: parts.models[number] for number in cut.stages}, []
        )


class Layerwise(Pipeline):
    """A model whose layers are divided over ranks; a whole batch passes from rank to rank.

        time ->   F ·  ·  ·  ·  B
                  ·  F ·  ·  B ·
                  ·  ·  F B ·  ·

    While one rank computes, all other ranks wait, so the strategy saves memory but no time.
    Layerwise training is a pipeline with a single micro-batch.

    Args: As for `Pipeline`, including tensor_parallel_size; the schedule and the number of
        micro-batches are fixed.

    Source: Y. Huang et al., GPipe, 2019, arXiv 1811.06965, which calls this strategy naive.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("synchronous",)
    scheduling: ClassVar[tuple[str, ...]] = ("sequential",)

    stages: PositiveInt | None = Field(None, kw_only=False)
    schedule: Literal["layerwise"] = "layerwise"
    microbatches: Literal[1] = 1


class DelayedGradients(Staged):
    r"""Training without backward locking: no module waits for the backward pass of the next module.

    In iteration t, module k of K receives an error gradient from module k + 1. Module k + 1
    computed the error gradient in iteration t - 1. The error gradient belongs to the batch of
    iteration \(j = t - K + k\). Module k then updates its weights by the following rule:

    \(w_k^{t+1} = w_k^t - \gamma \nabla_k f_j(w^j)\).

    The gradient is computed at the weights of iteration j. In each iteration, the module
    stores its weights and its activations. The gradients of the last module have no delay. The
    gradients of the first module have a delay of K - 1 iterations. A module uses its initial
    weights until it receives its first error gradient.

    Args:
        modules: The number K of modules of a replica. Each module is on one rank, or is divided
            over several ranks. If `modules` is None, the replica has as many modules as the number
            of workers allows. The number of workers is a multiple of modules ×
            tensor_parallel_size.
        tensor_parallel_size: The number of ranks that share each module, as in `Pipeline`.
        partition: How the layers are divided into modules. "parameters": the largest module has as
            few parameters as possible. "time": the slowest module takes as little time as possible.
            Rank 0 measures the time of each undivided block. A tuple gives the number of blocks in
            each module.

    Memory use and the weights that callbacks see are as in `Pipeline`.

    With K modules, the speedup is at most 3/(1 + 2/K). The bound assumes that a backward pass takes
    two forward passes.

    Source: Z. Huo et al., Decoupled Parallel Backpropagation with Convergence Guarantee, 2018,
    arXiv 1804.10574. Difference from the paper: a module takes no optimizer step before its first
    error gradient arrives. The paper instead takes steps with a zero gradient. SGD steps with a
    zero gradient do not change the weights. Gradients that are still on their way after the last
    iteration are not applied.
    """

    stages_field: ClassVar[str] = "modules"
    synchronization: ClassVar[tuple[str, ...]] = ("stale synchronous",)
    scheduling: ClassVar[tuple[str, ...]] = ("unlocked",)
    paper: ClassVar[str] = "Huo 2018, arXiv 1804.10574"
    unlocked: ClassVar[bool] = True
    # Checkpoints are impossible, because some gradients are still on their way when a step ends.
    resumable: ClassVar[bool] = False

    modules: PositiveInt | None = Field(None, kw_only=False)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for conflicting options, before any rank starts."""
        self.check_stages(experiment)

    def table(self, ranks: int, iterations: int = 1) -> ScheduleTable:
        """Return the pipeline schedule of one replica for a number of successive iterations."""
        return delayed(ranks, iterations)

    def forecast(self, query: Query) -> StepForecast:
        """Forecast a training step in the steady state, in which all modules are busy."""
        return of_stages(query, self, goes_on=True)

    def train(self, session: Session) -> None:
        """Train with sequential forward and parallel backward passes, one optimizer per module."""
        from labkit.model_parallel.stages import Delayed, StageMessages, footprint

        optimizer, modules = session.optimizer(), self.ranks(session.communicator.size)
        cut = self.cut(session, optimizer, late=modules)
        (module,) = cut.stages.values()
        links = StageMessages(cut.lane, cut.inputs, cut.outputs, cut.parts.takes)
        delayed = Delayed(module, links, recorder(session.timeline), cut.losses)
        apply = cut.updater(session, optimizer)

        def step(x: Batch, y: Batch, weight: Batch | None) -> float | None:
            cut.begin()
            batch = cut.batch(x, y, weight)
            loss: float | None = delayed.step(batch, lambda: apply(delayed.rows))
            return loss if cut.first else None

        session.loop(step, cut.all_weights.collect, cut.predictor())
        delayed.finish()
        rows = self.rows(session.experiment.batch_size, session.communicator.size)
        expected = footprint.of_module(module.model, modules, cut.lane.rank, rows)
        cut.finish(session, optimizer, expected)
