"""What compressors cost: time to encode and decode beside a copy of the same bytes, and error."""

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
from labkit.compression.lockstep import reduce_all, reply_to

CALLS = 5  # of everything in a repeat
Work: TypeAlias = "Callable[[], Tensor | None]"


def measure(
    compressors: Sequence[str | Compressor | Mapping[str, JSON]] | None = None,
    elements: int = 5_800_000,
    repeats: int = 5,
) -> list[Row]:
    """Time compressors on a standard normal float32 vector, in a fresh process of one thread.

    Calls and copies of the vector alternate: 5 of each in a repeat, after a first one, in which
    functions are compiled. What has no `encode` is timed as a whole, "reduce", for one rank alone;
    what works by layer gets the layers of an MLP, 784 inputs, two hidden widths, 10 outputs.

    Args:
        compressors: names of `COMPRESSORS`, objects, or mappings of name and fields; None: all
            that need no fields.
        elements: of the vector, about as many in the layers.
        repeats: rounds over all of them.

    Returns:
        One row a compressor and kind ("encode" and "decode", or "reduce"): median, least and 90th
        percentile of the repeats' medians (ms); `bytes` of the payload, `ratio` of raw bytes to
        these, `to_copy`, the median of the repeats' ratios to the copy; `error`, the relative L2
        error of what is decoded, None for votes.

    Raises:
        InvalidInput: an unknown compressor, or nothing to measure.
        LabkitError: the process failed.
    """
    if elements < 1 or repeats < 1:
        raise InvalidInput(f"elements={elements}, repeats={repeats}: both must be 1 or more")
    chosen = without_fields() if compressors is None else [parse(each) for each in compressors]
    described = [each.to_json() for each in chosen]
    task = {"compressors": described, "elements": elements, "repeats": repeats}
    one = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "OMP_NUM_THREADS": "1"}
    # A process of its own: how many threads TensorFlow has is settled when it is imported.
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
        last = (done.stderr.splitlines() or ["no word of it"])[-1]
        raise LabkitError(f"the benchmark's process ended with {done.returncode}: {last}")
    # The last line: libraries may have said something before.
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def without_fields() -> list[Compressor]:
    """One of each compressor that needs no fields."""
    return [
        kind()
        for kind in COMPRESSORS.values()
        if not any(field.is_required() for field in kind.model_fields.values())
    ]


def layers(elements: int) -> list[tuple[int, ...]]:
    """Weights and biases of an MLP 784-h-h-10 of about so many parameters."""
    # The positive root of h² + 796 h = elements: weights and biases, but for the last ten.
    h = max(1, round((math.sqrt(796**2 + 4 * elements) - 796) / 2))
    return [(784, h), (h,), (h, h), (h,), (h, 10), (10,)]


def named(compressor: Compressor) -> str:
    """As rows call it: the name alone, where all fields are as they are by default."""
    ordinary = not compressor.model_dump(exclude_defaults=True)
    return type(compressor).__name__ if ordinary else repr(compressor)


class _Case:
    """A compressor and its data, in the process that measures."""

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
        """Encoding and decoding; finds bytes and error."""
        tensor, key = self.tensors[0], self.states[0]
        encode, decode = (compiled(self.compressor, name) for name in ("encode", "decode"))
        payload = encode(tensor, key)
        self.bytes = nbytes(payload)
        self.error = self._error([decode(payload)])
        return {"encode": lambda: encode(tensor, key), "decode": lambda: decode(payload)}

    def _reduction(self) -> dict[str, Work]:
        """A whole step; finds bytes and error of the first one."""
        self.bytes = 0
        sent = []
        for index, tensor in enumerate(self.tensors):
            reduction = self.compressor.reduce(tensor, self.states[index])
            answer = None
            try:
                while True:
                    request = reduction.send(answer)
                    self.bytes += _handed_over(request)
                    answer = reply_to([request])
            except StopIteration as end:
                sent.append(end.value.sent)
                self.states[index] = end.value.state
        self.error = self._error(sent)
        return {"reduce": self._reduce}

    def _reduce(self) -> None:
        """A step of one rank; states go on."""
        for index, tensor in enumerate(self.tensors):
            one = reduce_all(self.compressor, [tensor], [self.states[index]])[0]
            self.states[index] = one.state

    def _error(self, sent: Sequence[Tensor]) -> float | None:
        if self.compressor.votes:
            return None
        found = np.concatenate([np.ravel(tensor) for tensor in sent])
        return float(np.linalg.norm(found - self.raw) / np.linalg.norm(self.raw))

    def repeat(self) -> None:
        """Each work and a copy, in turns."""
        turns: dict[str, list[float]] = {what: [] for what in ("copy", *self.works)}
        for _ in range(CALLS):
            # A copy is the least that any code on these bytes can take.
            turns["copy"].append(_seconds(lambda: np.copyto(self.copy, self.raw)))
            for what, work in self.works.items():
                turns[what].append(_seconds(work))
        # A ratio to the copies of the same repeat: the machine was as fast for both.
        copy = float(np.median(turns.pop("copy")))
        for what, seconds in turns.items():
            median = float(np.median(seconds))
            self.seconds[what].append(median)
            self.ratios[what].append(median / copy)

    def rows(self) -> list[Row]:
        """What came out, a row a kind of work."""
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


def _handed_over(request: Request) -> int:
    """Bytes of a request."""
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
    """The rows of `measure`, with as many threads as this process has."""
    cases = [_Case(parse(each), elements) for each in compressors]
    for case in cases:
        for work in case.works.values():
            work()  # compiles what is not yet
    for _ in range(repeats):
        for case in cases:
            case.repeat()
    return [row for case in cases for row in case.rows()]


def main() -> None:
    """`python -m labkit.bench.compression TASK`: measures, and writes the rows as one line."""
    print(json.dumps(in_this_process(**json.loads(sys.argv[1]))))


@click.command("compression")
@click.option(
    "--compressors",
    "chosen",
    callback=compressors,
    help="QSGD,'{name: TopK, threshold: exact}'; default: all that need no fields.",
)
@click.option("--elements", default=5_800_000, show_default=True, help="Of the float32 vector.")
@click.option("--repeats", default=5, show_default=True)
@AS_JSON
def command(chosen: list[Compressor], elements: int, repeats: int, file: Path | None) -> None:
    """Time every compressor on one thread, beside a copy of the same bytes."""
    rows = measure(chosen or None, elements, repeats)
    errors = ["" if row["error"] is None else f"{row['error']:.2%}" for row in rows]
    columns = {"case": "compressor", "what": "what"} | TIMES
    columns |= {"to_copy": "copies", "bytes": "bytes", "ratio": "ratio", "lost": "error"}
    shown = [row | {"lost": error} for row, error in zip(rows, errors, strict=True)]
    say(format_rows(shown, columns))
    write_rows(rows, file)


if __name__ == "__main__":
    main()
