"""What all strategies with servers share: who holds what, and what workers do."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from labkit.common.errors import InvalidInput
from labkit.communicator import Transport
from labkit.compression import Compressor, Nested
from labkit.forecast import Query, StepForecast, of_program
from labkit.forecast.worker_sampling import PLAYED, Crowd, shapes_of
from labkit.programs import (
    Code,
    CodecChannel,
    Compute,
    Drop,
    Mark,
    Message,
    Parts,
    Program,
    Receive,
    Roles,
    Send,
    Snapshot,
    Update,
    passing,
    placed,
    whole,
)
from labkit.programs.actions import Action, Gradient, Vector
from labkit.schedules.grid import Grid, check_fit
from labkit.strategies.strategy import ExperimentSpec, Session, Strategy
from labkit.strategies.taxonomy import Cell
from labkit.strategies.validation import (
    OPTIMIZERS,
    Given,
    one_of,
    refuse_in_parts,
    refuse_norms,
    rows_and_columns,
)


class Servers(Strategy):
    """Servers hold the weights and the optimizer; workers push gradients, and get new weights.

    What servers do with gradients, and when they answer, is said by those that derive from this
    one. Moving statistics of layers are kept by each worker, and the model keeps those of worker 0.

    Args:
        servers: how many hold weights.
        colocated: servers share the ranks, and the links, of the first workers; else they have
            ranks of their own, behind those of the workers.
        placement: which server holds which tensor: "round_robin" and "greedy" by TensorFlow's
            rules; "sharded" cuts the flat weights into equal stretches.
        transport: on ranks, "two_sided" sends and receives; "one_sided" puts messages into memory
            that their reader has set aside, who takes no part; "one_sided_dynamic" leaves them in
            the sender's and tells their reader where, who fetches them. On the virtual clock all
            are flows.
        optimizer: of the servers, by its Keras name, at the experiment's rate; None: the
            experiment's.
        compressor: how workers and servers say less, in both directions: gradients through it,
            weights as differences from what the worker has by now, see `programs.CodecChannel`;
            one of `labkit.compression.COMPRESSORS`, its name, or None.
        stages: each worker is a replica of so many places with some of the layers each, between
            which one tensor passes; cut so that the largest has as few parameters as can be. Each
            pushes and fetches its own part, and servers take those of a replica together.
        grid: each worker is a replica over so many rows and columns of places, which compute tiles
            of its layers, and units of Dense ones, as machines of `LocallyConnected` do. Each
            pushes and fetches its own part; kernels of a Conv2D are those of the first, which hands
            them to the others and adds up their gradients. Not together with stages.
    """

    architecture: ClassVar[tuple[str, ...]] = ("parameter servers",)
    parallelism: ClassVar[tuple[str, ...]] = ("data", "hybrid")

    servers: PositiveInt = Field(1, le=1_000)
    colocated: bool = False
    placement: Literal["round_robin", "greedy", "sharded"] = "round_robin"
    transport: Transport = "two_sided"
    optimizer: str | None = None
    compressor: Nested | None = None
    stages: PositiveInt = 1
    grid: tuple[PositiveInt, PositiveInt] | None = None

    @classmethod
    def incompatibility(cls, compressor: Compressor) -> str:
        """What servers and workers cannot say to each other."""
        return compressor.unsupported_reason()

    @classmethod
    def combines(cls, cell: Cell) -> bool:
        """Parts of a worker say all."""
        return cell.parallelism == "data" or cell.compression == "none"

    def cell(self, workers: int) -> Cell:
        """Whether workers are cut, too."""
        cell = super().cell(workers)
        return cell if self.replica_cut == 1 else cell._replace(parallelism="hybrid")

    @property
    def plays(self) -> bool:
        """It is a program."""
        return True

    def optimizer_of(self, experiment: ExperimentSpec) -> str:
        """That of the servers."""
        return self.optimizer or experiment.optimizer

    @property
    def serves_concurrently(self) -> bool:
        """Whether a server answers others while the worker beside it computes."""
        return True

    @property
    def replica_cut(self) -> int | Grid:
        """As the fields say."""
        return self.stages if self.grid in (None, (1, 1)) else self.grid

    def copies(self, workers: int) -> Sequence[int]:
        """Servers hold parts of the same weights."""
        return ()

    def extra_ranks(self, workers: int) -> int:
        """Ranks of servers that compute no gradients, and of the other members of workers."""
        return (0 if self.colocated else self.servers) + workers * self._others

    def places(self, worker: int, workers: int) -> list[int]:
        """Those of its stages, or of the machines of its grid; the last one has the loss."""
        first = workers + self.extra_ranks(0) + worker * self._others
        return [*range(first, first + self._others), worker]

    @property
    def _others(self) -> int:
        return (prod(self.grid) if self.grid else self.stages) - 1

    def rows(self, batch_size: int, workers: int) -> int:
        """Rows of a worker's part of the batch."""
        return -(-batch_size // workers)

    def tolerated_failures(self, workers: int) -> int:
        """All but one, where nobody waits for another."""
        return workers - 1

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what servers cannot do, before any rank starts."""
        workers, options = experiment.workers, experiment.optimizer_options
        refuse_in_parts(experiment)
        if experiment.optimizer_options and self.optimizer is not None:
            raise InvalidInput(
                "optimizer_options are those of the experiment's optimizer, but the servers have "
                f"optimizer={self.optimizer!r}; leave one of both out"
            )
        if self.colocated and self.servers > workers:
            raise InvalidInput(
                f"servers={self.servers} with colocated=True stand on the ranks of "
                f"workers={workers}; allowed: 1 to {workers}, or colocated=False"
            )
        if self.colocated and (hit := [w for w in experiment.gone if w < self.servers]):
            raise InvalidInput(
                f"lost={hit} stand at the places of servers={self.servers}, whose weights would be "
                "lost with them; give other workers, or colocated=False"
            )
        if self.compressor is not None:
            self._refuse_unsaid(self.compressor)
        if self._others or self.grid:
            self._check_cut(experiment)
        if experiment.feed == "scatter":
            raise InvalidInput("feed='scatter' does not know servers; use feed='shard'")
        optimizer = self.optimizer_of(experiment)
        if self.placement == "sharded" and self.servers > 1:
            refuse_norms(optimizer, options, part="server")
        elif self.servers > 1 and options.get("global_clipnorm") is not None:
            raise InvalidInput(
                f"global_clipnorm={options['global_clipnorm']} needs the norm of all gradients, "
                "but each server has some of them; use clipnorm, or servers=1"
            )

    def _refuse_unsaid(self, compressor: Compressor) -> None:
        if why := self.incompatibility(compressor):
            raise InvalidInput(
                f"compressor={type(compressor).__name__} {why}; use "
                "ErrorFeedback(TopK(ratio=0.01)), QSGD(levels=127), Float16, …, or AllReduce"
            )

    def _check_cut(self, experiment: ExperimentSpec) -> None:
        cut, whole = f"stages={self.stages}", "give stages=1"
        if self.grid:
            cut, whole = f"grid={self.grid}", "leave grid out"
            self._check_grid(self.grid, experiment)
        elif (blocks := experiment.blocks) is not None and self.stages > blocks:
            raise InvalidInput(
                f"{cut} have a block at least, but the model is a chain of {blocks}; allowed: 1 to "
                f"{blocks}"
            )
        if self.compressor is not None or self.transport != "two_sided":
            one_sided = f"transport={self.transport!r}"
            given = "a compressor" if self.transport == "two_sided" else one_sided
            raise InvalidInput(
                f"{cut} with {given}, which knows the weights of whole workers; leave it out, or "
                f"{whole}"
            )

    def _check_grid(self, grid: Grid, experiment: ExperimentSpec) -> None:
        if self.stages > 1:
            raise InvalidInput(
                f"grid={grid} with stages={self.stages} cuts a replica twice; give one of both"
            )
        if experiment.precision.startswith("mixed"):
            raise InvalidInput(
                f"grid={grid} with precision={experiment.precision!r}: what crosses between "
                "machines is of the type of the weights; use precision='float32' or 'float64'"
            )
        check_fit(grid, None, experiment.planes or ())

    @field_validator("grid", mode="before")
    @classmethod
    def _grid(cls, value: Given) -> Given:
        return rows_and_columns(value)

    @field_validator("optimizer")
    @classmethod
    def _optimizer(cls, value: str | None) -> str | None:
        if value is not None:
            one_of("optimizer", value, OPTIMIZERS)
        return value

    def train(self, session: Session) -> None:
        """Play the programs of workers and servers."""
        session.play(self)

    # --- a forecast ---------------------------------------------------------------------------

    @property
    def cycle(self) -> int:
        """Steps of a worker after which what it exchanges begins anew."""
        return 1

    def recurs(self, experiment: ExperimentSpec) -> bool:
        """Where each update waits for all."""
        workers = experiment.workers
        return self.cell(workers).synchronization == "synchronous" and not self.tolerated_failures(
            workers
        )

    def forecast(self, asked: Query) -> StepForecast:
        """By playing its programs; of many workers with a few, whose servers have as much to do."""
        return of_program(asked, self, self.cycle, self._crowd(asked))

    def _crowd(self, asked: Query) -> Crowd | None:
        """Fewer workers, and as many servers, if they stand beside workers, in proportion.

        The load is that of the fullest server.
        """
        if asked.workers <= PLAYED and asked.workers * self.servers <= 2 * PLAYED:
            return None
        most = PLAYED if self.servers < PLAYED or not self.colocated else PLAYED // 2
        few = min(asked.workers, most)
        shapes, scale = shapes_of(asked), few / asked.workers
        count = max(1, min(few, round(self.servers * scale))) if self.colocated else 1
        fullest = max(part.size for part in self.parts(shapes)) / sum(map(prod, shapes))
        fields = {"servers": count, "placement": "sharded", **self._fewer(scale)}
        return Crowd(self.model_copy(update=fields), few, fullest * count / scale)

    def _fewer(self, scale: float) -> dict[str, Any]:
        """Fields that count workers, for so many times as many."""
        return {}

    # --- the programs ------------------------------------------------------------------------

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> list[Parts]:
        """What each server holds."""
        return placed(shapes, self.servers, self.placement)

    def hosts(self, workers: int) -> list[int]:
        """The place of each worker, of each server, then of the other members of workers."""
        first = 0 if self.colocated else workers
        others = [place for worker in range(workers) for place in self.places(worker, workers)[:-1]]
        return [*range(workers), *range(first, first + self.servers), *others]

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """What this one does, from its begin or from a mark that it has set."""
        does = self.serve if number in roles.servers else self.work
        if not roles.cut:
            return does(roles, number, mark)
        if number in roles.servers:
            return whole(partial(does, roles, number), roles, number, mark)
        own = roles.of_member(roles.place(number).member)
        return passing(partial(does, own, number), roles, number, mark)

    def begins(
        self, roles: Roles, number: int
    ) -> tuple[Vector, dict[int, int], dict[int, CodecChannel]]:
        """A worker's weights, their versions and its ends of what is said, by server."""
        talks = {
            server: CodecChannel(self.compressor, roles, number, server) for server in roles.servers
        }
        return roles.weights, dict.fromkeys(roles.servers, 0), talks

    def talks(self, roles: Roles, server: int) -> list[CodecChannel]:
        """A server's ends of what it says to each worker."""
        return [
            CodecChannel(self.compressor, roles, worker, server) for worker in range(roles.workers)
        ]

    def serve(self, roles: Roles, number: int, mark: Any) -> Program:
        """What a server does."""
        raise NotImplementedError(f"{type(self).__name__} does not say what a server does")

    def work(self, roles: Roles, number: int, mark: Any) -> Program:
        """What a worker does: compute, push, wait for the weights of all servers."""
        over = False
        weights, versions, talks = mark or self.begins(roles, number)
        while not over:
            yield Mark((weights, versions, talks))
            yield from pushed(roles, talks, versions, number, (yield Compute(weights)))
            weights, over = yield from fetched(roles, talks, versions)
        for server in roles.servers:
            yield Send(server, Message(number))  # nothing more will come


def pushed(
    roles: Roles,
    talks: Mapping[int, CodecChannel],
    versions: Mapping[int, int],
    number: int,
    found: Gradient,
) -> Generator[Action, Any, None]:
    """A worker's gradient on its way to all servers; who waits for answers keeps none of it."""
    about = found.rows, found.step, found.last
    for server in roles.servers:
        said = yield Code(partial(talks[server].push, roles.part(server).take(found.values)))
        yield Send(server, Message(number, said, versions[server], *about))


def fetched(
    roles: Roles, talks: Mapping[int, CodecChannel], versions: dict[int, int]
) -> Generator[Action, Any, tuple[Vector, bool]]:
    """The weights that all servers answer with, and whether there is no more to do.

    Args:
        roles: who there is.
        talks: a worker's ends, by server.
        versions: of the weights that it has; they become those of the answers.
    """
    parts: dict[int, Vector] = {}
    over = False
    for server in roles.servers:
        answer = yield Receive(server)
        parts[server] = yield Code(partial(talks[server].answered, answer.values))
        versions[server] = answer.version
        over = over or answer.ends
    return roles.whole(parts), over


def aggregate(
    roles: Roles, number: int, mark: Any, talks: Sequence[CodecChannel], backups: int = 0
) -> Program:
    """A server of whose updates each waits for the gradients of one clock, but for the slowest."""
    weights, total = roles.part(number).take(roles.weights), roles.steps * roles.epochs
    clock, last, here, gone = 0, False, list[Message](), 0
    if mark is not None:
        weights, total, clock, last, here, gone, talks = mark
    while gone < roles.workers:
        yield Mark((weights, total, clock, last, here, gone, talks))
        push = yield Receive()
        if push.values is None:
            gone += 1
            continue
        last = last or push.ends
        if push.version < clock:
            yield Drop(push)
            said = yield Code(partial(talks[push.source].answer, weights))
            answer = Message(number, said, clock, ends=clock == total)
            yield Send(push.source, answer, answers=push)
            continue
        gradient = yield Code(partial(talks[push.source].pushed, push.values))
        here.append(replace(push, values=gradient))
        if len(here) < roles.workers - backups:
            continue
        here.sort(key=lambda message: message.source)
        weights = yield Update(mean(here, [push.rows for push in here]), tuple(here))
        clock += 1
        total = clock if last and number == roles.lead else total
        for each in here:
            ends = number == roles.lead and clock == total
            said = yield Code(partial(talks[each.source].answer, weights))
            yield Send(each.source, Message(number, said, clock, ends=ends), answers=each)
        here = []
        if clock % roles.steps == 0:
            yield Snapshot(clock // roles.steps - 1, weights)


def mean(pushes: Sequence[Message], shares: Sequence[float]) -> Vector:
    """The mean of gradients, each by its share; the first ones first."""
    values = [push.values for push in pushes if push.values is not None]
    if len(values) == 1:
        return values[0]
    total = sum(shares) or 1
    found: Vector = values[0] * values[0].dtype.type(shares[0] / total)
    for value, share in zip(values[1:], shares[1:], strict=True):
        found += value * value.dtype.type(share / total)
    return found
