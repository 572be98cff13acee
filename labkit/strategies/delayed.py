"""Delayed gradients: all modules (groups of layers) run their backward passes at the same time."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveInt

from labkit.forecast import Query, StepForecast, of_stages
from labkit.schedules.pipeline import ScheduleTable, delayed
from labkit.strategies.pipeline_rank import recorder
from labkit.strategies.staged import Staged
from labkit.strategies.strategy import Batch, ExperimentSpec, Session


class DelayedGradients(Staged):
    r"""Training without backward locking: no module waits for the backward pass of the next module.

    In iteration t, module k of K receives the error gradient from module k + 1, which computed it
    in iteration t - 1 for the batch of iteration \(j = t - K + k\). Module k then updates its
    weights by the following rule:

    \(w_k^{t+1} = w_k^t - \gamma \nabla_k f_j(w^j)\),

    where the gradient is computed at the weights of iteration j, which the module stored together
    with the activations of that iteration. The gradients of the last module have no delay; those of
    the first module have a delay of K - 1 iterations. A module uses its initial weights until it
    receives its first error gradient.

    Args:
        modules: The number K of modules of a replica; each module is on one rank, or is divided
            over several ranks.
            None: as many modules as the number of workers allows. The number of workers is a
                multiple of modules × tensor_parallel_size.
        tensor_parallel_size: The number of ranks that share each module, as in `Pipeline`.
        partition: How the layers are divided into modules. "parameters": the largest module has as
            few parameters as possible. "time": the slowest module takes as little time as possible;
            rank 0 measures the time of each undivided block. A tuple: the number of blocks of each
            module.

    Memory use, and the weights that callbacks see, are the same as for `Pipeline`, which describes
    them.

    If a backward pass takes twice as long as a forward pass, the speedup is at most 3/(1 + 2/K).

    Source: Z. Huo et al., Decoupled Parallel Backpropagation with Convergence Guarantee, 2018,
    arXiv 1804.10574. Differs from it: a module takes no optimizer step before its first error
    gradient arrives. The paper uses a zero gradient instead, which is the same for SGD. Gradients
    that are still on their way after the last iteration are not applied.
    """

    stages_field: ClassVar[str] = "modules"
    synchronization: ClassVar[tuple[str, ...]] = ("stale synchronous",)
    scheduling: ClassVar[tuple[str, ...]] = ("unlocked",)
    paper: ClassVar[str] = "Huo 2018, arXiv 1804.10574"
    unlocked: ClassVar[bool] = True
    # Checkpoints are impossible, because gradients are on their way between steps.
    resumable: ClassVar[bool] = False

    modules: PositiveInt | None = Field(None, kw_only=False)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput, before any rank starts, for conflicting options."""
        self.check_stages(experiment)

    def table(self, ranks: int, iterations: int = 1) -> ScheduleTable:
        """Return the pipeline schedule of one replica for a number of successive iterations."""
        return delayed(ranks, iterations)

    def forecast(self, query: Query) -> StepForecast:
        """Forecast a training step from the schedule, while all modules are busy."""
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
