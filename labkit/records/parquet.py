"""Parquet tables of runs, bounded by what they say they hold before anything is unpacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from labkit.common.safe_json import NotPlain

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MOST_CELLS = 2**25  # of a table; a step of a rank has some twenty
MOST_COLUMNS = 1_000
MOST_BYTES = 2**29  # unpacked
FEW_ROWS, MANY_ROWS = 2**8, 2**14  # that are read at a time, of texts and of numbers
LONGEST_SCHEMA = 2**20  # bytes of one name or note
LARGEST = 2**53  # a whole number that stays one among others
SPARSEST = 20  # rows that a table may lack for each that it has, where seeds end at other steps
# Columns that say where a row belongs; none of theirs is empty.
PLACES = {"seed", "rank", "step", "epoch", "bucket", "server", "worker", "update", "version"}
# Others may stand for texts that are far longer than their bytes.
ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}


def read_parquet(content: bytes) -> pa.Table:
    """Return a table of numbers, truths and texts.

    Raises:
        NotPlain: it has more rows or columns, or others, than tables of labkit's.
        pyarrow.ArrowException, OSError, ValueError: it is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    limits = {"thrift_string_size_limit": LONGEST_SCHEMA, "thrift_container_size_limit": 10**6}
    file = pq.ParquetFile(pa.BufferReader(content), **limits)
    if reason := _too_large(file.metadata) or _odd_column(file.schema_arrow):
        raise NotPlain(reason)
    # A text that a thousand rows share is a number in each of them, until its size is known.
    texts = [field.name for field in file.schema_arrow if _is_text(field.type)]
    file = pq.ParquetFile(pa.BufferReader(content), read_dictionary=texts, **limits)
    return _bounded(file)


def _bounded(file: pq.ParquetFile) -> pa.Table:
    """Return a file's table, read bit by bit until it is too large.

    Arrow compares what a page unpacks to with the page's own header, and nothing with the footer:
    by its words a chunk of gigabytes may be a small one.
    """
    import pyarrow as pa

    columns, size = {}, 0
    for field in file.schema_arrow:
        name, parts = field.name, []
        rows = FEW_ROWS if pa.types.is_dictionary(field.type) else MANY_ROWS
        for batch in file.iter_batches(rows, columns=[name], use_threads=False):
            size += _size(batch.column(name))
            if size > MOST_BYTES:
                raise NotPlain(f"unpacks to more than {MOST_BYTES:,} bytes")
            parts.append(batch.column(name).cast(_plain(field.type)))
        columns[name] = pa.chunked_array(parts, _plain(field.type))
    return pa.table(columns)


def wrong_column(table: pa.Table, columns: Mapping[str, str]) -> str | None:
    """Return what is wrong with the columns of a table, or None.

    Args:
        table: as `read_parquet` returns it.
        columns: that it must have, with their types as pandas calls them; others hold numbers.
    """
    if missing := columns.keys() - set(table.column_names):
        return f"has no {', '.join(sorted(missing))}"
    for name in table.column_names:
        if reason := _unlike(table[name], columns.get(name, "float64"), name in PLACES):
            return f"has no {reason} in {name}"
    seeds, steps = (_distinct(table, name) for name in ("seed", "step"))
    if seeds * steps > SPARSEST * table.num_rows + MOST_CELLS // 64:
        return f"has {seeds:,} seeds and {steps:,} steps in only {table.num_rows:,} rows"
    return None


def _unlike(column: pa.ChunkedArray, kind: str, is_place: bool) -> str | None:
    """Return what a column should hold and does not, or None."""
    import pyarrow as pa
    import pyarrow.compute as pc

    types = pa.types
    is_whole = types.is_integer(column.type)
    if types.is_null(column.type) and not is_place:  # such as why a layer is whole, where none is
        return None
    if kind == "object":
        return None if _is_text(column.type) else "texts"
    if kind != "int64":
        # Of whole numbers with gaps pandas makes others.
        fine = is_whole or types.is_floating(column.type) or types.is_boolean(column.type)
        return None if fine else "numbers"
    if not is_whole or (is_place and column.null_count):
        return "whole numbers"
    ends = pc.min_max(column).as_py().values()
    return None if all(end is None or abs(end) < LARGEST for end in ends) else "small numbers"


def _distinct(table: pa.Table, name: str) -> int:
    import pyarrow.compute as pc

    return int(pc.count_distinct(table[name]).as_py()) if name in table.column_names else 0


def _too_large(told: pq.FileMetaData) -> str | None:
    """Return what of a file is beyond the limits by its own words, or None."""
    if told.num_columns > MOST_COLUMNS:
        return f"has {told.num_columns:,} columns; allowed are {MOST_COLUMNS:,}"
    if told.num_rows * told.num_columns > MOST_CELLS or told.num_row_groups > MOST_CELLS // 64:
        return f"has {told.num_rows:,} rows of {told.num_columns} columns; that is too many"
    cells = size = 0
    for group in range(told.num_row_groups):
        for place in range(told.num_columns):
            chunk = told.row_group(group).column(place)
            cells, size = cells + chunk.num_values, size + chunk.total_uncompressed_size
            if odd := set(chunk.encodings) - ENCODINGS:
                return f"has a column in the encoding {min(odd)}; labkit writes none"
            if cells > MOST_CELLS or size > MOST_BYTES:
                return f"unpacks to more than {MOST_CELLS:,} values or {MOST_BYTES:,} bytes"
    return None


def _odd_column(schema: pa.Schema) -> str | None:
    import pyarrow as pa

    if len(set(schema.names)) < len(schema.names):
        return "has two columns of one name"
    for field in schema:
        kind = field.type
        plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)
        if not (plain or pa.types.is_boolean(kind) or _is_text(kind)):
            return f"has a column of {str(kind)[:60]}; labkit writes numbers, truths and texts"
    return None


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _plain(kind: Any) -> Any:
    import pyarrow as pa

    return pa.string() if pa.types.is_dictionary(kind) else kind


def _size(part: pa.Array) -> int:
    """Return the bytes of a part of a column with each of its texts written out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(part.type):
        return int(part.nbytes)
    lengths = pc.sum(pc.take(pc.binary_length(part.dictionary), part.indices)).as_py() or 0
    return int(part.indices.nbytes + lengths)
