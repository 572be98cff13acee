"""Roles of workers and servers, their placement on ranks, and compressed channels between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import EllipsisType
from typing import TypeAlias

import numpy as np

from labkit.common.rows import cut
from labkit.common.state import record
from labkit.compression import Compressor, Decoder, Encoder
from labkit.programs.actions import Place, Vector

# The type `Index` is an index expression that selects elements of a tensor.
Index: TypeAlias = tuple[slice | EllipsisType, ...]


@record()
@dataclass(frozen=True)
class TensorPiece:
    """The place of a tensor in the flat vector of all weights.

    Attributes:
        tensor: Number of the tensor in the model's list of weights.
        start, stop: Range of indices in the flat weights; `stop` is excluded.
        shape: Shape of the tensor if the whole tensor is in this range; otherwise None.
    """

    tensor: int
    start: int
    stop: int
    shape: tuple[int, ...] | None

    def within(self, index: Index) -> list[TensorPiece]:
        """Return the parts of the tensor that an index selects."""
        elements = np.arange(self.start, self.stop).reshape(self.shape or (-1,))[index].reshape(-1)
        ends = np.flatnonzero(np.diff(elements) > 1) + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(elements, ends)]
        return [_within(self, *run) for run in runs]


@record()
@dataclass(frozen=True)
class ServerPieces:
    """The weights on one server: several ranges of the flat weights, concatenated."""

    pieces: tuple[TensorPiece, ...]

    @property
    def size(self) -> int:
        """The number of weights that the server stores."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the tensors on this server; a part of a tensor counts as a flat vector."""
        return [
            (piece.stop - piece.start,) if piece.shape is None else piece.shape
            for piece in self.pieces
        ]

    def take(self, flat: Vector) -> Vector:
        """Return this server's elements of a flat vector, as a view if they are contiguous."""
        stretches = self._stretches
        if len(stretches) == 1:
            return flat[stretches[0][0] : stretches[0][1]]
        return np.concatenate([flat[start:stop] for start, stop in stretches] or [flat[:0]])

    def put(self, part: Vector, flat: Vector) -> None:
        """Write this server's elements into a flat vector of all weights."""
        at = 0
        for start, stop in self._stretches:
            flat[start:stop] = part[at : at + stop - start]
            at += stop - start

    def within(self, other: ServerPieces) -> ServerPieces:
        """Return the weights that `self` and `other` share, as ranges of the vector of `self`."""
        pieces: list[TensorPiece] = []
        at = 0
        for piece in self.pieces:
            for other_piece in other.pieces:
                if piece.start < other_piece.stop and other_piece.start < piece.stop:
                    overlap, offset = (
                        _within(piece, other_piece.start, other_piece.stop),
                        at - piece.start,
                    )
                    pieces.append(
                        replace(overlap, start=overlap.start + offset, stop=overlap.stop + offset)
                    )
            at += piece.stop - piece.start
        return ServerPieces(tuple(pieces))

    @cached_property
    def _stretches(self) -> list[tuple[int, int]]:
        """The ranges of the flat weights on this server, where adjacent ranges are merged."""
        stretches: list[tuple[int, int]] = []
        for piece in self.pieces:
            if stretches and stretches[-1][1] == piece.start:
                stretches[-1] = (stretches[-1][0], piece.stop)
            else:
                stretches.append((piece.start, piece.stop))
        return stretches


def placed(shapes: Sequence[tuple[int, ...]], servers: int, placement: str) -> list[ServerPieces]:
    """Place tensors on servers by a rule in `PLACEMENTS`, and return each server's ranges."""
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)]).tolist()
    tensors = [
        TensorPiece(number, start, stop, tuple(shape))
        for number, ((start, stop), shape) in enumerate(zip(pairwise(ends), shapes, strict=True))
    ]
    return [ServerPieces(tuple(pieces)) for pieces in PLACEMENTS[placement](tensors, servers)]


def round_robin(tensors: Sequence[TensorPiece], servers: int) -> list[list[TensorPiece]]:
    """Place tensor k on server k mod n of n servers, like TensorFlow's `replica_device_setter`."""
    return [list(tensors[server::servers]) for server in range(servers)]


def greedy(tensors: Sequence[TensorPiece], servers: int) -> list[list[TensorPiece]]:
    """Place each tensor, in the model's order, on the server with the fewest weights so far.

    Reference: TensorFlow's `GreedyLoadBalancingStrategy` with `byte_size_load_fn`, which uses the
        same rule.
    """
    servers_pieces: list[list[TensorPiece]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for piece in tensors:
        least = loads.index(min(loads))
        servers_pieces[least].append(piece)
        loads[least] += piece.stop - piece.start
    return servers_pieces


def sharded(tensors: Sequence[TensorPiece], servers: int) -> list[list[TensorPiece]]:
    """Divide the flat weights into equal ranges, one per server; a boundary may split a tensor."""
    edges = cut(tensors[-1].stop, [1.0] * servers)
    return [
        [
            _within(piece, first, last)
            for piece in tensors
            if piece.start < last and first < piece.stop
        ]
        for first, last in pairwise(edges)
    ]


def _within(piece: TensorPiece, first: int, last: int) -> TensorPiece:
    if first <= piece.start and piece.stop <= last:
        return piece
    return TensorPiece(piece.tensor, max(first, piece.start), min(last, piece.stop), None)


PLACEMENTS: dict[str, Callable[[Sequence[TensorPiece], int], list[list[TensorPiece]]]] = {
    "round_robin": round_robin,
    "greedy": greedy,
    "sharded": sharded,
}


@dataclass(frozen=True)
class Pass:
    """A part of a replica member's computation, which runs forward, and later backward.

        forward     gets ──► compute ──► gives
        backward    gives ──► compute ──► gets      with the gradients of the same values

    Attributes:
        gets: Numbers of the replica members whose outputs the pass reads.
        gives: Numbers of the replica members that read the outputs of the pass.
        share: Fraction of the replica's total computation that belongs to this pass.
        goes_back: Whether the pass runs backward, because its own or earlier weights need a
            gradient.
        returns: Whether weights of earlier passes need a gradient. If weights of earlier passes
            need a gradient, the backward pass sends input gradients. The members in `gets` receive
            the gradients of the pass's inputs.
    """

    gets: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    share: float = 0.0
    goes_back: bool = True
    returns: bool = True


def staged(parts: Sequence[ServerPieces]) -> list[list[Pass]]:
    """Return one forward and backward pass for each pipeline stage.

    Args:
        parts: For each stage, the ranges of the flat weights that it has. A stage's fraction of the
            computation is estimated by its fraction of the weights.
    """
    last, size = len(parts) - 1, sum(part.size for part in parts)
    return [
        [
            Pass(
                gets=(stage - 1,) if stage else (),
                gives=(stage + 1,) if stage < last else (),
                share=part.size / size,
            )
        ]
        for stage, part in enumerate(parts)
    ]


@dataclass(frozen=True)
class Roles:
    """Workers that compute gradients, and servers that store weights and are numbered next.

    A worker may be a model-parallel replica, which is divided into stages or over a grid of
    machines. A stage or a machine is a member of the replica, with its own program number. The last
    member of a replica computes the loss and has the worker's number. The program numbers of the
    other members begin after those of all servers.

    Attributes:
        workers: Number of workers.
        parts: For each server, its ranges of the flat weights. Without servers, `parts` is empty,
            and each worker stores all weights.
        steps: Steps per epoch; in each step, every worker computes one batch.
        epochs: Number of epochs.
        weights: Initial weights of the model, as one flat vector.
        hosts: For each program, the rank that executes the program. Programs on one rank share a
            network link.
        seed: Seed of the programs' random choices.
        slower: For each worker, its compute time divided by the compute time of the fastest worker.
        layers: For each layer, its number of weights, in the order of the flat weights.
        rate: Learning rate of the optimizer in the first training step.
        cut: For each replica member (stage or machine), its ranges of the flat weights. If the
            model is not divided, `cut` is empty.
        passes: For each replica member (stage or machine), its passes. A pass names the members
            with which it exchanges messages.
    """

    workers: int
    parts: Sequence[ServerPieces]
    steps: int
    epochs: int
    weights: Vector
    hosts: Sequence[int]
    seed: int = 0
    cut: Sequence[ServerPieces] = ()
    passes: Sequence[Sequence[Pass]] = ()
    slower: Sequence[float] = ()
    layers: Sequence[int] = ()
    rate: float = 0.0

    @property
    def servers(self) -> range:
        """The program numbers of the servers."""
        return range(self.workers, self.workers + len(self.parts))

    @property
    def lead(self) -> int:
        """The program number of the server that decides when the workers end."""
        return self.workers

    def assemble_weights(self, parts: Mapping[int, Vector]) -> Vector:
        """Join the servers' parts of the weights; without servers, average the workers' weights."""
        if len(parts) == 1:
            return next(iter(parts.values()))
        if not self.parts:  # without servers, each worker has a copy of all weights
            total = np.zeros_like(self.weights)
            for worker in sorted(parts):
                total += parts[worker]
            total /= len(parts)
            return total
        flat = np.empty_like(self.weights)
        for server, part in parts.items():
            self.part(server).put(part, flat)
        return flat

    def consensus_distance(self, parts: Mapping[int, Vector]) -> float:
        """Return the root mean square distance of the workers' weights from their mean."""
        mean = self.assemble_weights(parts)
        return float(
            np.sqrt(np.mean([np.sum((weights - mean) ** 2) for weights in parts.values()]))
        )

    def routes(self, compressed: bool = False) -> dict[tuple[int, int], int]:
        """Return the maximum message size in bytes for each (sender, receiver) on different ranks.

        Args:
            compressed: Whether messages are compressed. A compressed message may be larger than the
                original message.
                A compressed message contains at most all elements with their indices. Elements with
                indices need twice the bytes of the elements. A compressed message also contains a
                few numbers per tensor.
        """

        def max_bytes(server: int) -> int:
            part = self.part(server)
            nbytes = part.size * self.weights.itemsize
            return 2 * nbytes + 64 * (1 + len(part.pieces)) if compressed else nbytes

        return {
            route: max_bytes(server)
            for worker in range(self.workers)
            for server in self.servers
            if self.hosts[worker] != self.hosts[server]
            for route in ((worker, server), (server, worker))
        }

    def part(self, server: int) -> ServerPieces:
        """Return the ranges of the flat weights that a server stores."""
        return self.parts[server - self.workers]

    def members(self, worker: int) -> list[int]:
        """Return the program numbers of a replica's members, or only `worker` if there are none."""
        others = max(0, len(self.cut) - 1)
        first = self.workers + len(self.parts) + worker * others
        return [*range(first, first + others), worker]

    def place(self, number: int) -> Place:
        """Return the replica number and the member number that belong to a program number."""
        behind, member = number - self.workers - len(self.parts), len(self.cut) - 1
        return Place(number, member) if behind < 0 else Place(*divmod(behind, member))

    def of_member(self, member: int) -> Roles:
        """Return a copy of the roles that contains only the weights of one replica member."""
        part_of_member = self.cut[member]
        parts = [part_of_member.within(part) for part in self.parts]
        return replace(self, parts=parts, weights=part_of_member.take(self.weights))


# For each receiving program, TENSORS random seeds are reserved, because each tensor has its own
# seed.
TENSORS = 1_000


@record(
    *("compressor", "size", "dtype", "_worker", "_server", "_seed", "_shapes", "_followed"),
    *("_pushes", "_heard", "_answers", "_told"),
)
class CodecChannel:
    r"""The worker's end or the server's end of the channel between one worker and one server.

    A worker sends each gradient in compressed form. With error feedback, the worker stores the
    compression error. The worker adds the stored compression error to the next gradient. A server
    with weights w stores a copy \(\tilde w\) of the worker's weights. The server sends the
    compressed difference \(w - \tilde w\). The worker and the server then update their copies of
    the weights. The update of a copy is \(\tilde w \leftarrow \tilde w + D(E(w - \tilde w))\). E
    denotes encoding by the compressor, and D denotes decoding. Worker and server store bitwise
    identical copies \(\tilde w\) of the weights. Each message of the server corrects the
    compression error of the previous message.

    Without a compressor, payloads are sent unchanged.

    Args:
        compressor: Compressor for both directions; None if payloads are not compressed.
        roles: Roles of all programs, with the parts of the weights on each server, and the initial
            weights.
        worker, server: Program numbers of the worker and the server.

    Attributes:
        compressor: The compressor that was passed as argument.
        size, dtype: Number of elements and dtype of a message that is not compressed.

    References: H. Tang, C. Yu, X. Lian, T. Zhang, J. Liu, DoubleSqueeze, 2019, arXiv 1905.05957,
    which compresses both directions with error feedback at both ends. Difference from
    DoubleSqueeze: answers contain weights instead of mean gradients, because each worker of an
    asynchronous server has different weights.
    """

    def __init__(
        self, compressor: Compressor | None, roles: Roles, worker: int, server: int
    ) -> None:
        self.compressor, self._worker, self._server = compressor, worker, server
        self._seed, self.dtype = roles.seed, roles.weights.dtype
        part = roles.part(server)
        self._shapes, self.size = part.shapes, part.size
        self._followed: Vector = roles.weights[:0]
        # Without a compressor, the channel needs no copy of the worker's weights.
        if compressor is not None:
            # The vector `_followed` is the channel's copy of the worker's weights.
            self._followed = part.take(roles.weights)

    def push(self, gradient: Vector) -> Vector:
        """Return the payload in which a worker sends a gradient to the server."""
        return gradient if self.compressor is None else self._pushes.encode(gradient)

    def pushed(self, payload: Vector) -> Vector:
        """Return the gradient that a server decodes from a worker's payload."""
        return payload if self.compressor is None else self._heard.decode(payload)

    def answer(self, weights: Vector) -> Vector:
        """Return the payload in which a server sends its weights as an answer."""
        if self.compressor is None:
            return weights
        payload = self._answers.encode(weights - self._followed)
        self._followed = self._followed + self._answers.sent
        return payload

    def has(self, payload: Vector) -> Vector:
        """Return the weights that the worker will have after it receives the server's answer."""
        return payload if self.compressor is None else self._followed

    def answered(self, payload: Vector) -> Vector:
        """Return the weights that the worker stores after it has decoded the server's answer."""
        if self.compressor is None:
            return payload
        self._followed = self._followed + self._told.decode(payload)
        return self._followed

    # Each end of the channel uses two of the four codec objects below: one encodes, and one
    # decodes.

    @cached_property
    def _pushes(self) -> Encoder:
        return self._encoder(self._codec, self._worker, self._server)

    @cached_property
    def _heard(self) -> Decoder:
        return Decoder(self._codec, self._shapes, self.dtype)

    @cached_property
    def _answers(self) -> Encoder:
        return self._encoder(self._codec.without_memory, self._server, self._worker)

    @cached_property
    def _told(self) -> Decoder:
        return Decoder(self._codec.without_memory, self._shapes, self.dtype)

    @property
    def _codec(self) -> Compressor:
        assert self.compressor is not None  # The assertion only informs the type checker.
        return self.compressor

    def _encoder(self, compressor: Compressor, number: int, to: int) -> Encoder:
        return Encoder(compressor, self._shapes, number, self._seed + TENSORS * to)
