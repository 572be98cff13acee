"""Check whether the text of an executed notebook agrees with its results, by three rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labkit.common.errors import InvalidInput
from labkit.common.units import plural
from labkit.gallery.claims import contradictions
from labkit.gallery.evidence import Evidence, Number, numbers
from labkit.gallery.index_entry import outputs
from labkit.gallery.notebook_runs import GallerySpec
from labkit.gallery.static_text import measured_numbers, outdated_defaults
from labkit.jobs import cells
from labkit.jobs.parameters import declared, known_values, read_text, read_yaml
from labkit.records.run import load_runs
from labkit.records.store import Record

VALUES = "check.yaml"  # file in the notebooks' folder with sets of small parameter values
PLANTED = (0.8, 0.9, 1.1, 1.2)  # factors that falsify true numbers, to test the check itself


@dataclass(frozen=True)
class NotebookVerdict:
    """Result of the check of an executed notebook.

    Attributes:
        faults: Descriptions of all statements that do not hold.
        sentences: Number of sentences in the outputs of the notebook.
        number_count: Total number of measured numbers in the sentences of the notebook's outputs.
        detected_share: Share (0 to 1) of falsified numbers that the check detects if they replace
            the true numbers.
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
    """Return a specification of a notebook job per notebook and value set in `check.yaml`.

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
    2. Each number with decimals or a unit in a sentence appears in a table, a figure or a record of
       the run. A number that compares two values may also be the ratio of two numbers in a table,
       a figure or a record of the run.
    3. The conclusion of each sentence follows from the numbers in the sentence (see
       `labkit.gallery.claims`).

    Whole numbers without a unit are counts or names; only the third rule applies to them.
    """
    defaults = known_values({n: p.default for n, p in declared(spec.notebook).items()})
    # The job's record contains its parameter values, including the folders of runs that the
    # notebook reads.
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
    """Yield falsified numbers that differ from the true number in its quoted digits."""
    for factor in PLANTED:
        if abs(factor - 1) * number.value > 2 * number.half:
            yield number._replace(value=factor * number.value)
