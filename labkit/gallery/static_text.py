"""Check that a notebook's source quotes neither measurements nor outdated defaults."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence

from labkit.common.canonical_json import JSON
from labkit.gallery.evidence import numbers
from labkit.jobs.cells import NotebookCell
from labkit.jobs.parameters import Values

# The pattern `_APART` matches text that is not checked: code, links, citations with years, and list
# numbers.
_APART = re.compile(
    r"(?s)```.*?```|`[^`]*`|\]\([^)]*\)|\((?:[^()]*\D)?(?:19|20)\d\d[^()]*\)|(?m:^ *\d+\. )"
)


def measured_numbers(cells: Sequence[NotebookCell]) -> Iterator[str]:
    """Yield a message for each number with a unit in the source of a notebook.

    The function searches prose and text constants in code, because their numbers stay the same when
    results change.
    """
    for text in _texts(cells):
        for number in numbers(_APART.sub(" ", text)):
            if number.text.strip("0123456789.,"):
                where = _line_with(text, number.text)
                yield f"{number.text!r} is a measured number in the source of the notebook: {where}"


def outdated_defaults(
    cells: Sequence[NotebookCell], defaults: Values, values: Values
) -> Iterator[str]:
    """Yield a message for each number in prose that equals the default of a changed parameter."""
    changed = {name: values[name] for name in values if values[name] != defaults.get(name)}
    for text in _prose(cells):
        for number in numbers(_APART.sub(" ", text)):
            for name, value in changed.items():
                if number.value in _plain(defaults.get(name)) - _plain(value):
                    where = _line_with(text, number.text)
                    yield (
                        f"{number.text} is the default of {name}, which is {value!r} in this run: "
                        f"{where}"
                    )


def _prose(cells: Sequence[NotebookCell]) -> Iterator[str]:
    return (cell.source for cell in cells if cell.kind == "markdown")


def _texts(cells: Sequence[NotebookCell]) -> Iterator[str]:
    yield from _prose(cells)
    for cell in cells:
        if cell.kind == "code" and "parameters" not in cell.tags:
            for node in ast.walk(ast.parse(cell.source)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def _plain(value: JSON) -> set[float]:
    """Return all numbers in the value of a parameter."""
    return {
        float(digits) for digits in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", json.dumps(value))
    }


def _line_with(text: str, words: str) -> str:
    """Return the first line of a text that contains `words`, cut to 160 characters."""
    return next((line.strip() for line in text.splitlines() if words in line), text.strip())[:160]
