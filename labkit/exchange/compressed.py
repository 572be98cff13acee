"""The mean of compressed buckets, computed with the collectives that a compressor requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
class BucketLayer:
    """A gradient or a part of it: the elements [start, stop) of a bucket, with their shape."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ReductionRecord:
    """The input and the result of the compressed reduction of one bucket.

    Attributes:
        given: The uncompressed gradients of this rank, (n,).
        sent: The values that this rank contributed after compression, (n,).
        mean: The resulting mean gradients over the ranks, (n,).
        residual: The compression error that this rank stores for the next step, (n,); None for
            compressors without memory.
        payload_bytes: Total bytes that this rank sent into collectives for this reduction.
        layer_bytes: The bytes of each layer in `payload_bytes`, for compressors that process layers
            separately; None for other compressors.
        step: The number of the training step, as in the timeline.
    """

    given: np.ndarray
    sent: np.ndarray
    mean: np.ndarray
    residual: np.ndarray | None
    payload_bytes: int = 0
    layer_bytes: tuple[int, ...] | None = None
    step: int = 0


class CompressedMean:
    """An object that runs a compressor's generators and the collectives that they request.

    A compressor's generator yields requests for collectives, and receives the results of these
    collectives. For most compressors, a bucket is one flat tensor. A compressor with `by_layer`
    uses one generator for each layer. The generators of all layers run in parallel and share
    collective calls. Because requests are combined, a bucket with many layers needs few collective
    calls. The generator with the most requests determines the number of collective calls.

    Args:
        communicator: The Communicator of the ranks.
        compressor: The gradient compressor.
        seed: The seed of the compressor's random choices.

    Attributes:
        seconds: Total seconds of encoding and decoding so far.
        calls: The number of collective calls so far; the exchange of the ranks' weights is not
            counted.
    """

    def __init__(self, communicator: Communicator, compressor: Compressor, seed: int) -> None:
        self._communicator, self._compressor, self._seed = communicator, compressor, seed
        self._states: dict[tuple[int, int], State] = {}
        self._recalled: dict[tuple[int, int], dict[int, np.ndarray]] = {}
        self._before = self._states
        self.seconds = 0.0
        self.calls = 0
        # The dict `_bytes` maps each generator's number to the bytes that the generator sends in
        # the current reduction.
        self._bytes: dict[int, int] = {}

    def reduce(
        self,
        bucket: int,
        pieces: Sequence[np.ndarray],
        layers: Sequence[BucketLayer],
        algorithm: str,
        label: str,
    ) -> ReductionRecord:
        """Replace a rank's gradients in one bucket by the mean over the ranks, in place.

        Args:
            bucket: The number of the bucket; each bucket has its own compressor state.
            pieces: Flat gradients of one float dtype, which the mean overwrites; 16-bit floats are
                compressed as float32.
            layers: The layer of each array in `pieces`, in the same order.
            algorithm, label: The same arguments as those of `Communicator.allreduce`.
        """
        meter, clock = self._communicator.traffic, self._communicator.clock
        before, start = meter.copy(), clock.now()
        parts = self._parts(np.concatenate(pieces), layers)
        states = [self._state(bucket, n, part) for n, part in enumerate(parts)]
        pairs = zip(parts, states, strict=True)
        results = self._run([self._compressor.reduce(t, s) for t, s in pairs], algorithm, label)
        for number, reduced in enumerate(results):
            self._states[bucket, number] = reduced.state
        record = self._record(parts, results)
        for piece, layer in zip(pieces, layers, strict=True):
            piece[...] = record.mean[layer.start : layer.stop]
        spent = meter.since(before)
        elapsed = clock.now() - start
        self.seconds += elapsed - spent.wait_seconds - spent.transfer_seconds
        part_bytes = tuple(self._bytes[n] for n in range(len(parts)))
        layer_bytes = part_bytes if self._compressor.by_layer else None
        return replace(record, payload_bytes=spent.payload_bytes, layer_bytes=layer_bytes)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the compressor states for a checkpoint.

        Returns: The arrays, with names of the form "kind/bucket/part/place". The kind of an array
            is "residual" or "state". The part of an array's name is the number of the generator.
            The place of an array is its index in the generator's state.
        """
        import tensorflow as tf

        arrays = {
            f"state/{bucket}/{part}/{place}": value
            for (bucket, part), state in self._recalled.items()
            for place, value in state.items()
        }
        for (bucket, part), state in self._states.items():
            residual = self._compressor.residual(state)
            for place, value in enumerate(tf.nest.flatten(state)):
                kind = "residual" if value is residual else "state"
                arrays[f"{kind}/{bucket}/{part}/{place}"] = np.asarray(value)
        return arrays

    def save_states(self) -> None:
        """Save the compressor states at the start of a training step, for `restore_states`."""
        self._before = dict(self._states)

    def restore_states(self) -> None:
        """Restore the compressor states of the last call of `save_states`."""
        self._states = self._before

    def reset(self, scale: float) -> None:
        """Reload the current compressor states, with residuals multiplied by `scale`."""
        arrays = self.state_dict()
        self._states, self._recalled = {}, {}
        self.load_state_dict(
            {
                name: value * value.dtype.type(scale) if name.startswith("residual/") else value
                for name, value in arrays.items()
            }
        )

    def load_state_dict(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restore compressor states from `state_dict`; missing states start from initial values."""
        for name, value in arrays.items():
            bucket, part, place = map(int, name.split("/")[1:])
            self._recalled.setdefault((bucket, part), {})[place] = value

    def _parts(self, flat: np.ndarray, layers: Sequence[BucketLayer]) -> list[tf.Tensor]:
        import tensorflow as tf

        wide = flat.astype(np.float32) if flat.itemsize < 4 else flat
        if not self._compressor.by_layer:
            return [tf.constant(wide)]
        return [tf.constant(wide[x.start : x.stop].reshape(x.shape)) for x in layers]

    def _state(self, bucket: int, part: int, tensor: tf.Tensor) -> State:
        key = (bucket, part)
        if key not in self._states:
            seed = self._seed + 1_000 * bucket + part
            shape = tuple(tensor.shape)
            state = self._compressor.start(
                shape, self._communicator.rank, seed, self._communicator.size
            )
            self._states[key] = _replace_tensors(state, self._recalled.pop(key, {}))
        return self._states[key]

    def _record(self, parts: list[tf.Tensor], results: list[Reduced]) -> ReductionRecord:
        residuals = [self._compressor.residual(reduced.state) for reduced in results]

        def flat(tensors: Sequence[tf.Tensor]) -> np.ndarray:
            arrays = [np.asarray(tensor).reshape(-1) for tensor in tensors]
            return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]

        return ReductionRecord(
            flat(parts),
            flat([reduced.sent for reduced in results]),
            flat([reduced.mean for reduced in results]),
            None if any(residual is None for residual in residuals) else flat(residuals),
        )

    def _run(self, reductions: list[Reduction], algorithm: str, what: str) -> list[Reduced]:
        """Run all generators, and combine their pending requests of one type in one collective."""
        results: dict[int, Reduced] = {}
        self._bytes = dict.fromkeys(range(len(reductions)), 0)
        answers: dict[int, tf.Tensor] = dict.fromkeys(range(len(reductions)))
        while answers:
            pending: dict[int, Request] = {}
            for number, answer in answers.items():
                try:
                    pending[number] = reductions[number].send(answer)
                    self._bytes[number] += _nbytes(pending[number])
                except StopIteration as end:
                    results[number] = end.value
            answers = {}
            for kind, call in ((Mean, self._mean), (Gather, self._gather), (SparseMean, self._sum)):
                numbers = [n for n, request in pending.items() if isinstance(request, kind)]
                if numbers:
                    requests: list[tf.Tensor] = [pending[number] for number in numbers]
                    replies = call(requests, algorithm, what)
                    answers |= dict(zip(numbers, replies, strict=True))
                    self.calls += 1
        return [results[number] for number in range(len(reductions))]

    def _mean(self, requests: list[Mean], algorithm: str, what: str) -> list[tf.Tensor]:
        import tensorflow as tf

        arrays = [np.asarray(request.value) for request in requests]
        if len({array.dtype for array in arrays}) > 1:
            raise LabkitError("tensors that are averaged in one message must have the same dtype")
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        self._communicator.mean(flat, 1.0, algorithm, what, float(self._communicator.size))
        ends = np.cumsum([array.size for array in arrays])[:-1]
        pieces = zip(np.split(flat, ends), arrays, strict=True)
        return [tf.constant(piece.reshape(array.shape)) for piece, array in pieces]

    def _gather(self, requests: list[Gather], algorithm: str, what: str) -> list[tf.Tensor]:
        local = [to_bytes(request.payload) for request in requests]
        gathered = self._communicator.gather_bytes(np.concatenate(local), algorithm, what)
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


def _replace_tensors(state: State, recalled: Mapping[int, np.ndarray]) -> State:
    """Return a compressor state in which the tensors at the given indices are replaced."""
    import tensorflow as tf

    if not recalled:
        return state
    flat = [
        tf.constant(recalled[place]) if place in recalled else value
        for place, value in enumerate(tf.nest.flatten(state))
    ]
    return tf.nest.pack_sequence_as(state, flat)


def _nbytes(request: Request) -> int:
    """Return how many bytes this rank sends in the collective for a request."""
    if isinstance(request, Gather):
        return nbytes(request.payload)
    if isinstance(request, Mean):
        return int(np.asarray(request.value).nbytes)
    return int(np.asarray(request.indices).nbytes + np.asarray(request.values).nbytes)


WHOLE = "all layers"  # A row of statistics about a whole bucket has `WHOLE` as its layer name.
Row = dict[str, Any]
FIGURES = ("relative_error", "cosine", "residual_norm", "bits_per_parameter", "fraction_sent")


class CompressionStats:
    r"""A comparison of compressed mean gradients with exact means, in every n-th training step.

    Each row contains the statistics of one layer on one rank. In the formulas, \(\hat g\) is the
    compressed mean gradient, and \(\bar g\) the exact mean gradient. `relative_error` is \(\|\hat
    g-\bar g\| / \|\bar g\|\).
    `cosine` compares the directions of the compressed mean \(\hat g\) and the exact mean \(\bar
    g\). `cosine` is the cosine of the angle between the compressed and the exact mean gradient.
    `residual_norm` is \(\|e_r\|\), the norm of the compression error that rank r stores; 0 for
    compressors without memory. `bits_per_parameter` counts this rank's payload. If a payload
    contains a whole bucket, its bits are divided among the layers. Each layer's share is
    proportional to the layer's number of nonzero values. `fraction_sent` is the fraction of
    gradient elements that this rank sent as nonzero values.

    The traffic meter and the emulated network do not count the messages that compute the exact
    mean. A step that compares a bucket with its exact mean takes longer than other steps.

    Args:
        communicator: The Communicator of the ranks.
        every: The number of steps from one comparison to the next.

    Attributes:
        rows: The statistics of all comparisons so far, one row per layer and comparison.
    """

    def __init__(self, communicator: Communicator, every: int) -> None:
        self._communicator, self._every = communicator, every
        self.rows: list[Row] = []

    def observe(self, bucket: int, layers: Sequence[BucketLayer], record: ReductionRecord) -> None:
        """Compare a compressed bucket with its exact mean, in one of `every` training steps.

        All ranks must call the method together.
        """
        if record.step % self._every:
            return
        total = self._communicator.allreduce_small(
            record.given.astype(np.float64), "compression statistics"
        )
        true = total / self._communicator.size
        whole = BucketLayer(WHOLE, 0, len(true), (len(true),))
        sizes = (float(record.payload_bytes), *_bytes_of(layers, record))
        for layer, size in zip((whole, *layers), sizes, strict=True):
            part = slice(layer.start, layer.stop)
            self.rows.append(
                {
                    "step": record.step,
                    "rank": self._communicator.rank,
                    "bucket": bucket,
                    "layer": layer.name,
                    **_comparison(true[part], record.mean[part]),
                    "residual_norm": 0.0
                    if record.residual is None
                    else _norm(record.residual[part]),
                    "bits_per_parameter": 8 * size / max(layer.stop - layer.start, 1),
                    "parameters": layer.stop - layer.start,
                    "fraction_sent": float(np.count_nonzero(record.sent[part]))
                    / max(layer.stop - layer.start, 1),
                }
            )

    def by_step(self) -> dict[int, Row]:
        """Return each step's statistics as means over buckets, weighted by parameter counts."""
        by_step: dict[int, list[Row]] = {}
        for row in self.rows:
            if row["layer"] == WHOLE:
                by_step.setdefault(row["step"], []).append(row)
        return {
            step: {
                name: float(
                    np.average([r[name] for r in rows], weights=[r["parameters"] for r in rows])
                )
                for name in FIGURES
            }
            for step, rows in by_step.items()
        }


def _bytes_of(layers: Sequence[BucketLayer], record: ReductionRecord) -> list[float]:
    """Return, for each layer, its payload bytes in the reduction of one bucket."""
    if record.layer_bytes is not None:
        return [float(size) for size in record.layer_bytes]
    sent = [np.count_nonzero(record.sent[layer.start : layer.stop]) for layer in layers]
    return [record.payload_bytes * count / max(sum(sent), 1) for count in sent]


def _comparison(true: np.ndarray, mean: np.ndarray) -> dict[str, float]:
    length, scale = _norm(true), _norm(mean)
    return {
        "relative_error": _norm(mean - true) / length if length else 0.0,
        "cosine": float(true @ mean) / (length * scale) if length and scale else 0.0,
    }


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64, copy=False)))
