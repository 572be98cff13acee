"""The mean of buckets through a compressor: its requests become collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import LabkitError
from labkit.communicator import Communicator, scale
from labkit.compression import (
    Compressor,
    Gather,
    Mean,
    Payload,
    Reduced,
    Reduction,
    Request,
    SparseMean,
    State,
    from_bytes,
    nbytes,
    to_bytes,
)

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class Layer:
    """A gradient in a bucket, or a piece of one: elements [start, stop), and its shape."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    """One reduction of a bucket, flat: what this rank brought, sent and keeps; what all got.

    given, sent, mean: (n,). residual: (n,), or None for compressors without memory.
    payload_bytes: what this rank handed over. layer_bytes: of each layer, where layers go by
    themselves. step: of training, by the timeline.
    """

    given: np.ndarray
    sent: np.ndarray
    mean: np.ndarray
    residual: np.ndarray | None
    payload_bytes: int = 0
    layer_bytes: tuple[int, ...] | None = None
    step: int = 0


class CompressedMean:
    """Steps the compressor's generators, and carries out what they ask for.

    A bucket is one flat tensor for most compressors. One that works by layer gets a generator a
    layer; they are stepped side by side and their requests travel together, so that a bucket
    takes as many collective calls as the longest of them, whatever the number of layers.

    Args:
        communicator: the ranks.
        compressor: what they say to each other.
        seed: of random choices.

    Attributes:
        seconds: spent on encoding and decoding so far.
        calls: collective calls so far; the ranks' agreement on weights before them is not one.
    """

    def __init__(self, communicator: Communicator, compressor: Compressor, seed: int) -> None:
        self._communicator, self._compressor, self._seed = communicator, compressor, seed
        self._states: dict[tuple[int, int], State] = {}
        self._recalled: dict[tuple[int, int], dict[int, np.ndarray]] = {}
        self._before = self._states
        self.seconds = 0.0
        self.calls = 0
        self._bytes: dict[int, int] = {}  # of each generator in the reduction under way

    def reduce(
        self,
        bucket: int,
        pieces: Sequence[np.ndarray],
        layers: Sequence[Layer],
        algorithm: str,
        what: str,
    ) -> Seen:
        """Replace a rank's gradients by the mean over the ranks, in place.

        Args:
            bucket: its number; memory is kept for each.
            pieces: flat gradients of one float type; 16-bit ones are compressed as float32.
            layers: what they are, one behind the other.
            algorithm, what: see `Communicator.allreduce`.
        """
        meter, clock = self._communicator.traffic, self._communicator.clock
        before, start = meter.copy(), clock.now()
        parts = self._parts(np.concatenate(pieces), layers)
        states = [self._state(bucket, n, part) for n, part in enumerate(parts)]
        pairs = zip(parts, states, strict=True)
        found = self._run([self._compressor.reduce(t, s) for t, s in pairs], algorithm, what)
        for number, reduced in enumerate(found):
            self._states[bucket, number] = reduced.state
        seen = self._seen(parts, found)
        for piece, layer in zip(pieces, layers, strict=True):
            piece[...] = seen.mean[layer.start : layer.stop]
        spent = meter.since(before)
        elapsed = clock.now() - start
        self.seconds += elapsed - spent.wait_seconds - spent.transfer_seconds
        own = tuple(self._bytes[n] for n in range(len(parts)))
        layer_bytes = own if self._compressor.by_layer else None
        return replace(seen, payload_bytes=spent.payload_bytes, layer_bytes=layer_bytes)

    def remembered(self) -> dict[str, np.ndarray]:
        """The states, by kind, bucket, part and place; what was not sent is a "residual"."""
        import tensorflow as tf

        found = {
            f"state/{bucket}/{part}/{place}": value
            for (bucket, part), state in self._recalled.items()
            for place, value in state.items()
        }
        for (bucket, part), state in self._states.items():
            residual = self._compressor.residual(state)
            for place, value in enumerate(tf.nest.flatten(state)):
                kind = "residual" if value is residual else "state"
                found[f"{kind}/{bucket}/{part}/{place}"] = np.asarray(value)
        return found

    def mark(self) -> None:
        """A step begins, which may be taken back."""
        self._before = dict(self._states)

    def take_back(self) -> None:
        """Know what was known before the step that was begun last."""
        self._states = self._before

    def renew(self, scale: float) -> None:
        """Begin anew with what is known, and with residuals times a factor."""
        known = self.remembered()
        self._states, self._recalled = {}, {}
        self.recall(
            {
                name: value * value.dtype.type(scale) if name.startswith("residual/") else value
                for name, value in known.items()
            }
        )

    def recall(self, found: Mapping[str, np.ndarray]) -> None:
        """Begin with these states; what is not there begins as ever."""
        for name, value in found.items():
            bucket, part, place = map(int, name.split("/")[1:])
            self._recalled.setdefault((bucket, part), {})[place] = value

    def _parts(self, flat: np.ndarray, layers: Sequence[Layer]) -> list[tf.Tensor]:
        import tensorflow as tf

        wide = flat.astype(np.float32) if flat.itemsize < 4 else flat
        if not self._compressor.by_layer:
            return [tf.constant(wide)]
        return [tf.constant(wide[one.start : one.stop].reshape(one.shape)) for one in layers]

    def _state(self, bucket: int, part: int, tensor: tf.Tensor) -> State:
        key = (bucket, part)
        if key not in self._states:
            seed = self._seed + 1_000 * bucket + part
            shape = tuple(tensor.shape)
            state = self._compressor.start(
                shape, self._communicator.rank, seed, self._communicator.size
            )
            self._states[key] = _with(state, self._recalled.pop(key, {}))
        return self._states[key]

    def _seen(self, parts: list[tf.Tensor], found: list[Reduced]) -> Seen:
        residuals = [self._compressor.residual(reduced.state) for reduced in found]

        def flat(tensors: Sequence[tf.Tensor]) -> np.ndarray:
            arrays = [np.asarray(tensor).reshape(-1) for tensor in tensors]
            return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]

        return Seen(
            flat(parts),
            flat([reduced.sent for reduced in found]),
            flat([reduced.mean for reduced in found]),
            None if any(residual is None for residual in residuals) else flat(residuals),
        )

    def _run(self, reductions: list[Reduction], algorithm: str, what: str) -> list[Reduced]:
        """Step all generators; those that still ask are answered together."""
        ended: dict[int, Reduced] = {}
        self._bytes = dict.fromkeys(range(len(reductions)), 0)
        answers: dict[int, tf.Tensor] = dict.fromkeys(range(len(reductions)))
        while answers:
            asked: dict[int, Request] = {}
            for number, answer in answers.items():
                try:
                    asked[number] = reductions[number].send(answer)
                    self._bytes[number] += _nbytes(asked[number])
                except StopIteration as end:
                    ended[number] = end.value
            answers = {}
            for kind, ask in ((Mean, self._mean), (Gather, self._gather), (SparseMean, self._sum)):
                numbers = [n for n, request in asked.items() if isinstance(request, kind)]
                if numbers:
                    requests: list[tf.Tensor] = [asked[number] for number in numbers]
                    told = ask(requests, algorithm, what)
                    answers |= dict(zip(numbers, told, strict=True))
                    self.calls += 1
        return [ended[number] for number in range(len(reductions))]

    def _mean(self, requests: list[Mean], algorithm: str, what: str) -> list[tf.Tensor]:
        import tensorflow as tf

        arrays = [np.asarray(request.value) for request in requests]
        if len({array.dtype for array in arrays}) > 1:
            raise LabkitError("values that are averaged together must have one dtype")
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        self._communicator.mean(flat, 1.0, algorithm, what, float(self._communicator.size))
        ends = np.cumsum([array.size for array in arrays])[:-1]
        pieces = zip(np.split(flat, ends), arrays, strict=True)
        return [tf.constant(piece.reshape(array.shape)) for piece, array in pieces]

    def _gather(self, requests: list[Gather], algorithm: str, what: str) -> list[tf.Tensor]:
        own = [to_bytes(request.payload) for request in requests]
        gathered = self._communicator.gather_bytes(np.concatenate(own), algorithm, what)
        payloads: list[list[Payload]] = [[] for _ in requests]
        for data in gathered:
            start = 0
            for number, request in enumerate(requests):
                payload, start = from_bytes(data, request.payload, start)
                payloads[number].append(payload)
        return payloads

    def _sum(self, requests: list[SparseMean], algorithm: str, what: str) -> list[tf.Tensor]:
        import tensorflow as tf

        starts = np.cumsum([0, *(request.length for request in requests)])
        indices = np.concatenate(
            [np.asarray(r.indices) + a for r, a in zip(requests, starts[:-1], strict=True)]
        ).astype("<i4", copy=False)
        values = np.concatenate([np.asarray(request.values) for request in requests])
        scale(values, 1 / self._communicator.size)
        total = self._communicator.sparse_sum(indices, values, int(starts[-1]), algorithm, what)
        return [tf.constant(piece) for piece in np.split(total, starts[1:-1])]


def _with(state: State, recalled: Mapping[int, np.ndarray]) -> State:
    """A state with other tensors at some places."""
    import tensorflow as tf

    if not recalled:
        return state
    flat = [
        tf.constant(recalled[place]) if place in recalled else value
        for place, value in enumerate(tf.nest.flatten(state))
    ]
    return tf.nest.pack_sequence_as(state, flat)


def _nbytes(request: Request) -> int:
    """What this rank hands over for a request."""
    if isinstance(request, Gather):
        return nbytes(request.payload)
    if isinstance(request, Mean):
        return int(np.asarray(request.value).nbytes)
    return int(np.asarray(request.indices).nbytes + np.asarray(request.values).nbytes)
