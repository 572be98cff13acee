"""Pipelined models: stages on ranks, micro-batches on their way through them."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt, field_validator

from labkit.errors import InvalidInput
from labkit.schedules import PIPELINE
from labkit.schedules.pipeline import Table, interleaved
from labkit.strategies.base import Question, Session
from labkit.strategies.staged import Staged, collect, mean_and_apply, recorder

EXACT = ("layerwise", "gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_h2")


class Pipeline(Staged):
    r"""Contiguous layers on each rank; a batch goes through them in micro-batches.

    With \(b_i\) of B rows in micro-batch i, \(g = \sum_i \frac{b_i}{B} g_i\): the gradient of the
    whole batch, whatever the schedule. Several pipelines (replicas) share a batch and average the
    gradients of each stage.

    Args:
        schedule: a name of `labkit.schedules.PIPELINE`. "pipedream" changes weights after each
            micro-batch, by the mean gradient of its rows at the weights of its forward pass.
        microbatches: into which a replica's part of the batch is cut.
        stages: ranks of one pipeline; None: all workers. Workers are a multiple of it.
        chunks: stages a rank, for "interleaved".
        partition: "parameters": the largest stage has as few as can be; or how many blocks each
            stage has.
        recompute: keep only the inputs of stages, and go forward twice.

    Batch normalisation sees a micro-batch at a time; dropout draws other numbers than one process.

    Source: Y. Huang et al., GPipe, 2019, arXiv 1811.06965; D. Narayanan et al., PipeDream, 2019,
    and Megatron-LM, 2021, arXiv 2104.04473; P. Qi et al., Zero Bubble Pipeline Parallelism, 2024,
    arXiv 2401.10241. Differs from them: pipedream's replicas average each micro-batch's gradient.
    """

    schedule: str = "1f1b"
    microbatches: PositiveInt = 8
    stages: PositiveInt | None = None
    chunks: PositiveInt = 1
    recompute: bool = False

    @property
    def exact(self) -> bool:
        """All but the asynchronous one."""
        return self.schedule in EXACT

    @field_validator("schedule")
    @classmethod
    def _schedule(cls, value: str) -> str:
        allowed = [name for name in PIPELINE if name != "wavefront"]
        if value not in allowed:
            raise ValueError(f"schedule={value!r} is not known; allowed: {', '.join(allowed)}")
        return value

    def check(self, experiment: Question) -> None:
        """Refuse what does not fit together, before any rank starts."""
        ranks = self.ranks(experiment.workers)
        self.check_stages(experiment, "stages", ranks * self.chunks)
        rows = experiment.batch_size // (experiment.workers // ranks)
        if self.microbatches > rows:
            raise InvalidInput(
                f"microbatches={self.microbatches} of {rows} rows a replica: a micro-batch has one "
                f"row at least; give at most {rows}, or a larger batch_size"
            )
        if self.chunks > 1 and self.schedule != "interleaved":
            raise InvalidInput(
                f"chunks={self.chunks} belongs to schedule='interleaved', not {self.schedule!r}"
            )
        if self.recompute and not self.exact:
            raise InvalidInput(
                "recompute goes forward with the weights of now, but 'pipedream' must go back with "
                "those of its forward pass; use recompute=False"
            )
        self.table(ranks)

    def ranks(self, workers: int) -> int:
        """As many as stages, but for chunks."""
        return self.stages or workers

    def table(self, ranks: int) -> Table:
        """The schedule of one replica."""
        if self.schedule == "interleaved":
            return interleaved(ranks, self.microbatches, self.chunks)
        return PIPELINE[self.schedule](ranks, self.microbatches)

    def train(self, session: Session) -> None:
        """Steps by the schedule, an optimizer a rank."""
        from labkit.stages import Batch, Runner

        optimizer = session.optimizer()
        table = self.table(self.ranks(session.communicator.size))
        cut = self.cut(session, table.stages, optimizer, self.recompute)
        record = recorder(session.timeline)
        runner = Runner(cut.communicator, table, cut.own, cut.inputs, cut.outputs, record)
        apply = mean_and_apply(session, cut.own, optimizer)

        def update(stage: int) -> None:
            if stage == max(cut.own):  # all stages of the rank at once
                apply(runner.rows)

        def step(x: Any, y: Any, weight: Any) -> float | None:
            loss: float | None = runner.step(Batch(x, y, weight), update)
            return loss

        session.loop(step, lambda: collect(session))
