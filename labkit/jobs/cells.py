"""The cells of a notebook as its file has them, checked as far as anything here reads them."""

from __future__ import annotations

import io
import json
import re
import tokenize
import warnings
from pathlib import Path
from typing import NamedTuple

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, short
from labkit.common.safe_json import NotPlain, read_plain_json
from labkit.records.notebook import notebook_bytes

SCRIPTS = (".py", ".md", ".myst")  # jupytext reads the notebooks in these
_HEAD = re.compile(r"\A---\n(.*\n)*?(jupytext|kernelspec):|^`{3,}\{code-cell\}", re.MULTILINE)
_OLD_FORMAT = re.compile(r'"nbformat"\s*:\s*[123]\b')  # quotes in a text of JSON have a backslash
_COOKIE = re.compile(r"\A(#.*\n)?[ \t\f]*#.*?coding[:=].*\n")
_PYTHON = ("", "python", "python3")


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
    """A notebook as JSON of format 4; of a .py or .md file, what jupytext reads in it.

    Raises:
        InvalidInput: there is no such file, or it cannot be read.
    """
    try:
        content = notebook_bytes(notebook)
        if notebook.suffix.lower() in SCRIPTS:
            return _from_script(content, notebook.suffix.lower())
        # A byte order mark, and UTF-16, which some shells of Windows write.
        found = content.decode(json.detect_encoding(content))
        return _upgrade(found) if _OLD_FORMAT.search(found) else found
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidInput(
            f"no notebook {_shown(notebook)}: give the path of an .ipynb file, or of jupytext's "
            ".py or .md"
        ) from None
    except NotPlain as error:
        raise InvalidInput(f"{_shown(notebook)} {error}") from error
    # ValueError: not the encoding that it should be, or a path with a NUL; SyntaxError: an unknown
    # encoding in the first lines of a script.
    except (OSError, ValueError, SyntaxError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{_shown(notebook)} cannot be read: {reason}") from error


def _from_script(content: bytes, suffix: str) -> str:
    """The notebook in a script with cells (`# %%`), or in a text with `{code-cell}` blocks."""
    encoding = "utf-8-sig"
    if suffix == ".py":  # as Python reads it: `# -*- coding: latin-1 -*-`
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    script = io.StringIO(content.decode(encoding), newline=None).read()
    if not encoding.startswith("utf-8"):  # jupytext reads nothing else, and by now it is a text
        script = _COOKIE.sub(r"\1", script)
    if suffix != ".py" and not _HEAD.search(script):
        raise NotPlain("is a text and no notebook: jupytext's header (`jupytext:`) is missing")
    import jupytext
    import yaml

    try:
        return str(jupytext.writes(jupytext.reads(script, fmt=suffix[1:]), fmt="ipynb"))
    except (yaml.YAMLError, LookupError, TypeError) as error:  # in a header
        reason = " ".join(str(error).split())
        raise NotPlain(f"is not a notebook of jupytext's: {reason}") from error


def _upgrade(found: str) -> str:
    """A notebook of format 1 to 3 as one of format 4."""
    import nbformat

    return str(nbformat.writes(nbformat.reads(found, as_version=4)))


def parse(text: str, notebook: Path) -> list[Cell]:
    """The cells of a notebook's text; `notebook` names it in an error.

    Raises:
        InvalidInput: it is no notebook of format 4, or of another language than Python 3.
    """
    try:
        # Plain JSON: nbformat takes longer to import than all else that is done here.
        record = read_plain_json(text.encode(), strict=False)
        found = [_cell(cell) for cell in _listed("cells", _field(record, "cells"))]
        metadata = _record(_record(record).get("metadata", {}))
        if (major := _record(record).get("nbformat", 4)) != 4:
            raise ValueError(f"its format is {short(major)}")
        names = ("kernelspec", "language_info", "papermill")
        spec, info, _ = (_record(metadata.get(name) or {}) for name in names)
    except ValueError as error:
        reason = str(error)
        raise InvalidInput(f"{_shown(notebook)} is not a notebook of format 4: {reason}") from None
    _check_language(spec, info, str(metadata.get("language", "")), notebook)
    return found


def _check_language(spec: dict[str, JSON], info: dict[str, JSON], old: str, notebook: Path) -> None:
    """Refuse what this Python would run as if it were its own; name a kernel that it stands for."""
    name, display = (str(spec.get(key) or "") for key in ("name", "display_name"))
    languages = {str(spec.get("language") or ""), str(info.get("name") or ""), old} - {""}
    if not languages and name not in _PYTHON and "py" not in f"{name} {display}".lower():
        raise InvalidInput(
            f"{notebook.name} is for the kernel {short(name)} and names no language; labkit runs "
            "Python: set kernelspec.language in its metadata"
        )
    if other := [each for each in languages if not each.lower().startswith(("python", "ipython"))]:
        raise InvalidInput(
            f"{notebook.name} is a notebook in {other[0]} (kernel {short(name)}); labkit runs "
            "Python: run it with papermill, or choose a Python kernel and save it"
        )
    if name == "python2" or str(info.get("version", "")).startswith("2."):
        raise InvalidInput(
            f"{notebook.name} is a notebook in Python 2; labkit runs Python 3: translate it with "
            "2to3, choose a Python 3 kernel and save it"
        )
    if name not in _PYTHON:
        warnings.warn(
            f"{notebook.name} is for the kernel {name!r}; the Python of labkit runs it",
            stacklevel=2,
        )


def papermill_parameters(notebook: Path) -> dict[str, JSON]:
    """What papermill has recorded of the values that it gave a notebook."""
    record = _record(read_plain_json(text(notebook).encode(), strict=False))
    metadata = _record(record.get("metadata", {}))
    found = _record(metadata.get("papermill") or {}).get("parameters", {})
    return found if isinstance(found, dict) else {}


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
