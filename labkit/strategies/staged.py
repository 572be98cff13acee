"""What strategies that cut a model into stages have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveInt, field_validator

from labkit.common.errors import InvalidInput
from labkit.common.rows import cut as divided
from labkit.strategies.pipeline_rank import Cut, own_models, split, through
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
    refuse_given,
    refuse_in_parts,
    refuse_narrow,
    refuse_norms,
    refuse_remainder,
    refuse_shares,
)

if TYPE_CHECKING:
    import keras

    from labkit.common.canonical_json import JSON
    from labkit.communicator import Communicator
    from labkit.model_parallel.losses import Losses
    from labkit.model_parallel.stages import Blocks, Parts, Stage
    from labkit.schedules.pipeline import Table


class Staged(Strategy):
    """Contiguous layers on each rank, or on the slices of a stage; replicas share a batch.

    Ranks are replicas × stages × slices: rank (replica stages + stage) slices + slice. The ranks of
    one slice number in all stages of a replica are a lane, in which a batch moves from stage to
    stage; those of one stage are a group, which divides layers.
    """

    resumable: ClassVar[bool] = True
    called: ClassVar[str] = "stages"  # the field with the ranks of a lane
    architecture: ClassVar[tuple[str, ...]] = ("neighbours",)
    parallelism: ClassVar[tuple[str, ...]] = ("model by layers", "hybrid")
    unlocked: ClassVar[bool] = False  # whether stages go on without waiting for the step's end

    partition: str | tuple[PositiveInt, ...] = "parameters"
    slices: PositiveInt = 1

    @field_validator("partition")
    @classmethod
    def _partition(cls, value: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if isinstance(value, str) and value not in ("parameters", "time"):
            raise ValueError(
                f"partition={value!r} is not known; allowed: 'parameters', 'time', or a number of "
                "blocks for each stage"
            )
        return value

    def ranks(self, workers: int) -> int:
        """Of one lane: as many as asked for, or all that there are."""
        return getattr(self, self.called) or workers // self.slices

    def depth(self, workers: int) -> int:
        """Stages of one replica: one a rank, where the strategy does not say otherwise."""
        return self.ranks(workers)

    def cell(self, workers: int) -> Cell:
        """Several replicas divide the data, too, and slices divide stages."""
        cell = super().cell(workers)
        twice = self.slices > 1 or self.replicas(workers) > 1
        return cell._replace(parallelism="hybrid") if twice else cell

    def table(self, ranks: int, iterations: int = 1) -> Table:
        """The schedule of one replica; iterations: of a schedule that goes on from step to step."""
        raise NotImplementedError

    @property
    def parts(self) -> int:
        """Into which a replica's rows are divided, with a loss each; 1, if not said otherwise."""
        return 1

    def replicas(self, workers: int) -> int:
        """Models that share a batch."""
        return workers // (self.ranks(workers) * self.slices)

    def rows(self, batch_size: int, workers: int) -> int:
        """Of the largest batch that goes through a stage at a time."""
        return -(-batch_size // self.replicas(workers))

    def readers(self, communicator: Communicator) -> Communicator:
        """The ranks of one place in all replicas: they divide the batch among them."""
        ranks = self.ranks(communicator.size) * self.slices
        return communicator.split(communicator.rank % ranks)

    def colours(self, rank: int, workers: int) -> tuple[int, int]:
        """Which lane and which group a rank belongs to."""
        replica = rank // (self.ranks(workers) * self.slices)
        return replica * self.slices + rank % self.slices, rank // self.slices

    def check_stages(self, experiment: ExperimentSpec) -> None:
        """Refuse what no model in stages can do, or this one as far as it is known."""
        workers = experiment.workers
        refuse_in_parts(experiment)
        refuse_remainder("slices", self.slices, workers)
        ranks, stages = self.ranks(workers), self.depth(workers)
        whose = "workers" if self.slices == 1 else f"workers/slices={workers}/{self.slices}"
        refuse_remainder(self.called, ranks, workers // self.slices, whose)
        refuse_shares(experiment, "the stages of a pipeline", self.replicas(workers))
        if not isinstance(self.partition, str) and len(self.partition) != stages:
            raise InvalidInput(
                f"partition={list(self.partition)} is of {len(self.partition)} stages; give "
                f"{stages} numbers, one a stage"
            )
        if experiment.blocks is not None:
            self.check_blocks(experiment.blocks, workers)
        if self.slices > 1:
            refuse_narrow(self.slices, experiment, getattr(self, self.called) or 1)
        self.check_optimizer(experiment.optimizer, experiment.optimizer_options)

    def check_blocks(self, blocks: int, workers: int) -> None:
        """Refuse what a model of so many blocks, see `Question`, cannot do."""
        ranks, stages = self.ranks(workers), self.depth(workers)
        if stages > blocks:
            chunks, lane = stages // ranks, workers // self.slices
            fit = [n for n in range(1, ranks) if lane % n == 0 and n * chunks <= blocks]
            allowed = " or ".join(map(str, fit)) if fit else "none: give fewer chunks"
            given = f"{self.called}={ranks}" + (f" of chunks={chunks}" if chunks > 1 else "")
            raise InvalidInput(
                f"{given} is of {stages} stages with a block at least, but the model is a chain of "
                f"{blocks}; allowed with workers={workers}: {allowed}"
            )
        if not isinstance(self.partition, str) and sum(self.partition) != blocks:
            spare = divided(blocks - stages, self.partition)
            near = [1 + b - a for a, b in pairwise(spare)]
            raise InvalidInput(
                f"partition={list(self.partition)} is of {sum(self.partition)} blocks, the model "
                f"has {blocks}; give {stages} numbers from 1 that add up to it, such as {near}"
            )

    def check_optimizer(self, optimizer: str, options: Mapping[str, JSON]) -> None:
        """Refuse what needs gradients that no rank has.

        Args:
            optimizer: its name, in lower case.
            options: its arguments.
        """
        if self.slices > 1:
            refuse_norms(optimizer, options)
        given = options.get("global_clipnorm")
        if given is not None:
            raise InvalidInput(
                f"global_clipnorm={given} needs the gradients of all layers on one rank, but each "
                "rank has those of its own; use clipnorm (by variable) or clipvalue"
            )

    def edges(
        self, model: keras.Model, workers: int, seconds: Sequence[float] | None = None
    ) -> list[int]:
        """The blocks with which the stages of a model begin, and how many there are.

        Args:
            model: the whole one.
            workers: of all replicas.
            seconds: of each block, where they were measured; else parameters stand for them.
        """
        from labkit.model_parallel.stages import by_hand, by_parameters, cheapest

        blocks = self.blocks(model, workers)
        if not isinstance(self.partition, str):
            return by_hand(self.partition, len(blocks))
        if seconds is not None:
            return cheapest(seconds, self.depth(workers))
        each = blocks.split(range(len(blocks) + 1)).models
        return by_parameters([part.count_params() for part in each], self.depth(workers))

    def blocks(self, model: keras.Model, workers: int) -> Blocks:
        """The blocks of a model: where one tensor passes alone, if that makes enough of them.

        Else, or where a partition counts so many, they are its layers.
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
                    f"({', '.join(wide.shared())}) and all between them stand in one stage, which "
                    f"leaves {len(wide)}; give at most so many, or layers of their own"
                )
        self.check_blocks(len(blocks), workers)
        return blocks

    def predictor(self, model: keras.Model, replica: Communicator) -> Predictor:
        """Through the stages, one micro-batch behind the other.

        With partition="time" they are cut by parameters here: nobody has measured.
        """
        edges = self.edges(model, replica.size)
        parts = split(self.blocks(model, replica.size), edges)
        models = parts.models
        if self.slices == 1:
            return through(replica, parts, *own_models(models, replica))
        self._refuse_whole(models)

        def once(batches: Iterable[Batch]) -> Iterator[Predicted]:
            lane, group = (replica.split(c) for c in self.colours(replica.rank, replica.size))
            yield from through(lane, parts, *own_models(models, lane, group))(batches)
            group.close()
            lane.close()

        return once

    def serving(self, model: keras.Model, replica: Communicator) -> Serving | None:
        """The stages of this rank; of slices of stages it keeps the whole model."""
        from labkit.model_parallel.stages import INPUTS

        if self.slices > 1:
            return super().serving(model, replica)
        parts = split(self.blocks(model, replica.size), self.edges(model, replica.size))
        own, sliced = own_models(parts.models, replica)
        reads = any(source.stage == INPUTS for number in own for source in parts.takes[number])
        variables = [variable for part in own.values() for variable in part.variables]
        return Serving(through(replica, parts, own, sliced), reads, variables)

    def cut(
        self,
        session: Session,
        optimizer: keras.optimizers.Optimizer,
        recompute: bool = False,
        late: int = 1,
    ) -> Cut:
        """This rank's stages of the session's model, which is compiled with the optimizer.

        Args:
            session: of this rank.
            optimizer: of all its stages.
            recompute: as of `labkit.model_parallel.stages.Stage`.
            late: steps after which the stages keep as much as they ever will.
        """
        from labkit.communicator import computing
        from labkit.model_parallel.losses import Losses
        from labkit.model_parallel.stages import INPUTS, Ledger
        from labkit.model_parallel.weights import Whole

        self.check_optimizer(type(optimizer).__name__.lower(), norms(optimizer))
        refuse_given(optimizer)
        session.compile(optimizer)
        everyone, model = session.communicator, session.model
        lane, group = (session.part(c) for c in self.colours(everyone.rank, everyone.size))
        seconds: Any = None
        if self.partition == "time":
            seconds = session.once("seconds of blocks", lambda: self._seconds(session))
        edges = self.edges(model, everyone.size, seconds)
        blocks = self.blocks(model, everyone.size)
        parts = self.split(model, blocks, edges)
        models = parts.models
        self._refuse_whole(models)
        session.partition = blocks.described(edges, seconds)
        own, sliced = own_models(models, lane, group)
        ledger, stages = Ledger(late), {}
        losses = Losses(model, session.readers, self.parts)
        for number, part in own.items():
            loss = losses if number == len(models) - 1 else None
            read = [source.stage == INPUTS for source in parts.takes[number]]
            stages[number] = self.stage(part, loss, read, recompute)
            stages[number].ledger, stages[number].computing = ledger, computing(everyone)
        # The first slice of each stage in the first replica says what its weights are.
        owners = {rank * self.slices: models[rank :: lane.size] for rank in range(lane.size)}
        whole = Whole(model, owners, lane.rank * self.slices, everyone, sliced)
        watched = session.experiment.callbacks is not None
        return Cut(lane, stages, sliced, parts, edges, ledger, whole, watched, losses)

    def split(self, model: keras.Model, blocks: Blocks, edges: list[int]) -> Parts:
        """The stages of a model, as models that share its layers."""
        return split(blocks, edges)

    def stage(
        self, model: keras.Model, loss: Losses | None, read: Sequence[bool], recompute: bool
    ) -> Stage:
        """What trains a stage on its rank; arguments as of `labkit.model_parallel.stages.Stage`."""
        from labkit.model_parallel.stages import Stage

        return Stage(model, loss, recompute=recompute, read=read)

    def _refuse_whole(self, models: list[keras.Model]) -> None:
        """Refuse stages none of which has something to cut."""
        from labkit.model_parallel.tensor import refuse_whole

        if self.slices > 1:
            refuse_whole(models, self.slices)

    def _seconds(self, session: Session) -> list[float]:
        """Of each block, whole, on rank 0; the same for all: they must cut at the same places."""
        from labkit.model_parallel.stages import block_seconds

        found, workers = None, session.communicator.size
        if session.communicator.rank == 0:
            rows = self.rows(session.experiment.batch_size, workers)
            blocks = self.blocks(session.model, workers)
            found = block_seconds(session.model, rows, session.communicator.clock, blocks)
        return list(session.communicator.share(found, what="the seconds of the blocks"))
