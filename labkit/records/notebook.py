"""Executed notebooks as their files have them: bounded, and of the shape that readers expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError, short
from labkit.common.safe_files import UnsafeFile, read_file
from labkit.common.safe_json import NotPlain, read_plain_json
from labkit.records.store import Record

LONGEST_NOTEBOOK = 2**27  # bytes; one full of figures has some ten millions


def read_notebook(path: Path) -> Record:
    """Return the record of an executed notebook of format 4.

    Raises:
        FileNotFoundError: it does not exist.
        LabkitError: it cannot be read, or is no such notebook.
    """
    try:
        # A job's folder may be a stranger's: no link is followed there.
        found = read_plain_json(read_file(path, LONGEST_NOTEBOOK), strict=False)
        if reason := _unlike_notebook(found):
            raise NotPlain(reason)
    except (FileNotFoundError, UnsafeFile):
        raise
    except (NotPlain, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LabkitError(f"{path.parent.name}/{path.name} {reason}") from error
    record: Record = dict(found) if isinstance(found, dict) else {}
    return record


def notebook_bytes(path: Path) -> bytes:
    """Return what a notebook's file holds.

    Raises:
        FileNotFoundError: it does not exist.
        NotPlain: it cannot be read, or is longer than notebooks are.
    """
    try:
        if not path.is_file():  # a pipe would be waited for
            raise FileNotFoundError(f"no file {path}")
        if (size := path.stat().st_size) > LONGEST_NOTEBOOK:
            raise NotPlain(f"has {size:,} bytes; a notebook has at most {LONGEST_NOTEBOOK:,}")
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotPlain(f"cannot be read: {error.strerror}") from error


def _unlike_notebook(value: JSON) -> str | None:
    """Return what readers would miss in a notebook, or None."""
    cells = value.get("cells") if isinstance(value, dict) else None
    if not isinstance(cells, list):
        return "is not a notebook of format 4: it has no list of cells"
    return next((reason for cell in cells if (reason := _odd_cell(cell))), None)


def _odd_cell(cell: Any) -> str | None:
    fields = {"cell_type": str, "metadata": dict, "source": str | list}
    odd = not isinstance(cell, dict) or not all(
        isinstance(cell.get(name), kind) for name, kind in fields.items()
    )
    if odd:
        return f"is not a notebook of format 4: {short(cell)} is no cell"
    tags, outputs = cell["metadata"].get("tags", []), cell.get("outputs", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        return f"has a cell with the tags {short(tags)}"
    if not isinstance(outputs, list) or not all(map(_is_output, outputs)):
        return f"has a cell with the outputs {short(outputs)}"
    return None


def _is_output(output: Any) -> bool:
    return isinstance(output, dict) and isinstance(output.get("data", {}), dict)
