"""Check whether the text of an executed notebook agrees with its results, by three rules."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.units import plural
from labkit.jobs import cells
from labkit.jobs.cells import NotebookCell
from labkit.jobs.gallery.evidence import Evidence, Number, numbers
from labkit.jobs.gallery.index_entry import GallerySpec, outputs
from labkit.jobs.parameters import Values, declared, known_values, read_text, read_yaml
from labkit.records.run import load_runs
from labkit.records.store import Record

# The pattern `_N` matches a number, with its unit if it has one. The function `numbers` converts
# each unit to its base unit. Values in ms and s are therefore comparable.
_UNIT = r" ?(?:%|x|×|µs|[mn]?s|[KMG]?i?B|samples/s)"
_N = rf"(?<![\w.,])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?:{_UNIT})?(?![\w])"
_SPREAD = rf"(?:spread |repeats |p10 to p90 |\d+ seeds, )?({_N}) to ({_N})\)"


class Claim(NamedTuple):
    """A rule for sentences: a regular expression, and a condition on the numbers it captures.

    Attributes:
        form: Regular expression for a sentence with a conclusion; its groups capture the numbers.
        holds: Function of the captured numbers that returns whether the conclusion holds.
        words: Description of the condition, for error messages.
    """

    form: re.Pattern[str]
    holds: Callable[..., bool]
    words: str


def _rule(form: str, holds: Callable[..., bool], words: str) -> Claim:
    return Claim(re.compile(form), holds, words)


# The conditions in `RULES` include equality, because notebooks quote rounded numbers. The exact
# value of a quoted 1.00 may be above or below 1.
RULES = (
    _rule(
        rf"({_N})[^.;:()\d]{{0,40}} \({_SPREAD}",
        lambda a, b, c: b <= a <= c,
        "the value must lie within its range",
    ),
    _rule(
        rf"\({_SPREAD}[^:.()]*: it pays",
        lambda a, b: a >= 1,
        "'it pays' requires that the whole range is above 1",
    ),
    _rule(
        rf"\({_SPREAD}[^:()]*: it does not pay",
        lambda a, b: b <= 1,
        "'it does not pay' requires that the whole range is below 1",
    ),
    _rule(
        rf"\({_SPREAD}[^:()]*: no difference",
        lambda a, b: a <= 1 <= b,
        "'no difference' requires that the range includes 1",
    ),
    _rule(
        rf"\({_SPREAD}: faster",
        lambda a, b: b <= 1,
        "'faster' requires that the whole range of time ratios is below 1",
    ),
    _rule(
        rf"\({_SPREAD}: slower",
        lambda a, b: a >= 1,
        "'slower' requires that the whole range of time ratios is above 1",
    ),
    _rule(
        r"(?<![\d.,])(\d+) of (\d+)\b", lambda a, b: a <= b, "the part must not exceed the total"
    ),
    _rule(
        rf"({_N}) times the fastest", lambda a: a >= 1, "no time can be shorter than the fastest"
    ),
    _rule(
        rf"shortest step[^(]*\*\*[^(]*\(({_N})\), the longest[^(]*\(({_N})\)",
        lambda a, b: a <= b,
        "the shortest step must not be longer than another step",
    ),
    _rule(
        rf"shortest step is that of .*?\*\*, ({_N}) \(.*?the next ({_N})",
        lambda a, b: a <= b,
        "the shortest step must not be longer than another step",
    ),
    _rule(
        rf"still grows: .*? ({_N}) in the last .*?, ({_N}) in",
        lambda a, b: a >= b,
        "a growing norm must be larger at the end",
    ),
    _rule(
        rf"More servers .*: reproduced: .*: ({_N})",
        lambda a: a >= 1,
        "more servers must serve more samples/s",
    ),
    _rule(
        rf"More servers .*: \*\*not\*\* reproduced: .*: ({_N})",
        lambda a: a <= 1,
        "more servers must not serve more samples/s",
    ),
    _rule(
        rf"backup worker .*: reproduced: .*?: ({_N})",
        lambda a: a <= 1,
        "the step must be shorter with a backup worker",
    ),
    _rule(
        rf"backup worker .*: \*\*not\*\* reproduced: .*?: ({_N})",
        lambda a: a >= 1,
        "the step must not be shorter with a backup worker",
    ),
)
# The summary of a notebook may claim a "shortest step". Such a claim must agree with the values in
# the summary's other lines. Each pattern in `LEAST` finds the values to which one claim refers.
LEAST = {
    "least memory on a rank": rf"keeps ({_N})",
    "shortest step": rf"a step takes ({_N})",
    "least traffic of the runs that send": rf"sends ({_N})",
}
_NOTHING = re.compile(r"(?<![\w.])(?:nan|inf|NaN|None|NaT)(?![\w.])")


def contradictions(reading: str) -> Iterator[str]:
    """Yield a description of each conclusion that contradicts the numbers in its sentence."""
    for line in reading.splitlines():
        if match := _NOTHING.search(line):
            yield f"{match[0]!r} is not a result: {line}"
        for rule in RULES:
            for match in rule.form.finditer(line):
                if not rule.holds(*map(_value, match.groups())):
                    yield f"{match[0]!r}: {rule.words}"
    yield from _extremes(reading)


def _extremes(reading: str) -> Iterator[str]:
    for words, form in LEAST.items():
        named = re.search(rf"(?i){words}: \*\*(.+?)\*\*", reading)
        lines = re.finditer(rf"(?m)^- \*\*(.+?)\*\*: .*?{form}", reading)
        values = {line[1]: _value(line[2]) for line in lines}
        values = {name: value for name, value in values.items() if value or "traffic" not in words}
        if named and values and values.get(named[1], -1) != min(values.values()):
            yield f"{named[0]!r}: the minimum is {min(values, key=lambda name: values[name])}"


def _value(text: str) -> float:
    """Return a quoted number in base units, or NaN (which satisfies no rule) for invalid text."""
    number = next(numbers(text.lstrip("-")), None)
    value = math.nan if number is None else number.value
    return -value if text.startswith("-") else value


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


# The file check.yaml, in the folder of the notebooks, contains sets of small parameter values.
VALUES = "check.yaml"
# A test of the check itself needs false numbers. labkit multiplies true numbers by the factors in
# `PLANTED` to make false numbers.
PLANTED = (0.8, 0.9, 1.1, 1.2)


@dataclass(frozen=True)
class NotebookVerdict:
    """Result of the check of an executed notebook.

    Attributes:
        faults: Descriptions of all statements that do not hold.
        sentences: Number of sentences in the outputs of the notebook.
        number_count: Total number of measured numbers in the sentences of the notebook's outputs.
        detected_share: Fraction of deliberately falsified numbers that the check detects.
    """

    faults: tuple[str, ...]
    sentences: int
    number_count: int
    detected_share: float

    def __str__(self) -> str:
        if not self.number_count:
            return f"{plural(self.sentences, 'sentence')} without a measured number"
        return (
            f"{plural(self.sentences, 'sentence')}, {plural(self.number_count, 'number')}; "
            "the check would detect "
            f"{self.detected_share:.0%} of wrong numbers"
        )


def check_specs(notebooks: list[Path]) -> list[GallerySpec]:
    """Return one job specification per notebook and per set of parameter values in `check.yaml`.

    A notebook without value sets runs with the default values of its parameters. Each further value
    set lists only the values that differ from the first set.

    Raises:
        InvalidInput: `check.yaml` does not map names of notebooks to lists of value sets.
    """
    specs = []
    for notebook in notebooks:
        file = notebook.parent / VALUES
        value_sets = read_yaml(read_text(file), str(file)) if file.exists() else {}
        sets = value_sets.get(notebook.stem, [{}])
        if (
            not isinstance(sets, list)
            or not sets
            or not all(isinstance(value_set, dict) for value_set in sets)
        ):
            raise InvalidInput(
                f"{file}: {notebook.stem} must be a list of mappings from parameter names to values"
            )
        specs += [GallerySpec(notebook, {**sets[0], **value_set}) for value_set in sets]
    return specs


def check_notebook(spec: GallerySpec, job: Path) -> NotebookVerdict:
    """Check the text of an executed notebook against the results of its job.

    1. The notebook's source contains no measured number. The notebook's prose does not quote the
       default of a parameter that this run has changed.
    2. Each number with decimals or a unit in a sentence needs evidence. The evidence for a number
       is a table, a figure or a record of the run. A number that compares two values may also be a
       ratio. The two numbers of the ratio are in a table, a figure or a record. 3. The conclusion
       of each sentence follows from the numbers in the sentence (see
       `labkit.jobs.gallery.check`).

    Whole numbers without a unit are counts or names; only the rule about conclusions applies to
    them.
    """
    defaults = known_values({n: p.default for n, p in declared(spec.notebook).items()})
    # The record of a notebook job contains its parameter values. The parameter values include the
    # folders of runs that the notebook reads.
    started = job / "params.yaml"
    values: Record = {**defaults, **read_yaml(read_text(started), str(started))}
    written = cells.read(spec.notebook)
    faults = [*measured_numbers(written), *outdated_defaults(written, defaults, spec.values)]
    shown = list(outputs(job / "output.ipynb"))
    runs = load_runs(values["runs"] if spec.reads_runs else job)
    evidence = Evidence(shown, runs, values.get("target_accuracy"))
    lines = [line for output in shown for line in output.text.splitlines() if line.strip()]
    quoted = [(line, number) for line in lines for number in numbers(line) if not number.counts]
    faults += [
        f"{number.text!r} is in no table, figure or record of the run: {line}"
        for line, number in quoted
        if not evidence.contains(number)
    ]
    faults += [fault for output in shown for fault in contradictions(output.text)]
    fakes = [planted for _, number in quoted for planted in _wrong_numbers(number)]
    detected_share = sum(not evidence.contains(number) for number in fakes) / max(len(fakes), 1)
    return NotebookVerdict(tuple(faults), len(lines), len(quoted), detected_share)


def _wrong_numbers(number: Number) -> Iterator[Number]:
    """Yield false numbers that differ from the true number even when rounded like it."""
    for factor in PLANTED:
        if abs(factor - 1) * number.value > 2 * number.half:
            yield number._replace(value=factor * number.value)
