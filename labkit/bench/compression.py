"""A benchmark of compressors: time relative to a memory copy, compressed size, and error."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import click
import numpy as np

from labkit.bench.command import AS_JSON, TIMES, compressors, format_rows, write_rows
from labkit.bench.timing import Row, head, spread
from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.terminal import say
from labkit.communicator import launcher
from labkit.compression import (
    COMPRESSORS,
    Compressor,
    Gather,
    Request,
    SparseMean,
    Tensor,
    nbytes,
    parse,
)
from labkit.compression.compressor import compiled
from labkit.compression.simulated_reduction import reduce_all, reply_to

CALLS = 5  # The constant CALLS is the number of calls of each operation in a repeat.
Work: TypeAlias = "Callable[[], Tensor | None]"


def measure(
    compressors: Sequence[str | Compressor | Mapping[str, JSON]] | None = None,
    elements: int = 5_800_000,
    repeats: int = 5,
) -> list[Row]:
    """Measure compressors on a standard normal float32 vector, in a new process with one thread.

    In each repeat, 5 calls of the compressor alternate with 5 copies of the vector. A first,
    untimed call of each operation compiles its functions. For a compressor without `encode`, the
    whole reduction of one rank is timed as "reduce". A compressor that works layer by layer
    receives the layers of an MLP. The MLP has 784 inputs, two hidden layers and 10 outputs.

    Args:
        compressors: Names from `COMPRESSORS`, compressor objects, or mappings with a name and
            fields. None selects all compressors without required fields.
        elements: Number of elements of the vector. The number is approximate for compressors that
            work layer by layer.
        repeats: Number of rounds over all compressors.

    Returns:
        One row per compressor and operation ("encode" and "decode", or "reduce"). Each row contains
        median, minimum and 90th percentile of the repeats' medians (ms). `bytes` is the payload
        size, and `ratio` is the raw size divided by the payload size. `to_copy` is the median ratio
        of the operation's time to the time of a memory copy. `error` is the relative L2 error of
        the decoded vector. It is None for compressors that send only votes (signs).

    Raises:
        InvalidInput: A compressor is unknown, or elements or repeats is below 1.
        LabkitError: The measuring process failed.
    """
    if elements < 1 or repeats < 1:
        raise InvalidInput(f"elements={elements}, repeats={repeats}: both must be 1 or more")
    chosen = without_fields() if compressors is None else [parse(each) for each in compressors]
    described = [each.to_json() for each in chosen]
    task = {"compressors": described, "elements": elements, "repeats": repeats}
    one = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "OMP_NUM_THREADS": "1"}
    # The measurement runs in a new process, because TensorFlow fixes the number of threads when it
    # is imported.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "labkit.bench.compression", json.dumps(task)],
        env={
            **os.environ,
            **one,
            **launcher.huge_pages(),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "-1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.splitlines() or ["no error output"])[-1]
        raise LabkitError(f"the benchmark's process ended with code {done.returncode}: {last}")
    # The result is the last line of the output, because libraries may print lines before it.
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def without_fields() -> list[Compressor]:
    """Return one instance of each compressor without required fields."""
    return [
        kind()
        for kind in COMPRESSORS.values()
        if not any(field.is_required() for field in kind.model_fields.values())
    ]


def layers(elements: int) -> list[tuple[int, ...]]:
    """Return the weight shapes of an MLP 784-h-h-10 with about `elements` parameters in total."""
    # The width h of the hidden layers is the positive root of h² + 796 h = elements. The equation
    # for the width h neglects the ten biases of the output layer.
    h = max(1, round((math.sqrt(796**2 + 4 * elements) - 796) / 2))
    return [(784, h), (h,), (h, h), (h,), (h, 10), (10,)]


def named(compressor: Compressor) -> str:
    """Return the class name of a compressor, or its repr if it has non-default fields."""
    ordinary = not compressor.model_dump(exclude_defaults=True)
    return type(compressor).__name__ if ordinary else repr(compressor)


class _Case:
    """A compressor with its test data and its results, in the measuring process."""

    def __init__(self, compressor: Compressor, elements: int) -> None:
        import tensorflow as tf

        shapes = layers(elements) if compressor.by_layer else [(elements,)]
        self.compressor = compressor
        self.tensors = [
            tf.random.stateless_normal(shape, [7, index], alg="philox")
            for index, shape in enumerate(shapes)
        ]
        self.states = [compressor.start(shape) for shape in shapes]
        self.raw = np.concatenate([np.ravel(tensor) for tensor in self.tensors])
        self.copy = np.empty_like(self.raw)
        whole = type(compressor).encode is Compressor.encode
        self.works = self._reduction() if whole else self._coding()
        self.seconds: dict[str, list[float]] = {what: [] for what in self.works}
        self.ratios: dict[str, list[float]] = {what: [] for what in self.works}

    def _coding(self) -> dict[str, Work]:
        """Measure the size and error of an encoding; return functions for later timing."""
        tensor, key = self.tensors[0], self.states[0]
        encode, decode = (compiled(self.compressor, name) for name in ("encode", "decode"))
        payload = encode(tensor, key)
        self.bytes = nbytes(payload)
        self.error = self._error([decode(payload)])
        return {"encode": lambda: encode(tensor, key), "decode": lambda: decode(payload)}

    def _reduction(self) -> dict[str, Work]:
        """Reduce once to store the bytes and the error; return the function to time later."""
        self.bytes = 0
        sent = []
        for index, tensor in enumerate(self.tensors):
            reduction = self.compressor.reduce(tensor, self.states[index])
            answer = None
            try:
                while True:
                    request = reduction.send(answer)
                    self.bytes += _request_nbytes(request)
                    answer = reply_to([request])
            except StopIteration as end:
                sent.append(end.value.sent)
                self.states[index] = end.value.state
        self.error = self._error(sent)
        return {"reduce": self._reduce}

    def _reduce(self) -> None:
        """Reduce all tensors with the compressor on a single rank, and store its new states."""
        for index, tensor in enumerate(self.tensors):
            one = reduce_all(self.compressor, [tensor], [self.states[index]])[0]
            self.states[index] = one.state

    def _error(self, sent: Sequence[Tensor]) -> float | None:
        if self.compressor.votes:
            return None
        decoded = np.concatenate([np.ravel(tensor) for tensor in sent])
        return float(np.linalg.norm(decoded - self.raw) / np.linalg.norm(self.raw))

    def repeat(self) -> None:
        """Time each operation and a copy of the data, in alternation."""
        turns: dict[str, list[float]] = {what: [] for what in ("copy", *self.works)}
        for _ in range(CALLS):
            # Code that processes the same bytes takes at least the time of a copy.
            turns["copy"].append(_seconds(lambda: np.copyto(self.copy, self.raw)))
            for what, work in self.works.items():
                turns[what].append(_seconds(work))
        # Each operation's time is divided by a copy's time from the same repeat. The ratio removes
        # the influence of the machine's varying speed.
        copy = float(np.median(turns.pop("copy")))
        for what, seconds in turns.items():
            median = float(np.median(seconds))
            self.seconds[what].append(median)
            self.ratios[what].append(median / copy)

    def rows(self) -> list[Row]:
        """Return the results, one row per operation."""
        return [
            head("compression", named(self.compressor), what, 1, repeats=len(seconds))
            | spread(seconds)
            | {
                "bytes": self.bytes,
                "ratio": self.raw.nbytes / self.bytes,
                "p5_ms": 1e3 * float(np.percentile(seconds, 5)),
                "p95_ms": 1e3 * float(np.percentile(seconds, 95)),
                "to_copy": float(np.median(self.ratios[what])),
                "error": self.error,
                "elements": self.raw.size,
            }
            for what, seconds in self.seconds.items()
        ]


def _request_nbytes(request: Request) -> int:
    """Return the payload bytes that this rank sends for a collective request."""
    if isinstance(request, Gather):
        return nbytes(request.payload)
    if isinstance(request, SparseMean):
        return nbytes({"indices": request.indices, "values": request.values})
    return int(np.asarray(request.value).nbytes)


def _seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_this_process(
    compressors: Sequence[Mapping[str, JSON]], elements: int, repeats: int
) -> list[Row]:
    """Measure compressors in the calling process; return one row per compressor and operation."""
    cases = [_Case(parse(each), elements) for each in compressors]
    for case in cases:
        for work in case.works.values():
            # Each operation is called once before the timing, because its first call compiles
            # functions.
            work()
    for _ in range(repeats):
        for case in cases:
            case.repeat()
    return [row for case in cases for row in case.rows()]


def main() -> None:
    """Measure the compressors of a JSON task, and print the rows as one line of JSON."""
    print(json.dumps(in_this_process(**json.loads(sys.argv[1]))))


@click.command("compression")
@click.option(
    "--compressors",
    "chosen",
    callback=compressors,
    help="Gradient compressors, e.g. QSGD,'{name: TopK, threshold: exact}'.  [default: all "
    "that have no required fields]",
)
@click.option(
    "--elements",
    default=5_800_000,
    show_default=True,
    help="Number of elements of the float32 vector that is compressed.",
)
@click.option("--repeats", default=5, show_default=True, help="Interleaved repeats.")
@AS_JSON
def command(chosen: list[Compressor], elements: int, repeats: int, file: Path | None) -> None:
    """Measure compressor times on one thread, relative to a copy of the same bytes."""
    rows = measure(chosen or None, elements, repeats)
    errors = ["" if row["error"] is None else f"{row['error']:.2%}" for row in rows]
    columns = {"case": "compressor", "what": "what"} | TIMES
    columns |= {"to_copy": "x copy time", "bytes": "bytes", "ratio": "ratio", "lost": "error"}
    shown = [row | {"lost": error} for row, error in zip(rows, errors, strict=True)]
    say(format_rows(shown, columns))
    write_rows(rows, file)


if __name__ == "__main__":
    main()
