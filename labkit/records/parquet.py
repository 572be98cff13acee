"""A reader of runs' Parquet tables, which limits their declared size and their unpacked size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from labkit.common.canonical_json import NotPlain

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MAX_CELLS = 2**25  # One step of one rank has about 20 values in a table.
MAX_COLUMNS = 1_000
MAX_BYTES = 2**29  # The constant MAX_BYTES is the maximum size of a table's unpacked data.
TEXT_BATCH_ROWS, NUMBER_BATCH_ROWS = (
    2**8,
    2**14,
)
MAX_SCHEMA_BYTES = 2**20  # Each name in a Parquet schema, and its metadata, may have at most 1 MiB.
MAX_INTEGER = 2**53  # Floats represent all integers up to 2**53 exactly.
# A table has at most 20 combinations of seed and step per row. Small tables may have more
# combinations per row.
MAX_SPARSITY = 20
# No value may be missing in the index columns, because they identify a row.
INDEX_COLUMNS = {"seed", "rank", "step", "epoch", "bucket", "server", "worker", "update", "version"}
# Labkit rejects Parquet encodings that labkit does not write. A short file with such an encoding
# could expand to very long texts.
ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}


def read_parquet(content: bytes) -> pa.Table:
    """Return the table of numbers, booleans and texts that a Parquet file contains.

    Raises:
        NotPlain: The table exceeds a limit or has columns that labkit does not write.
        pyarrow.ArrowException, OSError, ValueError: The file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    limits = {"thrift_string_size_limit": MAX_SCHEMA_BYTES, "thrift_container_size_limit": 10**6}
    file = pq.ParquetFile(pa.BufferReader(content), **limits)
    if reason := _size_problem(file.metadata) or _schema_problem(file.schema_arrow):
        raise NotPlain(reason)
    # Text columns are read as dictionaries, so that a repeated text occupies memory only once.
    texts = [field.name for field in file.schema_arrow if _is_text(field.type)]
    file = pq.ParquetFile(pa.BufferReader(content), read_dictionary=texts, **limits)
    return _read_bounded(file)


def _read_bounded(file: pq.ParquetFile) -> pa.Table:
    """Return a file's table, or raise an error as soon as its unpacked size exceeds the limit.

    Arrow checks the unpacked size of a page only against the size in the page's own header.
    A file's footer may thus declare a small size for a column that has gigabytes.
    """
    import pyarrow as pa

    columns, size = {}, 0
    for field in file.schema_arrow:
        name, parts = field.name, []
        rows = TEXT_BATCH_ROWS if pa.types.is_dictionary(field.type) else NUMBER_BATCH_ROWS
        for batch in file.iter_batches(rows, columns=[name], use_threads=False):
            size += _size(batch.column(name))
            if size > MAX_BYTES:
                raise NotPlain(f"unpacks to more than {MAX_BYTES:,} bytes")
            parts.append(batch.column(name).cast(_plain(field.type)))
        columns[name] = pa.chunked_array(parts, _plain(field.type))
    return pa.table(columns)


def column_problem(table: pa.Table, columns: Mapping[str, str]) -> str | None:
    """Return a description of what is wrong with a table's columns, or None if they are valid.

    Args:
        table: Table that `read_parquet` returned.
        columns: Required columns with their pandas types; all other columns must contain numbers.
    """
    if missing := columns.keys() - set(table.column_names):
        return f"has no {', '.join(sorted(missing))}"
    for name in table.column_names:
        if reason := _type_problem(
            table[name], columns.get(name, "float64"), name in INDEX_COLUMNS
        ):
            return f"has no {reason} in {name}"
    seeds, steps = (_distinct(table, name) for name in ("seed", "step"))
    if seeds * steps > MAX_SPARSITY * table.num_rows + MAX_CELLS // 64:
        return f"has {seeds:,} seeds and {steps:,} steps, but only {table.num_rows:,} rows"
    return None


def _type_problem(column: pa.ChunkedArray, kind: str, is_place: bool) -> str | None:
    """Return the name of the required type if a column has another type, and otherwise None."""
    import pyarrow as pa
    import pyarrow.compute as pc

    types = pa.types
    is_whole = types.is_integer(column.type)
    # If an optional text is missing in all rows, its Parquet column has the type null.
    if types.is_null(column.type) and not is_place:
        return None
    if kind == "object":
        return None if _is_text(column.type) else "texts"
    if kind != "int64":
        # A column of numbers may contain integers, which pandas converts to floats if values are
        # missing.
        is_numeric = is_whole or types.is_floating(column.type) or types.is_boolean(column.type)
        return None if is_numeric else "numbers"
    if not is_whole or (is_place and column.null_count):
        return "whole numbers"
    bounds = pc.min_max(column).as_py().values()
    return (
        None
        if all(bound is None or abs(bound) < MAX_INTEGER for bound in bounds)
        else "small numbers"
    )


def _distinct(table: pa.Table, name: str) -> int:
    import pyarrow.compute as pc

    return int(pc.count_distinct(table[name]).as_py()) if name in table.column_names else 0


def _size_problem(metadata: pq.FileMetaData) -> str | None:
    """Return a description of a declared size that exceeds a limit, or None if all are allowed."""
    if metadata.num_columns > MAX_COLUMNS:
        return f"has {metadata.num_columns:,} columns; allowed: at most {MAX_COLUMNS:,}"
    if (
        metadata.num_rows * metadata.num_columns > MAX_CELLS
        or metadata.num_row_groups > MAX_CELLS // 64
    ):
        return (
            f"has {metadata.num_rows:,} rows of {metadata.num_columns} columns, which are too many"
        )
    cells = size = 0
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(index)
            cells, size = cells + chunk.num_values, size + chunk.total_uncompressed_size
            if odd := set(chunk.encodings) - ENCODINGS:
                return f"has a column in the encoding {min(odd)}, which labkit does not write"
            if cells > MAX_CELLS or size > MAX_BYTES:
                return f"unpacks to more than {MAX_CELLS:,} values or {MAX_BYTES:,} bytes"
    return None


def _schema_problem(schema: pa.Schema) -> str | None:
    import pyarrow as pa

    if len(set(schema.names)) < len(schema.names):
        return "has two columns with the same name"
    for field in schema:
        kind = field.type
        plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)
        if not (plain or pa.types.is_boolean(kind) or _is_text(kind)):
            return f"has a column of type {str(kind)[:60]}; allowed: numbers, booleans and texts"
    return None


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _plain(kind: Any) -> Any:
    import pyarrow as pa

    return pa.string() if pa.types.is_dictionary(kind) else kind


def _size(part: pa.Array) -> int:
    """Return the unpacked size of an array in bytes, in which each repetition of a text counts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(part.type):
        return int(part.nbytes)
    lengths = pc.sum(pc.take(pc.binary_length(part.dictionary), part.indices)).as_py() or 0
    return int(part.indices.nbytes + lengths)
