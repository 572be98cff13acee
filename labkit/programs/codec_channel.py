"""The payloads between a worker and a server, with or without compression."""

from __future__ import annotations

from functools import cached_property

from labkit.common.state import record
from labkit.compression import Compressor, Decoder, Encoder
from labkit.programs.actions import Vector
from labkit.programs.roles import Roles

TENSORS = 1_000  # number of seeds reserved for each receiving program; each tensor has its own seed


@record(
    *("compressor", "size", "dtype", "_worker", "_server", "_seed", "_shapes", "_followed"),
    *("_pushes", "_heard", "_answers", "_told"),
)
class CodecChannel:
    r"""One end of the channel between a worker and a server; each end has one such object.

    A worker sends each gradient in compressed form. If the compressor uses error feedback, the
    worker stores the compression error and adds it to the next gradient. A server with weights w
    stores a copy \(\tilde w\) of the worker's weights, and sends the compressed difference \(w -
    \tilde w\). The worker and the server then update their copies of the weights: \(\tilde w
    \leftarrow \tilde w + D(E(w - \tilde w))\). E denotes encoding by the compressor, and D denotes
    decoding. Worker and server store bitwise identical copies \(\tilde w\) of the weights. The
    difference that an answer contains includes the compression error of the previous answer.

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
        if compressor is not None:  # no copy is needed without a compressor
            self._followed = part.take(roles.weights)  # the worker's copy of the weights

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

    # A worker or a server encodes in one direction and decodes in the other, so it uses only two of
    # the four codec objects below.

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
        assert self.compressor is not None  # for the type checker
        return self.compressor

    def _encoder(self, compressor: Compressor, number: int, to: int) -> Encoder:
        return Encoder(compressor, self._shapes, number, self._seed + TENSORS * to)
