"""Modules that go backward at the same time, each with an error gradient of some steps before."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveInt

from labkit.forecast import Query, StepForecast, of_stages
from labkit.schedules.pipeline import Table
from labkit.schedules.pipeline.delayed import delayed
from labkit.strategies.pipeline_rank import recorder
from labkit.strategies.staged import Staged
from labkit.strategies.strategy import Batch, ExperimentSpec, Session


class DelayedGradients(Staged):
    r"""Backward unlocked: no module waits for the backward of the one behind it.

    In iteration t module k of K has the error gradient that module k + 1 has computed in iteration
    t - 1, for the batch of iteration \(j = t - K + k\), and changes its weights by

    \(w_k^{t+1} = w_k^t - \gamma \nabla_k f_j(w^j)\),

    the gradient at the weights of that iteration, which are kept with its activations. The last
    module is never late, the first one by K - 1 iterations; until then it stays as it is.

    Args:
        modules: K of a replica, each on one rank or on its slices; None: as many as workers allow.
            Workers are a multiple of modules × slices.
        slices: ranks that share each module, as for `Pipeline`.
        partition: "parameters": the largest module has as few as can be; "time": the slowest module
            is as fast as can be, by the seconds of each block, uncut, on rank 0; or how many blocks
            each module has.

    What a rank holds and callbacks see is as for `Pipeline`.

    With a backward twice as long as the forward it is at most 3/(1 + 2/K) times as fast.

    Source: Z. Huo et al., Decoupled Parallel Backpropagation with Convergence Guarantee, 2018,
    arXiv 1804.10574. Differs from it: while the first error gradients are under way optimizers do
    not step (its gradient there is zero, which is the same for SGD); gradients that are under way
    after the last iteration are not applied.
    """

    called: ClassVar[str] = "modules"
    synchronization: ClassVar[tuple[str, ...]] = ("stale synchronous",)
    scheduling: ClassVar[tuple[str, ...]] = ("unlocked",)
    paper: ClassVar[str] = "Huo 2018, arXiv 1804.10574"
    unlocked: ClassVar[bool] = True
    resumable: ClassVar[bool] = False  # from each step to the next there are gradients under way

    modules: PositiveInt | None = Field(None, kw_only=False)

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what does not fit together, before any rank starts."""
        self.check_stages(experiment)

    def table(self, ranks: int, iterations: int = 1) -> Table:
        """The schedule of one replica through so many iterations."""
        return delayed(ranks, iterations)

    def forecast(self, asked: Query) -> StepForecast:
        """By its table, when all modules are under way."""
        return of_stages(asked, self, goes_on=True)

    def train(self, session: Session) -> None:
        """Forward in sequence, backward in parallel, an optimizer a module."""
        from labkit.model_parallel.stages import Delayed, Links, footprint

        optimizer, modules = session.optimizer(), self.ranks(session.communicator.size)
        cut = self.cut(session, optimizer, late=modules)
        (module,) = cut.own.values()
        links = Links(cut.lane, cut.inputs, cut.outputs, cut.parts.takes)
        delayed = Delayed(module, links, recorder(session.timeline), cut.losses)
        apply = cut.updater(session, optimizer)

        def step(x: Batch, y: Batch, weight: Batch | None) -> float | None:
            cut.begin()
            batch = cut.batch(x, y, weight)
            loss: float | None = delayed.step(batch, lambda: apply(delayed.rows))
            return loss if cut.first else None

        session.loop(step, cut.whole.collect, cut.predictor())
        delayed.finish()
        rows = self.rows(session.experiment.batch_size, session.communicator.size)
        expected = footprint.of_module(module.model, modules, cut.lane.rank, rows)
        cut.finish(session, optimizer, expected)
