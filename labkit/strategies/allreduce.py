"""Synchronous data parallel training: every step applies the mean gradient of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from labkit.common.errors import InvalidInput
from labkit.common.quantity_fields import Bytes
from labkit.communicator import ALGORITHMS, Transport, refuse_unmetered
from labkit.compression import Compressor, Nested
from labkit.exchange import BUCKET_BYTES, SCHEDULES
from labkit.programs import AllReduceAction as AllReduceAction
from labkit.programs import Compute, Program, RestartPoint, Roles, ServerPieces, Snapshot, Update
from labkit.schedules import ALLREDUCE
from labkit.strategies.strategy import ExperimentSpec, Session, Strategy, TrainingState
from labkit.strategies.taxonomy import Cell
from labkit.strategies.validation import (
    one_of,
    refuse_fit_options,
    refuse_keras_step_options,
    refuse_optimizer,
)

if TYPE_CHECKING:
    from labkit.forecast import Query, StepForecast


class AllReduce(Strategy):
    r"""Each rank trains a replica, and an allreduce averages the gradients in every step.

    The mean gradient is \(\bar g = \frac{1}{B} \sum_r b_r g_r\). Rank r has \(b_r\) samples with
    the mean gradient \(g_r\). The update equals that of one process on the global batch of \(B =
    \sum_r b_r\) samples.

    Args:
        algorithm: "auto", or the name of an allreduce algorithm. The names in
            `labkit.schedules.ALLREDUCE` are allowed. "mpi" uses the algorithm that the MPI library
            chooses. "shared_memory" is for ranks of one host. "auto" measures the algorithms before
            training, and uses the fastest one. For an emulated network, "auto" simulates the
            algorithms.
        schedule: When buckets of gradients are sent. "sequential": buckets are sent after
            backpropagation. "overlap": buckets are sent during backpropagation, unless ranks of one
            host compute on all cores of the host. "priority": the first layers are sent first,
            while the next training step begins. "staggered": ranks that share a link send one after
            another.
        bucket_bytes: The size of a bucket of gradients. The size is a number of bytes or a text
            such as "4MiB".
        compressor: The compressor of the gradients, or None for uncompressed gradients. A
            compressor is a name in `labkit.compression.COMPRESSORS`, or an object of a named class.
            An allreduce sums the output of linear compressors, and merges that of sparse
            compressors. An allgather exchanges the output of compressors that are neither linear
            nor sparse.
        compression_stats_every: The number of training steps between two compression statistics of
            each gradient. 0 disables the statistics.

    Source: A. Vishnu, C. Siegel, J. Daily: Distributed TensorFlow with MPI, 2016, arXiv 1603.02339.
    Difference from the paper: the paper's first code averaged weights once per epoch; labkit
    averages gradients in every step, as later versions of that code do.
    """

    scheduling: ClassVar[tuple[str, ...]] = tuple(SCHEDULES)
    normalizes_globally: ClassVar[bool] = True
    resumable: ClassVar[bool] = True
    paper: ClassVar[str] = "Vishnu 2016, arXiv 1603.02339"

    algorithm: str = Field("auto", kw_only=False)
    schedule: str = "sequential"
    bucket_bytes: Bytes = BUCKET_BYTES
    compressor: Nested | None = None
    compression_stats_every: int = Field(default=0, ge=0)

    @property
    def exact(self) -> bool:
        """Whether the gradients are exchanged without a compressor."""
        return self.compressor is None

    @property
    def lossy(self) -> Compressor | None:
        """The compressor of the gradients, or None for uncompressed gradients."""
        return self.compressor

    def keeps_optimizer(self, experiment: ExperimentSpec) -> bool:
        """Return True if training uses the wall clock and one optimizer updates all layers."""
        return experiment.clock == "wall" and not SCHEDULES[self.schedule].into_next

    def cell(self, workers: int) -> Cell:
        """Return the strategy's place in the taxonomy of training methods."""
        return super().cell(workers)._replace(scheduling=self.schedule)

    @property
    def fault_tolerant(self) -> bool:
        """Whether training survives a rank failure; False if exchanges overlap the next step."""
        return not SCHEDULES[self.schedule].into_next

    @property
    def stats_interval(self) -> int:
        """The number of training steps between compression statistics, or 0 for no statistics."""
        return self.compression_stats_every

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the number of batch rows of the rank that has the most rows."""
        return -(-batch_size // workers)

    @field_validator("algorithm")
    @classmethod
    def _algorithm(cls, value: str) -> str:
        return one_of("algorithm", value, ("auto", *ALGORITHMS))

    @field_validator("schedule")
    @classmethod
    def _schedule(cls, value: str) -> str:
        return one_of("schedule", value, tuple(SCHEDULES))

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for options that the network, clock or compressor does not support."""
        refuse_unmetered(self.algorithm, experiment.network)
        if experiment.clock == "virtual":
            self._check_virtual(experiment)
        schedule = SCHEDULES[self.schedule]
        if schedule.into_next:  # A schedule with `into_next` updates each layer separately.
            refuse_fit_options(experiment.optimizer_options)
        if (
            self.compressor is not None
            and not schedule.after
            and experiment.precision == "mixed_float16"
        ):
            raise InvalidInput(
                f"schedule={self.schedule!r} with a compressor and precision='mixed_float16': "
                "a step that is skipped after an overflow loses the messages that it has "
                "already sent; use schedule='sequential', or precision='mixed_bfloat16'"
            )
        if self.compressor is not None:
            self.compressor.check(experiment.optimizer, experiment.optimizer_options)
        elif self.compression_stats_every:
            raise InvalidInput(
                f"compression_stats_every={self.compression_stats_every} measures compression, "
                "but there is no "
                "compressor; give compressor=…, or compression_stats_every=0"
            )

    def _check_virtual(self, experiment: ExperimentSpec) -> None:
        refuse_keras_step_options(experiment)
        if self.schedule != "sequential":
            raise InvalidInput(
                f"schedule={self.schedule!r} overlaps messages with the computation of single "
                "layers, which clock='virtual' does not model; use schedule='sequential'"
            )
        if self.compression_stats_every:
            raise InvalidInput(
                f"compression_stats_every={self.compression_stats_every} measures gradients on "
                "ranks, but "
                "clock='virtual' runs without ranks; use compression_stats_every=0"
            )
        if self.algorithm != "auto" and self.algorithm not in ALLREDUCE:
            raise InvalidInput(
                f"algorithm={self.algorithm!r} has no communication schedule to simulate; "
                f"allowed on clock='virtual': {', '.join(ALLREDUCE)}, or 'auto', which is the "
                "ring"
            )

    @property
    def transport(self) -> Transport:
        """The transport of point-to-point messages; the strategy sends no such messages."""
        return "two_sided"

    @property
    def serves_concurrently(self) -> bool:
        """False: the strategy has no server."""
        return False

    def copies(self, workers: int) -> Sequence[int]:
        """Return (): no weights must be averaged, because all workers have the same weights."""
        return ()

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> list[ServerPieces]:
        """Return [], because no server holds a part of the weights."""
        return []

    def hosts(self, workers: int) -> list[int]:
        """Return the rank of each worker, which equals the worker's number."""
        return list(range(workers))

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Return a worker's program for the virtual clock; in real time, `fit` trains instead."""
        weights, step, last = mark or (roles.weights, 0, False)
        compressor, algorithm = self.compressor, self._scheduled()
        while step < roles.steps * roles.epochs and not last:
            yield RestartPoint((weights, step, last))
            gradient = yield Compute(weights)
            mean = yield AllReduceAction(gradient, algorithm, compressor)
            weights = yield Update(mean.values)
            step, last = step + 1, mean.last
            if number == 0 and step % roles.steps == 0:
                yield Snapshot(step // roles.steps - 1, weights)

    def _scheduled(self) -> str:
        """Return the algorithm if the simulator has a schedule of it; otherwise return "ring"."""
        return self.algorithm if self.algorithm in ALLREDUCE else "ring"

    def forecast(self, query: Query) -> StepForecast:
        """Forecast a training step from the slowest rank's compute time and bucket exchanges."""
        from labkit.forecast.gradient_exchange import Exchanged

        plan = self.algorithm, self.schedule, self.bucket_bytes, self.compressor
        if query.virtual and self.algorithm == "auto":
            plan = (self._scheduled(), *plan[1:])
        return Exchanged(query, *plan).step_forecast()

    def train(self, session: Session) -> None:
        """Train by `model.fit` in real time, or by a program on the virtual clock."""
        if session.experiment.clock == "virtual":
            session.play(self)
            return
        from labkit.keras import DistributedOptimizer, Synchronize

        into_next = SCHEDULES[self.schedule].into_next
        if into_next and session.communicator.size > 1:
            self._train_by_priority(session)
            return
        optimizer = DistributedOptimizer(
            session.optimizer(),
            session.communicator,
            algorithm=self.algorithm,
            # A single rank exchanges nothing, so the order of exchanges does not matter.
            schedule="sequential" if into_next else self.schedule,
            bucket_bytes=self.bucket_bytes,
            compressor=self.compressor,
            seed=session.seed,
            guard=session.guard,
        )
        optimizer.exchange.watchers += session.watchers
        session.compile(optimizer)
        variables = session.model.variables
        optimizers = [(optimizer, session.model.trainable_variables)]
        session.keeps(
            TrainingState(variables, optimizers, remembers={"exchange": optimizer.exchange})
        )
        # With gradient accumulation, the optimizer changes its accumulator before the exchange, so
        # a failed exchange cannot be repeated.
        accumulates = optimizer.gradient_accumulation_steps is not None
        session.fit(
            [Synchronize(session.communicator)], None if accumulates else optimizer.exchange
        )

    def _train_by_priority(self, session: Session) -> None:
        from labkit.exchange import Exchange
        from labkit.exchange.priority import PriorityTraining
        from labkit.keras import Synchronize, check_compressor

        exchange = Exchange(
            session.communicator,
            self.algorithm,
            self.schedule,
            self.bucket_bytes,
            self.compressor,
            session.seed,
            guard=session.guard,
        )
        exchange.watchers += session.watchers
        optimizer = session.optimizer()
        refuse_optimizer(optimizer)
        if self.compressor is not None:
            check_compressor(self.compressor, optimizer)
        optimizer.exchange = exchange
        session.compile(optimizer)
        training = PriorityTraining(session.model, session.optimizer, exchange)
        layer_optimizers = zip(training.optimizers, training.variables, strict=True)
        session.keeps(
            TrainingState(
                session.model.variables,
                [(optimizer, ()), *layer_optimizers],
                remembers={"exchange": exchange},
                settle=training.update_all,
            )
        )
        session.fit([training, Synchronize(session.communicator)])
