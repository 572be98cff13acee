"""The rules for all notebooks that labkit ships or writes, as a list of violations."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.jobs.parameters import UNKNOWN, parse

THIN = 30  # lines of the longest allowed cell
ABSOLUTE = re.compile(r"""["'(\s](/|~/|[A-Z]:\\)\w+""")


def violations(path: Path) -> list[str]:
    """Return the rules that this notebook breaks, or an empty list."""
    notebook = json.loads(path.read_text())
    cells = notebook["cells"]
    checks = (
        _format(notebook),
        _question(cells),
        _parameters(cells),
        _cells(cells),
        _order(cells),
    )
    return [f"{path.name}: {what}" for check in checks for what in check]


def _format(notebook: dict[str, Any]) -> Iterator[str]:
    if (notebook["nbformat"], notebook["nbformat_minor"]) != (4, 5):
        yield "is not of format 4.5"
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "wants another kernel than python3"
    names = [cell.get("id") for cell in notebook["cells"]]
    if None in names or len(set(names)) < len(names):
        yield "has cells without an id of their own"


def _question(cells: list[dict[str, Any]]) -> Iterator[str]:
    first = "".join(cells[0]["source"]).split("\n")[0]
    if cells[0]["cell_type"] != "markdown" or not re.fullmatch(r"# .+\?", first):
        yield "does not begin with a question"
    calls = [call for cell in _code(cells) for call in _calls("".join(cell["source"]))]
    if not any(name == "summarize" or name.startswith("summarize_") for name in calls):
        yield "has no reading that is made from its numbers"
    tagged = [cell for cell in _code(cells) if "answer" in cell["metadata"].get("tags", [])]
    if len(tagged) != 1 or "summarize" not in "".join(tagged[0]["source"]):
        yield f"has {len(tagged)} readings tagged answer: one is the gallery's"


def _parameters(cells: list[dict[str, Any]]) -> Iterator[str]:
    tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    if len(tagged) != 1:
        yield f"has {len(tagged)} cells tagged parameters"
        return
    source = "".join(tagged[0]["source"])
    for node in ast.parse(source).body:
        if not isinstance(node, ast.AnnAssign | ast.ImportFrom):
            yield f"parameters cell: `{ast.unparse(node)}` is no annotated assignment"
    for name, parameter in parse(source).items():
        if not parameter.help:
            yield f"parameter {name} has no comment"
        if parameter.default is UNKNOWN:
            yield f"parameter {name} has a default that is no plain value"
        elif parameter.convert(parameter.default) != parameter.default:
            yield f"parameter {name} has a default of another type"


def _cells(cells: list[dict[str, Any]]) -> Iterator[str]:
    for cell in cells:
        text = "".join(cell["source"])
        if ABSOLUTE.search(text):
            yield f"names a path of one machine: {text[:60]!r}"
    for cell in _code(cells):
        if cell["outputs"] or cell["execution_count"] is not None:
            yield "has stored outputs"
        if len(cell["source"]) > THIN:
            yield f"has a cell of {len(cell['source'])} lines"


def _order(cells: list[dict[str, Any]]) -> Iterator[str]:
    calls = [call for cell in _code(cells) for call in _calls("".join(cell["source"]))]
    started = calls.index("Cluster") if "Cluster" in calls else len(calls)
    for late in {"Experiment", "replace"} & set(calls[started:]):
        yield f"calls {late} after a cluster has started: build every experiment before"


def _code(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [cell for cell in cells if cell["cell_type"] == "code"]


def _calls(source: str) -> Iterator[str]:
    """Yield the names of the functions that a cell calls, from top to bottom."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        yield getattr(call.func, "attr", getattr(call.func, "id", ""))


# What a notebook that labkit ships tells a learner, in its first and in its last Markdown cell.
AT_THE_BEGINNING = ("**You will learn**", "**Before you start.**")
AT_THE_END = ("## Exercises", "<summary>Solutions</summary>", "**Next notebook.**")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def lessons_missing(path: Path) -> list[str]:
    """Return what this notebook lacks for a learner, and its links to files that do not exist."""
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    missing = [part for part in AT_THE_BEGINNING if part not in texts[0]]
    missing += [part for part in AT_THE_END if part not in texts[-1]]
    missing += [] if any("**Predict.**" in text for text in texts) else ["**Predict.**"]
    links = {link for text in texts for link in LINK.findall(text)}
    return missing + [link for link in sorted(links) if not (path.parent / link).exists()]
