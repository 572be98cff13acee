"""What a worker and a server say to each other, as it is or in fewer bytes."""

from __future__ import annotations

from functools import cached_property

from labkit.common.state import record
from labkit.compression import Compressor, Decoder, Encoder
from labkit.programs.actions import Vector
from labkit.programs.roles import Roles

TENSORS = 1_000  # seeds that a listener has to itself, one a tensor


@record(
    *("compressor", "size", "dtype", "_worker", "_server", "_seed", "_shapes", "_followed"),
    *("_pushes", "_heard", "_answers", "_told"),
)
class CodecChannel:
    r"""One end of what a worker and a server say to each other; both have one.

    A worker's gradient goes through the compressor with its memory, if it has one: what was not
    said waits at the worker. A server answers with the difference between its weights w and those
    that the worker has by now, \(\tilde w \leftarrow \tilde w + D(E(w - \tilde w))\), which
    both ends keep, to the same bits: what an answer loses is a part of the next difference.

    Without a compressor all goes as it is.

    Args:
        compressor: of both directions, or None.
        roles: who holds what, and what all begin with.
        worker, server: their numbers.

    Attributes:
        compressor: as given.
        size, dtype: of what is said, in elements.

    Source: H. Tang, C. Yu, X. Lian, T. Zhang, J. Liu, DoubleSqueeze, 2019, arXiv 1905.05957, which
    compresses both directions with feedback at both ends. Differs from it: answers say weights, not
    mean gradients, as each worker of an asynchronous server has others.
    """

    def __init__(
        self, compressor: Compressor | None, roles: Roles, worker: int, server: int
    ) -> None:
        self.compressor, self._worker, self._server = compressor, worker, server
        self._seed, self.dtype = roles.seed, roles.weights.dtype
        part = roles.part(server)
        self._shapes, self.size = part.shapes, part.size
        self._followed: Vector = roles.weights[:0]
        if compressor is not None:  # else each talk would keep a copy for nothing
            self._followed = part.take(roles.weights)  # what the worker has

    def push(self, gradient: Vector) -> Vector:
        """What a worker sends for the gradient of this part."""
        return gradient if self.compressor is None else self._pushes.say(gradient)

    def pushed(self, said: Vector) -> Vector:
        """The gradient that the server understands."""
        return said if self.compressor is None else self._heard.hear(said)

    def answer(self, weights: Vector) -> Vector:
        """What the server sends for its weights."""
        if self.compressor is None:
            return weights
        said = self._answers.say(weights - self._followed)
        self._followed = self._followed + self._answers.sent
        return said

    def has(self, answered: Vector) -> Vector:
        """What the worker has of the weights that the server has just answered."""
        return answered if self.compressor is None else self._followed

    def answered(self, said: Vector) -> Vector:
        """The weights that the worker has then."""
        if self.compressor is None:
            return said
        self._followed = self._followed + self._told.hear(said)
        return self._followed

    # Each end speaks in one direction and listens in the other: only half of this is made.

    @cached_property
    def _pushes(self) -> Encoder:
        return self._speaker(self._by_gradient, self._worker, self._server)

    @cached_property
    def _heard(self) -> Decoder:
        return Decoder(self._by_gradient, self._shapes, self.dtype)

    @cached_property
    def _answers(self) -> Encoder:
        return self._speaker(self._by_gradient.without_memory, self._server, self._worker)

    @cached_property
    def _told(self) -> Decoder:
        return Decoder(self._by_gradient.without_memory, self._shapes, self.dtype)

    @property
    def _by_gradient(self) -> Compressor:
        assert self.compressor is not None  # for the type checker
        return self.compressor

    def _speaker(self, compressor: Compressor, number: int, to: int) -> Encoder:
        return Encoder(compressor, self._shapes, number, self._seed + TENSORS * to)
