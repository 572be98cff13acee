"""Text that somebody wrote into a notebook: it measures nothing, and names no value of a run."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence

from labkit.common.canonical_json import JSON
from labkit.gallery.evidence import numbers
from labkit.jobs.cells import Cell
from labkit.jobs.parameters import Values

# What is no prose: code, links, the years of a source, and the numbers of a list.
_APART = re.compile(
    r"(?s)```.*?```|`[^`]*`|\]\([^)]*\)|\((?:[^()]*\D)?(?:19|20)\d\d[^()]*\)|(?m:^ *\d+\. )"
)


def measured(cells: Sequence[Cell]) -> Iterator[str]:
    """Numbers with a unit in what stands in a notebook before it runs, a line each.

    Held are its prose and the texts in its code: there they stay the same whatever a run gives.
    """
    for text in _texts(cells):
        for number in numbers(_APART.sub(" ", text)):
            if number.text.strip("0123456789.,"):
                where = _in(text, number.text)
                yield f"{number.text!r} is measured, but stands in the notebook itself: {where}"


def outdated(cells: Sequence[Cell], defaults: Values, values: Values) -> Iterator[str]:
    """Numbers in prose that are the default of a parameter which this run has changed."""
    changed = {name: values[name] for name in values if values[name] != defaults.get(name)}
    for text in _prose(cells):
        for number in numbers(_APART.sub(" ", text)):
            for name, value in changed.items():
                if number.value in _plain(defaults.get(name)) - _plain(value):
                    where = _in(text, number.text)
                    yield f"{number.text} is the default of {name}, here {value!r}: {where}"


def _prose(cells: Sequence[Cell]) -> Iterator[str]:
    return (cell.source for cell in cells if cell.kind == "markdown")


def _texts(cells: Sequence[Cell]) -> Iterator[str]:
    yield from _prose(cells)
    for cell in cells:
        if cell.kind == "code" and "parameters" not in cell.tags:
            for node in ast.walk(ast.parse(cell.source)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def _plain(value: JSON) -> set[float]:
    """The numbers in a parameter's value."""
    return {float(each) for each in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", json.dumps(value))}


def _in(text: str, words: str) -> str:
    """The line of a text in which words stand."""
    return next((line.strip() for line in text.splitlines() if words in line), text.strip())[:160]
