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
from labkit.programs import AllReduce as Meet
from labkit.programs import Compute, Mark, Parts, Program, Roles, Snapshot, Update
from labkit.schedules import ALLREDUCE
from labkit.strategies.strategy import ExperimentSpec, Session, Strategy, TrainingState
from labkit.strategies.taxonomy import Cell
from labkit.strategies.validation import one_of, refuse_around, refuse_given, refuse_in_parts

if TYPE_CHECKING:
    from labkit.forecast import Query, StepForecast


class AllReduce(Strategy):
    r"""Replicas on all ranks, gradients averaged by an allreduce in every step.

    \(\bar g = \frac{1}{B} \sum_r b_r g_r\): the same step as one process takes on the global batch
    of \(B = \sum_r b_r\) samples.

    Args:
        algorithm: how the buffers are summed: a name of `labkit.schedules.ALLREDUCE`, "mpi" (the
            library's own choice), "shared_memory" (ranks of one host), or "auto": what is
            fastest here, by measurement.
        schedule: when buckets travel: "sequential", after backpropagation; "overlap", while it
            goes on, unless ranks of one host compute on all of its cores; "priority", front layers
            first and into the next step; "staggered", one after the other where ranks share a link.
        bucket_bytes: how much travels together; a number, or such as "4MiB".
        compressor: how gradients are said in fewer bytes: one of `labkit.compression.COMPRESSORS`,
            its name, or None. Linear ones are summed on the way, sparse ones merged, others
            gathered, by the algorithm that is named.
        microscope: look at every so many-th step's gradients before and after; 0: never.

    Source: A. Vishnu, C. Siegel, J. Daily: Distributed TensorFlow with MPI, 2016, arXiv 1603.02339.
    Differs from it: the first code averaged weights once an epoch; here gradients are averaged in
    every step, as its later versions do.
    """

    scheduling: ClassVar[tuple[str, ...]] = tuple(SCHEDULES)
    normalizes_globally: ClassVar[bool] = True
    resumable: ClassVar[bool] = True
    paper: ClassVar[str] = "Vishnu 2016, arXiv 1603.02339"

    algorithm: str = Field("auto", kw_only=False)
    schedule: str = "sequential"
    bucket_bytes: Bytes = BUCKET_BYTES
    compressor: Nested | None = None
    microscope: int = Field(default=0, ge=0)

    @property
    def exact(self) -> bool:
        """As long as nothing is left out."""
        return self.compressor is None

    @property
    def lossy(self) -> Compressor | None:
        """The compressor."""
        return self.compressor

    def keeps_optimizer(self, experiment: ExperimentSpec) -> bool:
        """Unless layers have optimizers of their own, or the one process a program."""
        return experiment.clock == "wall" and not SCHEDULES[self.schedule].into_next

    def cell(self, workers: int) -> Cell:
        """As the schedule of the exchange says."""
        return super().cell(workers)._replace(scheduling=self.schedule)

    @property
    def outlives(self) -> bool:
        """Where each step is taken whole, by all that live."""
        return not SCHEDULES[self.schedule].into_next

    @property
    def stats_interval(self) -> int:
        """The steps from one look of the microscope to the next."""
        return self.microscope

    def rows(self, batch_size: int, workers: int) -> int:
        """Rows of a rank's part of the batch, the largest where they differ by one."""
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
        """An emulated network needs messages that labkit sends; a compressor may refuse too."""
        refuse_unmetered(self.algorithm, experiment.network)
        if experiment.clock == "virtual":
            self._check_virtual(experiment)
        schedule = SCHEDULES[self.schedule]
        if schedule.into_next:  # layers take steps of their own
            refuse_around(experiment.optimizer_options)
        if (
            self.compressor is not None
            and not schedule.after
            and experiment.precision == "mixed_float16"
        ):
            raise InvalidInput(
                f"schedule={self.schedule!r} with a compressor and precision='mixed_float16': what "
                "was sent of a step that is then skipped for an overflow is lost; use "
                "schedule='sequential', or precision='mixed_bfloat16'"
            )
        if self.compressor is not None:
            self.compressor.check(experiment.optimizer, experiment.optimizer_options)
        elif self.microscope:
            raise InvalidInput(
                f"microscope={self.microscope} without a compressor has nothing to look at; "
                "give compressor=…, or microscope=0"
            )

    def _check_virtual(self, experiment: ExperimentSpec) -> None:
        refuse_in_parts(experiment)
        if self.schedule != "sequential":
            raise InvalidInput(
                f"schedule={self.schedule!r} hides messages behind computation, layer by layer, "
                "which clock='virtual' does not take apart; use schedule='sequential'"
            )
        if self.microscope:
            raise InvalidInput(
                f"microscope={self.microscope} looks at ranks, of which clock='virtual' has none; "
                "use microscope=0"
            )
        if self.algorithm != "auto" and self.algorithm not in ALLREDUCE:
            raise InvalidInput(
                f"algorithm={self.algorithm!r} has no schedule whose time could be modelled; "
                f"allowed on clock='virtual': {', '.join(ALLREDUCE)}, or 'auto', the ring"
            )

    @property
    def transport(self) -> Transport:
        """There is nothing to send."""
        return "two_sided"

    @property
    def serves_concurrently(self) -> bool:
        """There is no server."""
        return False

    def copies(self, workers: int) -> Sequence[int]:
        """All workers take the same step."""
        return ()

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> list[Parts]:
        """No server holds anything."""
        return []

    def hosts(self, workers: int) -> list[int]:
        """Each worker has a place of its own."""
        return list(range(workers))

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """What a worker does on the virtual clock; on the wall clock `fit` does the same."""
        weights, step, last = mark or (roles.weights, 0, False)
        compressor, algorithm = self.compressor, self._scheduled()
        while step < roles.steps * roles.epochs and not last:
            yield Mark((weights, step, last))
            found = yield Compute(weights)
            mean = yield Meet(found, algorithm, compressor)
            weights = yield Update(mean.values)
            step, last = step + 1, mean.last
            if number == 0 and step % roles.steps == 0:
                yield Snapshot(step // roles.steps - 1, weights)

    def _scheduled(self) -> str:
        """An algorithm with a schedule that the simulator can carry out."""
        return self.algorithm if self.algorithm in ALLREDUCE else "ring"

    def forecast(self, asked: Query) -> StepForecast:
        """Its buckets on a line, beside or behind the backward pass of the slowest rank."""
        from labkit.forecast.gradient_exchange import Exchanged

        plan = self.algorithm, self.schedule, self.bucket_bytes, self.compressor
        if asked.virtual and self.algorithm == "auto":
            plan = (self._scheduled(), *plan[1:])
        return Exchanged(asked, *plan).taken()

    def train(self, session: Session) -> None:
        """`model.fit` with the exchange inside the optimizer; on the virtual clock a program."""
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
            # One rank alone has nothing to wait for, front layers first or not.
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
        # With gradients that wait for others, a part of a step is taken before the ranks meet.
        added_up = optimizer.gradient_accumulation_steps is not None
        session.fit([Synchronize(session.communicator)], None if added_up else optimizer.exchange)

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
        refuse_given(optimizer)
        if self.compressor is not None:
            check_compressor(self.compressor, optimizer)
        optimizer.exchange = exchange
        session.compile(optimizer)
        training = PriorityTraining(session.model, session.optimizer, exchange)
        own = zip(training.optimizers, training.variables, strict=True)
        session.keeps(
            TrainingState(
                session.model.variables,
                [(optimizer, ()), *own],
                remembers={"exchange": exchange},
                settle=training.update_all,
            )
        )
        session.fit([training, Synchronize(session.communicator)])
