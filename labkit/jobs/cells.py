"""The cells of a notebook as its file has them, checked as far as anything here reads them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, short
from labkit.common.safe_json import NotPlain, read_plain_json
from labkit.records.notebook import notebook_bytes


class Cell(NamedTuple):
    """One cell: "code", "markdown" or another kind, its text, its tags."""

    kind: str
    source: str
    tags: list[str]


def read(notebook: Path) -> list[Cell]:
    """The cells of a notebook file.

    Raises:
        InvalidInput: there is no such file, or it is no notebook of format 4.
    """
    return parse(text(notebook), notebook)


def text(notebook: Path) -> str:
    """A notebook as JSON; of a .py file, the notebook that jupytext reads in it.

    Raises:
        InvalidInput: there is no such file, or it cannot be read.
    """
    try:
        found = notebook_bytes(notebook).decode()
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidInput(
            f"no notebook {_shown(notebook)}: give the path of an .ipynb file, or of jupytext's .py"
        ) from None
    except NotPlain as error:
        raise InvalidInput(f"{_shown(notebook)} {error}") from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a NUL
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{_shown(notebook)} cannot be read: {reason}") from error
    return _from_script(found) if notebook.suffix == ".py" else found


def _from_script(script: str) -> str:
    """The notebook in a script with cells (`# %%`), of which one is tagged `parameters`."""
    import jupytext

    return str(jupytext.writes(jupytext.reads(script, fmt="py"), fmt="ipynb"))


def parse(text: str, notebook: Path) -> list[Cell]:
    """The cells of a notebook's text; `notebook` names it in an error.

    Raises:
        InvalidInput: it is no notebook of format 4.
    """
    try:
        # Plain JSON: nbformat takes longer to import than all else that is done here.
        record = read_plain_json(text.encode(), strict=False)
        return [_cell(cell) for cell in _listed("cells", _field(record, "cells"))]
    except ValueError as error:
        reason = str(error)
    raise InvalidInput(f"{_shown(notebook)} is not a notebook of format 4: {reason}")


def _cell(cell: JSON) -> Cell:
    kind, source = _field(cell, "cell_type"), _field(cell, "source")
    metadata = _field(cell, "metadata")
    tags = _field(metadata, "tags") if "tags" in _record(metadata) else []
    lines = [source] if isinstance(source, str) else _listed("source", source)
    [named, *texts] = [_text(each) for each in [kind, *lines]]
    return Cell(named, "".join(texts), [_text(tag) for tag in _listed("tags", tags)])


def _record(value: JSON) -> dict[str, JSON]:
    if not isinstance(value, dict):
        raise ValueError(f"{short(value)} stands where a record belongs")
    return value


def _field(record: JSON, name: str) -> JSON:
    if name not in _record(record):
        raise ValueError(f"no {name!r} in {short(record)}")
    return _record(record)[name]


def _listed(name: str, value: JSON) -> list[JSON]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {short(value)}, not a list")
    return value


def _text(value: JSON) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{short(value)} stands where text belongs")
    return value


def _shown(path: Path) -> str:
    """A path in an error: of a very long one its end."""
    text = str(path)
    return text if len(text) <= 200 else f"…{text[-200:]}"
