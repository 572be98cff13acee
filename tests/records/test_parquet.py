"""Test that a table that unpacks to gigabytes, or has unknown columns, is refused unread."""

from __future__ import annotations

import io
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from labkit.common.canonical_json import NotPlain
from labkit.records import parquet
from labkit.records.parquet import read_parquet
from labkit.records.shape import TABLES
from labkit.records.store import HISTORY_COLUMNS, read_table

COUNT = 30_000


def history(rows: int, **columns: object) -> pa.Table:
    made = {name: np.zeros(rows, kind) for name, kind in HISTORY_COLUMNS.items()}
    return pa.table(made | columns)


def timeline(rows: int, **columns: object) -> pa.Table:
    places = dict.fromkeys(("rank", "step", "bucket"), np.zeros(rows, np.int64))
    times = dict.fromkeys(("start", "stop"), np.zeros(rows))
    return pa.table({"kind": pa.array(["step"] * rows), **places, **times} | columns)


def texts(rows: int) -> pa.Table:
    """Return a table in which each row holds the same 100,000 letters, stored once."""
    kinds = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array(["t" * 100_000]))
    return timeline(rows, kind=kinds)


@pytest.mark.parametrize(
    ("table", "columns", "reason"),
    [
        (pa.table({"step": np.zeros(40_000_000, np.int8)}), HISTORY_COLUMNS, "too many"),
        (texts(COUNT), TABLES["timeline"], "unpacks to"),
        (pa.table({"a": pa.array([np.zeros(9)])}), HISTORY_COLUMNS, "a column of type list"),
        (pa.table({f"c{n}": [1] for n in range(2_000)}), HISTORY_COLUMNS, "2,000 columns"),
        (
            history(COUNT, seed=np.arange(COUNT), step=np.arange(COUNT)),
            HISTORY_COLUMNS,
            "30,000 seeds and 30,000 steps",
        ),
        (history(2, step=np.array([1, 2**60])), HISTORY_COLUMNS, "no small numbers in step"),
        (history(2, codec_seconds=["x", "y"]), HISTORY_COLUMNS, "no numbers in codec_seconds"),
        (history(2, rank=pa.array([0, None])), HISTORY_COLUMNS, "no whole numbers in rank"),
        (timeline(2, kind=[1, 2]), TABLES["timeline"], "no texts in kind"),
        (timeline(2).drop_columns("stop"), TABLES["timeline"], "has no stop"),
    ],
)
def test_an_odd_table_is_one_line_and_no_rows(
    tmp_path: Path, table: pa.Table, columns: dict[str, str], reason: str
) -> None:
    path = tmp_path / "run" / "t.parquet"
    path.parent.mkdir()
    pq.write_table(table, path, compression="zstd", store_schema=False)
    del table
    tracemalloc.start()
    with pytest.warns(UserWarning, match=f"run/t.parquet.*{reason}") as told:
        assert len(read_table(path, columns)) == 0
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(told) == 1
    assert most < 2**28


def test_a_footer_that_lies_is_found_out_before_the_next_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = io.BytesIO()
    table = pa.table({"kind": [f"{n}" * 1_000 for n in range(1_000)], "step": range(1_000)})
    pq.write_table(table, file, compression="zstd")
    content, footer = file.getvalue(), pq.ParquetFile(file).metadata.row_group(0)
    monkeypatch.setattr(parquet, "MAX_BYTES", 2**20)
    with pytest.raises(NotPlain, match="unpacks to more than 33,554,432 values or 1,048,576 bytes"):
        read_parquet(content)
    told = varint(footer.column(0).total_uncompressed_size)
    assert content.count(told) == 1
    # The replacement has as many bytes and encodes the size zero.
    lie = content.replace(told, b"\x80" * (len(told) - 1) + b"\0")
    # A reader that also decodes this column would report an error.
    place = footer.column(1).dictionary_page_offset
    odd = lie[:place] + b"\xff" * 40 + lie[place + 40 :]
    with pytest.raises(NotPlain, match="unpacks to more than 1,048,576 bytes"):
        read_parquet(odd)


def varint(number: int) -> bytes:
    """Encode a number as in the footer: zigzag, seven bits per byte."""
    number, found = 2 * number, b""
    while number >= 128:
        number, found = number >> 7, found + bytes([number % 128 + 128])
    return found + bytes([number])


def test_a_table_of_labkits_is_read_with_its_texts_and_gaps(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(timeline(3, kind=["step", None, "wait"]), path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kinds = read_table(path, TABLES["timeline"])["kind"]
    assert list(kinds.fillna("none")) == ["step", "none", "wait"]
    pq.write_table(history(2, samples=pa.array([1, None])), path)
    assert read_table(path, HISTORY_COLUMNS)["samples"].count() == 1
