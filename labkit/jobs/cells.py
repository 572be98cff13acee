"""The cells of a notebook file; only the fields that labkit reads are validated."""

from __future__ import annotations

import io
import json
import re
import tokenize
import warnings
from pathlib import Path
from typing import NamedTuple

from labkit.common.canonical_json import JSON, NotPlain, read_plain_json
from labkit.common.errors import InvalidInput, short
from labkit.records.executed_notebook import notebook_bytes

# The library jupytext reads notebook files with the suffixes .py, .md and .myst.
SCRIPTS = (".py", ".md", ".myst")
_HEAD = re.compile(r"\A---\n(.*\n)*?(jupytext|kernelspec):|^`{3,}\{code-cell\}", re.MULTILINE)
# The pattern `_OLD_FORMAT` cannot match inside the text of a cell, because JSON escapes quotes
# inside strings.
_OLD_FORMAT = re.compile(r'"nbformat"\s*:\s*[123]\b')
_COOKIE = re.compile(r"\A(#.*\n)?[ \t\f]*#.*?coding[:=].*\n")
_PYTHON = ("", "python", "python3")


class NotebookCell(NamedTuple):
    """A notebook cell: its type ("code", "markdown" or another), its source and its tags."""

    kind: str
    source: str
    tags: list[str]


def read(notebook: Path) -> list[NotebookCell]:
    """Return the cells of a notebook file.

    Raises:
        InvalidInput: The file is missing, or it is not a notebook of format 4.
    """
    return parse(text(notebook), notebook)


def text(notebook: Path) -> str:
    """Return a notebook as JSON of format 4; jupytext converts .py and .md files.

    Raises:
        InvalidInput: The file is missing or unreadable.
    """
    try:
        content = notebook_bytes(notebook)
        if notebook.suffix.lower() in SCRIPTS:
            return _from_script(content, notebook.suffix.lower())
        # The notebook file may begin with a byte order mark. Some Windows shells write notebook
        # files in UTF-16.
        decoded = content.decode(json.detect_encoding(content))
        return _upgrade(decoded) if _OLD_FORMAT.search(decoded) else decoded
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidInput(
            f"there is no notebook {_display_path(notebook)}; give the path of an .ipynb file, or "
            "of a .py or .md file of jupytext"
        ) from None
    except NotPlain as error:
        raise InvalidInput(f"{_display_path(notebook)} {error}") from error
    # A ValueError means that the file has a wrong encoding, or that its path contains a NUL
    # character. A SyntaxError means that a script declares an unknown encoding in its first lines.
    except (OSError, ValueError, SyntaxError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{_display_path(notebook)} cannot be read: {reason}") from error


def _from_script(content: bytes, suffix: str) -> str:
    """Convert a script with `# %%` cells, or Markdown with `{code-cell}` blocks, to JSON."""
    encoding = "utf-8-sig"
    if suffix == ".py":  # a script may declare its encoding: `# -*- coding: latin-1 -*-`
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    script = io.StringIO(content.decode(encoding), newline=None).read()
    # Jupytext rejects a script that declares another encoding than UTF-8, even if the text is
    # already decoded.
    if not encoding.startswith("utf-8"):
        script = _COOKIE.sub(r"\1", script)
    if suffix != ".py" and not _HEAD.search(script):
        raise NotPlain("is not a notebook, because jupytext's header (`jupytext:`) is missing")
    import jupytext
    import yaml

    try:
        return str(jupytext.writes(jupytext.reads(script, fmt=suffix[1:]), fmt="ipynb"))
    # The library jupytext raises a YAMLError, LookupError or TypeError if the header of the
    # notebook is invalid.
    except (yaml.YAMLError, LookupError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise NotPlain(f"is not a notebook of jupytext: {reason}") from error


def _upgrade(text: str) -> str:
    """Convert a notebook of format 1, 2 or 3 to format 4."""
    import nbformat

    return str(nbformat.writes(nbformat.reads(text, as_version=4)))


def parse(content: str, notebook: Path) -> list[NotebookCell]:
    """Return the cells of the notebook text `content`; error messages name its path `notebook`.

    Raises:
        InvalidInput: The text is not a notebook of format 4, or its language is not Python 3.
    """
    try:
        # The function does not use nbformat. The import of nbformat takes longer than all other
        # work of the function.
        record = read_plain_json(content.encode(), strict=False)
        cells = [_cell(cell) for cell in _list_of("cells", _field(record, "cells"))]
        metadata = _record(_record(record).get("metadata", {}))
        if (major := _record(record).get("nbformat", 4)) != 4:
            raise ValueError(f"its format is {short(major)}")
        names = ("kernelspec", "language_info", "papermill")
        spec, info, _ = (_record(metadata.get(name) or {}) for name in names)
    except ValueError as error:
        reason = str(error)
        raise InvalidInput(
            f"{_display_path(notebook)} is not a notebook of format 4: {reason}"
        ) from None
    _validate_language(spec, info, str(metadata.get("language", "")), notebook)
    return cells


def _validate_language(
    spec: dict[str, JSON], info: dict[str, JSON], old: str, notebook: Path
) -> None:
    """Raise InvalidInput if a notebook's language is not Python 3; warn about other kernels."""
    name, display = (str(spec.get(key) or "") for key in ("name", "display_name"))
    languages = {str(spec.get("language") or ""), str(info.get("name") or ""), old} - {""}
    if not languages and name not in _PYTHON and "py" not in f"{name} {display}".lower():
        raise InvalidInput(
            f"{notebook.name} is for the kernel {short(name)} and names no language; labkit runs "
            "only Python; set kernelspec.language in the notebook's metadata"
        )
    if other_languages := [
        language for language in languages if not language.lower().startswith(("python", "ipython"))
    ]:
        raise InvalidInput(
            f"{notebook.name} is a notebook in {other_languages[0]} (kernel {short(name)}); labkit "
            "runs only Python; run it with papermill, or save it with a Python kernel"
        )
    if name == "python2" or str(info.get("version", "")).startswith("2."):
        raise InvalidInput(
            f"{notebook.name} is a notebook in Python 2; labkit runs only Python 3; translate it "
            "with 2to3, and save it with a Python 3 kernel"
        )
    if name not in _PYTHON:
        warnings.warn(
            f"{notebook.name} is for the kernel {name!r}; labkit runs it with its own Python",
            stacklevel=2,
        )


def papermill_parameters(notebook: Path) -> dict[str, JSON]:
    """Return the parameter values that papermill recorded in a notebook."""
    record = _record(read_plain_json(text(notebook).encode(), strict=False))
    metadata = _record(record.get("metadata", {}))
    parameters = _record(metadata.get("papermill") or {}).get("parameters", {})
    return parameters if isinstance(parameters, dict) else {}


def _cell(cell: JSON) -> NotebookCell:
    kind, source = _field(cell, "cell_type"), _field(cell, "source")
    metadata = _field(cell, "metadata")
    tags = _field(metadata, "tags") if "tags" in _record(metadata) else []
    lines = [source] if isinstance(source, str) else _list_of("source", source)
    [kind_name, *texts] = [_text(value) for value in [kind, *lines]]
    return NotebookCell(kind_name, "".join(texts), [_text(tag) for tag in _list_of("tags", tags)])


def _record(value: JSON) -> dict[str, JSON]:
    if not isinstance(value, dict):
        raise ValueError(f"{short(value)} is not a record")
    return value


def _field(record: JSON, name: str) -> JSON:
    if name not in _record(record):
        raise ValueError(f"no {name!r} in {short(record)}")
    return _record(record)[name]


def _list_of(name: str, value: JSON) -> list[JSON]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {short(value)}, not a list")
    return value


def _text(value: JSON) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{short(value)} is not a text")
    return value


def _display_path(path: Path) -> str:
    """Return a path for an error message; only the end of a very long path is returned."""
    text = str(path)
    return text if len(text) <= 200 else f"…{text[-200:]}"
