"""Readers of executed notebooks, which check size and structure of untrusted files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.common.canonical_json import JSON, NotPlain, read_plain_json
from labkit.common.errors import LabkitError, short
from labkit.common.files import UnsafeFile, read_file
from labkit.records.store import Record

# The maximum size is about ten times the size of a notebook with many figures.
MAX_NOTEBOOK_BYTES = 2**27


def read_notebook(path: Path) -> Record:
    """Return the JSON object of an executed notebook in format 4.

    Raises:
        FileNotFoundError: If the file does not exist.
        LabkitError: If the file cannot be read, or is not a notebook in format 4.
    """
    try:
        # The folder of a job may belong to another user. The notebook is therefore read without
        # following symbolic links.
        record_json = read_plain_json(read_file(path, MAX_NOTEBOOK_BYTES), strict=False)
        if reason := _notebook_problem(record_json):
            raise NotPlain(reason)
    except (FileNotFoundError, UnsafeFile):
        raise
    except (NotPlain, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LabkitError(f"{path.parent.name}/{path.name} {reason}") from error
    record: Record = dict(record_json) if isinstance(record_json, dict) else {}
    return record


def notebook_bytes(path: Path) -> bytes:
    """Return the bytes of the file of a notebook.

    Raises:
        FileNotFoundError: If the file does not exist.
        NotPlain: If the file cannot be read, or is larger than `MAX_NOTEBOOK_BYTES`.
    """
    try:
        # A read from a named pipe would block, so only regular files are read.
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}")
        if (size := path.stat().st_size) > MAX_NOTEBOOK_BYTES:
            raise NotPlain(f"has {size:,} bytes; a notebook has at most {MAX_NOTEBOOK_BYTES:,}")
        # The function `read_file` opens the file relative to its folder. A notebook that labkit
        # reads is therefore no input of a run (`labkit.common.reads`).
        return read_file(path.resolve())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotPlain(f"cannot be read: {error.strerror}") from error


def _notebook_problem(value: JSON) -> str | None:
    """Return why a JSON value is not a notebook in format 4, or None if it is one."""
    cells = value.get("cells") if isinstance(value, dict) else None
    if not isinstance(cells, list):
        return "is not a notebook of format 4: it has no list of cells"
    return next((reason for cell in cells if (reason := _cell_problem(cell))), None)


def _cell_problem(cell: Any) -> str | None:
    fields = {"cell_type": str, "metadata": dict, "source": str | list}
    odd = not isinstance(cell, dict) or not all(
        isinstance(cell.get(name), kind) for name, kind in fields.items()
    )
    if odd:
        return f"is not a notebook of format 4: {short(cell)} is not a cell"
    tags, outputs = cell["metadata"].get("tags", []), cell.get("outputs", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        return f"has a cell with the invalid tags {short(tags)}"
    if not isinstance(outputs, list) or not all(map(_is_output, outputs)):
        return f"has a cell with the invalid outputs {short(outputs)}"
    return None


def _is_output(output: Any) -> bool:
    return isinstance(output, dict) and isinstance(output.get("data", {}), dict)
