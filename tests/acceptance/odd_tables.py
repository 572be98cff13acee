"""Parquet files that are small on disk, but large or unusual in memory."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from labkit.records import store

MANY = 60_000


def bombs() -> Iterator[tuple[str, bytes]]:
    """Yield unusual tables: the table's name with a description, and the Parquet file."""
    yield from _large()
    yield from _histories()
    yield from _others()


def _packed(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", **options)
    return sink.getvalue()


def _history(rows: int, **columns: Any) -> bytes:
    made = {name: np.zeros(rows, kind) for name, kind in store.HISTORY_COLUMNS.items()}
    return _packed(pa.table(made | columns))


def _large() -> Iterator[tuple[str, bytes]]:
    yield "history: 300,000,000 rows", _packed(pa.table({"step": np.zeros(300_000_000, np.int8)}))
    text = pa.DictionaryArray.from_arrays(np.zeros(1_000_000, np.int32), pa.array(["t" * 100_000]))
    events = dict.fromkeys(("rank", "step", "bucket"), np.zeros(1_000_000, np.int64))
    times = dict.fromkeys(("start", "stop"), np.zeros(1_000_000))
    table = _packed(pa.table({"kind": text, **events, **times}), store_schema=False)
    yield "timeline: a text of 100,000 letters a million times", table
    lists = pa.array([np.zeros(100_000_000, np.int8)])
    yield "microscope: lists of 100,000,000", _packed(pa.table({"layer": lists}))
    wide = pa.table({f"c{n}": [1] for n in range(20_000)})
    yield "layers: 20,000 columns", _packed(wide)


def _histories() -> Iterator[tuple[str, bytes]]:
    each = np.arange(MANY)
    yield "history: each row of another seed and step", _history(MANY, seed=each, step=each)
    yield "history: 60,000 ranks", _history(MANY, rank=each)
    yield "history: steps of 18 digits", _history(9, step=np.arange(9) * 10**17)
    yield "history: negative steps", _history(9, step=-np.arange(9))
    yield "history: infinite losses", _history(9, loss=np.full(9, np.inf))
    tiny, far = np.full(9, 1e-300), np.linspace(1e-300, 1e300, 9)
    yield (
        "history: bytes of 600 decades",
        _history(9, step=np.arange(9), wire_bytes=far, seconds=tiny),
    )
    yield "history: texts", _history(9, codec_seconds=["x"] * 9)
    yield "history: empty", _history(0)
    yield "history: no file", b"PAR1" * 5


def _others() -> Iterator[tuple[str, bytes]]:
    looks = dict.fromkeys(("relative_error", "cosine", "residual_norm"), np.ones(MANY))
    looks |= dict.fromkeys(("bits_per_parameter", "fraction_sent"), np.ones(MANY))
    places = dict.fromkeys(("step", "rank", "bucket"), np.ones(MANY, np.int64))
    names = [f"layer {n}" for n in range(MANY)]
    yield "microscope: 60,000 layers", _packed(pa.table({"layer": names, **places, **looks}))
    few = {name: values[:9] for name, values in (places | looks).items()}
    yield "microscope: numbers as layers", _packed(pa.table({"layer": np.arange(9), **few}))
    gaps = {"rank": [None, 1], "kind": ["step", None], "step": [1, 2], "bucket": [1, 1]}
    ends = {"start": [0.0, np.nan], "stop": [1.0, np.inf]}
    yield "timeline: ranks of gaps", _packed(pa.table(gaps | ends))
    each = np.arange(MANY)
    many = {"rank": each, "kind": ["step"] * MANY, "step": each, "bucket": np.zeros(MANY, int)}
    times = {"start": np.zeros(MANY), "stop": np.ones(MANY)}
    yield "timeline: 60,000 ranks", _packed(pa.table(many | times))
