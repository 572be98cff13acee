"""The base class of strategies with parameter servers, their programs, and their work quotas."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from labkit.common.errors import InvalidInput
from labkit.common.state import record
from labkit.communicator import Transport
from labkit.compression import Compressor, Nested
from labkit.forecast import Query, StepForecast, of_program
from labkit.forecast.workers import PLAYED, Crowd, shapes_of
from labkit.programs import (
    Code,
    CodecChannel,
    Compute,
    Drop,
    Message,
    Program,
    Receive,
    RestartPoint,
    Roles,
    Send,
    ServerPieces,
    Snapshot,
    Update,
    passing,
    placed,
    whole_replica_program,
)
from labkit.programs.actions import Action, Gradient, Vector
from labkit.schedules.grid_layers import Grid, validate_grid
from labkit.strategies.strategy import ExperimentSpec, Session, Strategy
from labkit.strategies.taxonomy import Cell
from labkit.strategies.validation import (
    OPTIMIZERS,
    GridValue,
    one_of,
    refuse_keras_step_options,
    refuse_norms,
    rows_and_columns,
)


class Servers(Strategy):
    """Servers store weights and optimizer; workers push gradients and receive new weights.

    Subclasses define how servers apply gradients, and when servers answer. Each worker has its own
    moving statistics of normalization layers; the final model has those of worker 0.

    Args:
        servers: The number of servers that store the weights.
        colocated: Whether servers run on the ranks of the first workers and share their links.
            If `colocated` is False, the ranks of servers follow those of workers.
        placement: How tensors are assigned to servers. "round_robin" and "greedy" follow
            TensorFlow's rules; "sharded" cuts the flat weights into equal ranges.
        transport: How messages travel between ranks. "two_sided": a send with a matching receive.
            "one_sided": the sender puts messages into a memory window of the receiver, which need
            not take part. "one_sided_dynamic": messages stay in the memory of the sender. The
            sender announces an offset, and the receiver reads at the offset. On the virtual clock,
            the simulation of all three transports is the same: messages flow over links.
        optimizer: The Keras name of the servers' optimizer, which uses the experiment's learning
            rate. If `optimizer` is None, the servers use the experiment's optimizer.
        compressor: The compressor for both directions, its name in
            `labkit.compression.COMPRESSORS`, or None. The compressor is used for gradients, and for
            weights as differences from the worker's current weights (`programs.CodecChannel`).
        stages: The number of pipeline stages into which each worker's model is cut. One tensor
            passes between neighbouring stages. The cuts are chosen so that the largest stage has as
            few parameters as possible. Each stage pushes the gradients and fetches the weights of
            its own layers. Servers apply the gradients of all stages of a worker together.
        grid: The rows and columns of the grid of machines that form one worker. The machines divide
            layers into tiles, and Dense layers into units, as in `SpatialParallel`. Each machine
            pushes the gradients and fetches the weights of its own tiles and units. The first
            machine stores the kernels of a Conv2D layer. The first machine sends the kernels to the
            other machines, and sums their gradients. A grid cannot be combined with stages.
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
        """Return the reason why this strategy does not work with the compressor; "" if it works."""
        return compressor.unsupported_reason()

    @classmethod
    def supports(cls, cell: Cell) -> bool:
        """Return whether a place in the taxonomy has undivided models or no compression."""
        return cell.parallelism == "data" or cell.compression == "none"

    def cell(self, workers: int) -> Cell:
        """Return the strategy's place in the taxonomy of training methods."""
        cell = super().cell(workers)
        return cell if self.replica_cut == 1 else cell._replace(parallelism="hybrid")

    @property
    def uses_programs(self) -> bool:
        """True: servers and workers run as programs, on the wall clock and the virtual clock."""
        return True

    def optimizer_of(self, experiment: ExperimentSpec) -> str:
        """Return the name of the servers' optimizer."""
        return self.optimizer or experiment.optimizer

    @property
    def serves_concurrently(self) -> bool:
        """Whether a server answers messages while the worker on the same rank computes."""
        return True

    @property
    def replica_cut(self) -> int | Grid:
        """The grid of machines that form one worker, or the worker's number of pipeline stages."""
        return self.stages if self.grid in (None, (1, 1)) else self.grid

    def copies(self, workers: int) -> Sequence[int]:
        """Return (): no weights are averaged, because each server stores different weights."""
        return ()

    def extra_ranks(self, workers: int) -> int:
        """Return the number of ranks beyond one per worker (servers, stages or machines)."""
        return (0 if self.colocated else self.servers) + workers * self._extra_members

    def places(self, worker: int, workers: int) -> list[int]:
        """Return the ranks of a worker's stages or machines; the last of them computes the loss."""
        first = workers + self.extra_ranks(0) + worker * self._extra_members
        return [*range(first, first + self._extra_members), worker]

    @property
    def _extra_members(self) -> int:
        return (prod(self.grid) if self.grid else self.stages) - 1

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the largest number of rows of a batch that one worker processes."""
        return -(-batch_size // workers)

    def tolerated_failures(self, workers: int) -> int:
        """Return how many workers may fail: all but one, as no worker waits for another."""
        return workers - 1

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for options that servers do not support, before any rank starts."""
        workers, options = experiment.workers, experiment.optimizer_options
        refuse_keras_step_options(experiment)
        if experiment.optimizer_options and self.optimizer is not None:
            raise InvalidInput(
                "optimizer_options belong to the experiment's optimizer, but the servers have "
                f"optimizer={self.optimizer!r}; remove one of the two"
            )
        if self.colocated and self.servers > workers:
            raise InvalidInput(
                f"servers={self.servers} with colocated=True exceeds workers={workers}, whose "
                f"ranks run the servers; allowed: 1 to {workers}, or colocated=False"
            )
        if self.colocated and (hit := [w for w in experiment.failed_workers if w < self.servers]):
            raise InvalidInput(
                f"worker_failures={hit} share ranks with servers={self.servers}, so the servers' "
                "weights would also be lost; give other workers, or colocated=False"
            )
        if self.compressor is not None:
            self._refuse_compressor(self.compressor)
        if self._extra_members or self.grid:
            self._check_cut(experiment)
        if experiment.input_mode == "scatter":
            raise InvalidInput(
                "input_mode='scatter' does not support servers; use input_mode='shard'"
            )
        optimizer = self.optimizer_of(experiment)
        if self.placement == "sharded" and self.servers > 1:
            refuse_norms(optimizer, options, part="server")
        elif self.servers > 1 and options.get("global_clipnorm") is not None:
            raise InvalidInput(
                f"global_clipnorm={options['global_clipnorm']} needs the norm of all "
                "gradients, but each server holds some of them; use clipnorm, or servers=1"
            )

    def _refuse_compressor(self, compressor: Compressor) -> None:
        if reason := self.incompatibility(compressor):
            raise InvalidInput(
                f"compressor={type(compressor).__name__} {reason}; use "
                "ErrorFeedback(TopK(ratio=0.01)), QSGD(levels=127), Float16, …, or AllReduce"
            )

    def _check_cut(self, experiment: ExperimentSpec) -> None:
        cut, whole = f"stages={self.stages}", "give stages=1"
        if self.grid:
            cut, whole = f"grid={self.grid}", "leave grid out"
            self._check_grid(self.grid, experiment)
        elif (blocks := experiment.blocks) is not None and self.stages > blocks:
            raise InvalidInput(
                f"{cut} need at least one block each, but the model is a chain of {blocks} "
                f"blocks; allowed: 1 to {blocks}"
            )
        if self.compressor is not None or self.transport != "two_sided":
            one_sided = f"transport={self.transport!r}"
            option = "a compressor" if self.transport == "two_sided" else one_sided
            raise InvalidInput(
                f"{cut} does not support {option}, because each worker's weights are divided; "
                f"remove it, or {whole}"
            )

    def _check_grid(self, grid: Grid, experiment: ExperimentSpec) -> None:
        if self.stages > 1:
            raise InvalidInput(
                f"grid={grid} with stages={self.stages} divides a replica in two ways; give "
                "only one of them"
            )
        if experiment.precision.startswith("mixed"):
            raise InvalidInput(
                f"grid={grid} with precision={experiment.precision!r}: messages between "
                "machines have the dtype of the weights; use precision='float32' or 'float64'"
            )
        validate_grid(grid, None, experiment.grid_layers or ())

    @field_validator("grid", mode="before")
    @classmethod
    def _grid(cls, value: GridValue) -> GridValue:
        return rows_and_columns(value)

    @field_validator("optimizer")
    @classmethod
    def _optimizer(cls, value: str | None) -> str | None:
        if value is not None:
            one_of("optimizer", value, OPTIMIZERS)
        return value

    def train(self, session: Session) -> None:
        """Train by running the programs of workers and servers."""
        session.play(self)

    # --- a forecast ---------------------------------------------------------------------------

    @property
    def cycle(self) -> int:
        """The number of training steps after which a worker's message pattern repeats."""
        return 1

    def recurs(self, experiment: ExperimentSpec) -> bool:
        """Return whether the communication of the workers repeats."""
        workers = experiment.workers
        return self.cell(workers).synchronization == "synchronous" and not self.tolerated_failures(
            workers
        )

    def forecast(self, query: Query) -> StepForecast:
        """Forecast a step by simulation of the programs; a sample stands for many workers."""
        return of_program(query, self, self.cycle, self._crowd(query))

    def _crowd(self, query: Query) -> Crowd | None:
        """Return a sample of workers with the same load per server, or None for few workers.

        If servers are colocated, the sample has about the same ratio of servers to workers as the
        experiment. In the simulation, every server has the load of the server with the most
        weights.
        """
        if query.workers <= PLAYED and query.workers * self.servers <= 2 * PLAYED:
            return None
        limit = PLAYED if self.servers < PLAYED or not self.colocated else PLAYED // 2
        sample = min(query.workers, limit)
        shapes, scale = shapes_of(query), sample / query.workers
        count = max(1, min(sample, round(self.servers * scale))) if self.colocated else 1
        fullest = max(part.size for part in self.parts(shapes)) / sum(map(prod, shapes))
        fields = {"servers": count, "placement": "sharded", **self._scaled_fields(scale)}
        return Crowd(self.model_copy(update=fields), sample, fullest * count / scale)

    def _scaled_fields(self, scale: float) -> dict[str, Any]:
        """Return the fields that depend on the number of workers, with values for the sample."""
        return {}

    # --- the programs ------------------------------------------------------------------------

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> list[ServerPieces]:
        """Return for each server the part of the weights that it holds."""
        return placed(shapes, self.servers, self.placement)

    def hosts(self, workers: int) -> list[int]:
        """Return the ranks of workers, servers, and workers' additional stages or machines."""
        first = 0 if self.colocated else workers
        others = [place for worker in range(workers) for place in self.places(worker, workers)[:-1]]
        return [*range(workers), *range(first, first + self.servers), *others]

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Return the program of one process, from its start or from the restart point `mark`."""
        program = self.serve if number in roles.servers else self.work
        if not roles.cut:
            return program(roles, number, mark)
        if number in roles.servers:
            return whole_replica_program(partial(program, roles, number), roles, number, mark)
        member_roles = roles.of_member(roles.place(number).member)
        return passing(partial(program, member_roles, number), roles, number, mark)

    def worker_state(
        self, roles: Roles, number: int
    ) -> tuple[Vector, dict[int, int], dict[int, CodecChannel]]:
        """Return a worker's weights, and the version and codec channel of each server."""
        channels = {
            server: CodecChannel(self.compressor, roles, number, server) for server in roles.servers
        }
        return roles.weights, dict.fromkeys(roles.servers, 0), channels

    def server_channels(self, roles: Roles, server: int) -> list[CodecChannel]:
        """Return the codec channels of a server, one for each worker."""
        return [
            CodecChannel(self.compressor, roles, worker, server) for worker in range(roles.workers)
        ]

    def serve(self, roles: Roles, number: int, mark: Any) -> Program:
        """Return a server's program."""
        raise NotImplementedError(f"{type(self).__name__} must define serve")

    def work(self, roles: Roles, number: int, mark: Any) -> Program:
        """Compute a gradient, push it, and wait for new weights from all servers, in a loop."""
        ends = False
        weights, versions, channels = mark or self.worker_state(roles, number)
        while not ends:
            yield RestartPoint((weights, versions, channels))
            yield from push_gradient(roles, channels, versions, number, (yield Compute(weights)))
            weights, ends = yield from fetch_weights(roles, channels, versions)
        for server in roles.servers:
            # The message tells the server that the worker ends.
            yield Send(server, Message(number))


def push_gradient(
    roles: Roles,
    channels: Mapping[int, CodecChannel],
    versions: Mapping[int, int],
    number: int,
    gradient: Gradient,
) -> Generator[Action, Any, None]:
    """Send a worker's gradient to all servers without a copy of the gradient."""
    metadata = gradient.rows, gradient.step, gradient.last
    for server in roles.servers:
        payload = yield Code(
            partial(channels[server].push, roles.part(server).take(gradient.values))
        )
        yield Send(server, Message(number, payload, versions[server], *metadata))


def fetch_weights(
    roles: Roles, channels: Mapping[int, CodecChannel], versions: dict[int, int]
) -> Generator[Action, Any, tuple[Vector, bool]]:
    """Receive weights from all servers; return the weights and whether training ends.

    Args:
        roles: The roles of all processes.
        channels: The codec channel of the worker to each server.
        versions: The version of the worker's weights from each server; the function updates it.
    """
    parts: dict[int, Vector] = {}
    ends = False
    for server in roles.servers:
        answer = yield Receive(server)
        parts[server] = yield Code(partial(channels[server].answered, answer.values))
        versions[server] = answer.version
        ends = ends or answer.ends
    return roles.assemble_weights(parts), ends


def aggregate(
    roles: Roles, number: int, mark: Any, channels: Sequence[CodecChannel], backups: int = 0
) -> Program:
    """Return the program of a server that need not wait for the slowest workers."""
    weights, total = roles.part(number).take(roles.weights), roles.steps * roles.epochs
    clock, last, pending, finished = 0, False, list[Message](), 0
    if mark is not None:
        weights, total, clock, last, pending, finished, channels = mark
    while finished < roles.workers:
        yield RestartPoint((weights, total, clock, last, pending, finished, channels))
        push = yield Receive()
        if push.values is None:
            finished += 1
            continue
        last = last or push.ends
        if push.version < clock:
            yield Drop(push)
            payload = yield Code(partial(channels[push.source].answer, weights))
            answer = Message(number, payload, clock, ends=clock == total)
            yield Send(push.source, answer, answers=push)
            continue
        gradient = yield Code(partial(channels[push.source].pushed, push.values))
        pending.append(replace(push, values=gradient))
        if len(pending) < roles.workers - backups:
            continue
        pending.sort(key=lambda message: message.source)
        weights = yield Update(mean(pending, [push.rows for push in pending]), tuple(pending))
        clock += 1
        total = clock if last and number == roles.lead else total
        for message in pending:
            ends = number == roles.lead and clock == total
            payload = yield Code(partial(channels[message.source].answer, weights))
            yield Send(message.source, Message(number, payload, clock, ends=ends), answers=message)
        pending = []
        if clock % roles.steps == 0:
            yield Snapshot(clock // roles.steps - 1, weights)


def mean(pushes: Sequence[Message], shares: Sequence[float]) -> Vector:
    """Return the mean of gradients with the weights `shares`; add them in the given order."""
    values = [push.values for push in pushes if push.values is not None]
    if len(values) == 1:
        return values[0]
    total = sum(shares) or 1
    result: Vector = values[0] * values[0].dtype.type(shares[0] / total)
    for value, share in zip(values[1:], shares[1:], strict=True):
        result += value * value.dtype.type(share / total)
    return result


@record(
    *("_leads", "_each", "_epoch", "_epochs", "_granted", "_total", "_done", "_at_work"),
    *("_lost", "_kept"),
)
class Quota:
    """A server's count of the batches that workers have completed, or are computing now.

    The first server decides when a worker has no more batches to compute. If a worker fails, other
    workers compute the batches that it had begun.

    Args:
        roles: The roles of all processes.
        number: The number of this server.
        each: The number of batches that a worker computes between two replies of the server.
    """

    def __init__(self, roles: Roles, number: int, each: int = 1) -> None:
        self._leads, self._each = number == roles.lead, each
        self._epoch, self._epochs = roles.steps * roles.workers, roles.epochs
        self._granted, self._total = each * roles.workers, self._epoch * roles.epochs
        self._done = dict.fromkeys(range(roles.workers), 0)
        self._at_work = set(self._done)
        self._lost = self._kept = 0

    def ends(self, push: Message) -> bool:
        """Record a push of gradients; return whether its worker has no more batches to compute."""
        self._done[push.source] = push.step + 1
        if push.ends:
            self._total = self._granted
        ends = self._leads and self._granted >= self._total
        if ends:
            self._at_work.remove(push.source)
        else:
            self._granted += self._each
        return ends

    def leaves(self, goodbye: Message) -> None:
        """Record a worker's last message; other workers get the batches of a failed worker."""
        if goodbye.ends and goodbye.source in self._at_work:
            self._lost += self._each
            self._granted -= self._each

    def epochs(self, last: bool = False) -> Iterator[int]:
        """Yield the number of each epoch that was completed since the last call.

        Args:
            last: Whether all workers have ended. If all workers have ended, batches that failed
                workers had begun count as completed.
        """
        done = sum(self._done.values()) + (self._lost if last else 0)
        while self._kept < self._epochs and done >= (self._kept + 1) * self._epoch:
            yield self._kept
            self._kept += 1
