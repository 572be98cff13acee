"""Delayed gradients: the modules of a model run their backward passes at the same time."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveInt

from labkit.forecast import Query, StepForecast, of_stages
from labkit.schedules.pipeline import ScheduleTable
from labkit.schedules.pipeline.delayed import delayed
from labkit.strategies.pipeline_rank import recorder
from labkit.strategies.staged import Staged
from labkit.strategies.strategy import Batch, ExperimentSpec, Session


class DelayedGradients(Staged):
    r"""Backward unlocking: no module waits for the backward pass of the next module.

    In iteration t module k of K receives the error gradient that module k + 1 has computed in
    iteration t - 1, for the batch of iteration \(j = t - K + k\). Module k then updates its weights
    by

    \(w_k^{t+1} = w_k^t - \gamma \nabla_k f_j(w^j)\),

    where the gradient is computed at the weights of iteration j, which are stored with the
    activations of that iteration. The last module's gradients have no delay, and the first module's
    gradients have a delay of K - 1 iterations. Until its first error gradient arrives, a module
    uses its initial weights.

    Args:
        modules: The number K of modules of a replica, each on one rank or sliced over several
            ranks;
            None: as many modules as the workers allow. The number of workers is a multiple of
                modules × tensor_parallel_size.
        tensor_parallel_size: The number of ranks that share each module, as in `Pipeline`.
        partition: How the model is cut into modules. "parameters": minimizes the parameter count of
            the largest module. "time": minimizes the time of the slowest module, from the seconds
            of each undivided block measured on rank 0. A tuple: the number of blocks of each
            module.

    `Pipeline` describes the memory use of ranks and the weights that callbacks see, which are the
    same here.

    If a backward pass takes twice as long as a forward pass, the speedup is at most 3/(1 + 2/K).

    Source: Z. Huo et al., Decoupled Parallel Backpropagation with Convergence Guarantee, 2018,
    arXiv 1804.10574. Differs from it: before the first error gradient arrives, a module's optimizer
    takes no step; the paper uses a zero gradient, which is the same for SGD. Gradients that are in
    transit after the last iteration are not applied.
    """

    stages_field: ClassVar[str] = "modules"
    synchronization: ClassVar[tuple[str, ...]] = ("stale synchronous",)
    scheduling: ClassVar[tuple[str, ...]] = ("unlocked",)
    paper: ClassVar[str] = "Huo 2018, arXiv 1804.10574"
    unlocked: ClassVar[bool] = True
    # No checkpoints, because gradients are in transit between steps.
    resumable: ClassVar[bool] = False

    modules: PositiveInt | None = Field(None, kw_only=False)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput, before any rank starts, for conflicting options."""
        self.check_stages(experiment)

    def table(self, ranks: int, iterations: int = 1) -> ScheduleTable:
        """Return the schedule of one replica for a number of successive iterations."""
        return delayed(ranks, iterations)

    def forecast(self, query: Query) -> StepForecast:
        """Forecast a step from the schedule, in a phase in which all modules are active."""
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
