"""A notebook's words held against its numbers: three laws, and how much they would notice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labkit.common.errors import InvalidInput
from labkit.common.units import plural
from labkit.gallery.claims import broken
from labkit.gallery.evidence import Evidence, Number, numbers
from labkit.gallery.execution import GallerySpec
from labkit.gallery.index_entry import outputs
from labkit.gallery.static_text import measured, outdated
from labkit.jobs import cells
from labkit.jobs.parameters import declared, known_values, read_text, read_yaml
from labkit.records.run import load_runs
from labkit.records.store import Record

VALUES = "check.yaml"  # beside the notebooks: two sets of small values for each
PLANTED = (0.8, 0.9, 1.1, 1.2)  # times a true number: a false one


@dataclass(frozen=True)
class Verdict:
    """What was found of a notebook that has run.

    Attributes:
        faults: what does not hold, a line each.
        sentences: that were read.
        held: numbers in them that the run shows.
        noticed: share of false numbers, planted one by one, that would not have been shown.
    """

    faults: tuple[str, ...]
    sentences: int
    held: int
    noticed: float

    def __str__(self) -> str:
        if not self.held:
            return f"{plural(self.sentences, 'sentence')} without a measured number"
        return (
            f"{plural(self.sentences, 'sentence')}, {plural(self.held, 'number')}; of false ones "
            "in their places "
            f"{self.noticed:.0%} would be noticed"
        )


def small_values(notebooks: list[Path]) -> list[GallerySpec]:
    """Each notebook with each of its sets in `check.yaml`; with its defaults where it has none.

    A set says what differs from the first one.

    Raises:
        InvalidInput: the file is no YAML of names and lists of values.
    """
    asked = []
    for notebook in notebooks:
        file = notebook.parent / VALUES
        known = read_yaml(read_text(file), str(file)) if file.exists() else {}
        sets = known.get(notebook.stem, [{}])
        if (
            not isinstance(sets, list)
            or not sets
            or not all(isinstance(each, dict) for each in sets)
        ):
            raise InvalidInput(f"{file}: {notebook.stem} needs a list of names and values")
        asked += [GallerySpec(notebook, {**sets[0], **each}) for each in sets]
    return asked


def check(asked: GallerySpec, job: Path) -> Verdict:
    """Hold a notebook's words against what its job gave.

    1. What stands in the notebook itself holds no measured number, and no default of a parameter
       that this run has changed.
    2. A number with decimals or a unit in a sentence is one that the run shows: in a table, a
       figure or a record, or as the factor between two of these where the sentence compares.
    3. What a sentence concludes follows from its numbers (`labkit.gallery.claims`).

    Whole numbers without a unit count and name; they are held by the third law alone.
    """
    defaults = known_values({n: p.default for n, p in declared(asked.notebook).items()})
    # As it was started: a notebook that reads runs was given their folders.
    started = job / "params.yaml"
    values: Record = {**defaults, **read_yaml(read_text(started), str(started))}
    written = cells.read(asked.notebook)
    faults = [*measured(written), *outdated(written, defaults, asked.values)]
    shown = list(outputs(job / "output.ipynb"))
    runs = load_runs(values["runs"] if asked.reads else job)
    evidence = Evidence(shown, runs, values.get("target_accuracy"))
    lines = [line for each in shown for line in each.text.splitlines() if line.strip()]
    said = [(line, number) for line in lines for number in numbers(line) if not number.counts]
    faults += [
        f"{number.text!r} stands in no table, figure or record of the run: {line}"
        for line, number in said
        if not evidence.has(number)
    ]
    faults += [fault for each in shown for fault in broken(each.text)]
    false = [planted for _, number in said for planted in _false(number)]
    noticed = sum(not evidence.has(each) for each in false) / max(len(false), 1)
    return Verdict(tuple(faults), len(lines), len(said), noticed)


def _false(number: Number) -> Iterator[Number]:
    """Numbers that are not this one, in the digits in which it is quoted."""
    for factor in PLANTED:
        if abs(factor - 1) * number.value > 2 * number.half:
            yield number._replace(value=factor * number.value)
