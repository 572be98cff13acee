"""Entry of an executed notebook in the index of the site: question, answer and figure."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.jobs import cells, parameters
from labkit.jobs.notebook import JobResult, NotebookJob, start
from labkit.jobs.sweep.sweep_plan import SweepMember, SweepPlan
from labkit.records import store
from labkit.records.endings import interruption_text
from labkit.records.executed_notebook import read_notebook
from labkit.records.store import Record

PLOTLY = "application/vnd.plotly.v1+json"
# The tags `answer` and `picture` mark the notebook cells with the answer and with the figure.
ANSWER, PICTURE = "answer", "picture"


@dataclass(frozen=True)
class Output:
    """An output of a code cell, with the cell's tags."""

    tags: tuple[str, ...]
    data: Record

    @property
    def text(self) -> str:
        """Markdown text of the output; an empty text if the output is not Markdown."""
        text = self.data.get("text/markdown", "")
        return "".join(map(str, text)) if isinstance(text, list) else str(text)


@dataclass(frozen=True)
class IndexEntry:
    """A notebook's question (first line), answer (last answer line), and figure (Plotly JSON)."""

    question: str
    answer: str = ""
    picture: Record | None = None

    @classmethod
    def of(cls, notebook: Path, executed: Path) -> IndexEntry:
        """Read the question from a notebook, and the answer and figure from its executed copy.

        The output of the cell with the tag `answer` contains the answer. The figure is in the
        output of the cell with the tag `picture`. If no cell has the tag `picture`, the first
        figure of the notebook is used.
        """
        prose = [cell.source for cell in cells.read(notebook) if cell.kind == "markdown"]
        lines = prose[0].splitlines() if prose else []
        question = lines[0].lstrip("# ") if lines else notebook.stem
        shown = _outputs_of(executed)
        answers = [output.text for output in shown if ANSWER in output.tags and output.text]
        drawn = [output for output in shown if isinstance(output.data.get(PLOTLY), dict)]
        first = [output for output in drawn if PICTURE in output.tags] or drawn
        lines = answers[-1].strip().splitlines() if answers else [""]
        return cls(
            question, lines[-1].removeprefix("- "), _static_figure(first[0]) if first else None
        )


def _outputs_of(executed: Path) -> list[Output]:
    """Return an executed notebook's outputs; empty if the file is missing or damaged."""
    try:
        return list(outputs(executed))
    except FileNotFoundError:
        return []
    except LabkitError as error:
        warnings.warn(f"the outputs of a notebook are left out of the index: {error}", stacklevel=2)
        return []


def _static_figure(output: Output) -> Record:
    """Return an output's Plotly figure without animation frames and controls."""
    figure = dict(output.data[PLOTLY])
    figure.pop("frames", None)
    layout = figure.get("layout")
    layout = layout if isinstance(layout, dict) else {}
    static_layout = {k: v for k, v in layout.items() if k not in ("sliders", "updatemenus")}
    return figure | {"layout": static_layout}


def outputs(executed: Path) -> Iterator[Output]:
    """Yield all outputs of an executed notebook's cells, in order."""
    for cell in read_notebook(executed)["cells"]:
        for output in cell.get("outputs", []):
            yield Output(tuple(cell["metadata"].get("tags", [])), output.get("data", {}))


MADE_FROM = "made-from.json"  # The file made-from.json contains the hash of a job's inputs.
LOOK_EVERY = 0.1  # The code looks for ended jobs every `LOOK_EVERY` seconds.
LONGEST = 100  # A progress line shows at most `LONGEST` characters of parameter values.


@dataclass(frozen=True, eq=False)
class GallerySpec:
    """A notebook to execute, and values for its parameters, which replace the defaults."""

    notebook: Path
    values: parameters.Values = field(default_factory=dict)

    @property
    def reads_runs(self) -> bool:
        """Whether the notebook reads runs of other notebooks, through its parameter `runs`."""
        return "runs" in parameters.declared(self.notebook)

    def __str__(self) -> str:
        text = ", ".join(f"{name}={value}" for name, value in self.values.items())
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
        return f"{self.notebook.stem} ({text})" if text else self.notebook.stem

    def content_hash(self) -> str:
        """Return the hash of all inputs of the results: notebook, values, and labkit's source."""
        return SweepPlan(self.notebook, []).content(SweepMember("", dict(self.values), 0, 1, 1))

    def completed_result(self, root: Path) -> JobResult | None:
        """Return the result of the latest completed job with the same content hash, or None."""
        content = self.content_hash()
        completed = (
            result
            for result in _results_newest_first(self.notebook, root)
            if result[0].state == "completed"
        )
        return next((result for result, made_from in completed if made_from == content), None)

    def start(self, root: Path) -> NotebookJob:
        """Start a job that executes the notebook in a separate process.

        Raises:
            InvalidInput: The notebook rejects the parameter values.
        """
        # A notebook that reads runs has a parameter `runs`. The parameter `runs` names the folder
        # with the runs of all notebooks.
        runs = {"runs": [str(root)]} if self.reads_runs else {}
        values = parameters.validate_values(self.notebook, {**runs, **self.values})
        job = start(self.notebook, values, root, show=False)
        store.write_json(job.path / MADE_FROM, {"content": self.content_hash()})
        return job


def latest_result(notebook: Path, root: Path) -> JobResult | None:
    """Return the result of a notebook's latest job, whatever the code version, or None."""
    newest = next(_results_newest_first(notebook, root), None)
    return newest[0] if newest else None


def _results_newest_first(notebook: Path, root: Path) -> Iterator[tuple[JobResult, JSON]]:
    """Yield (result, content hash) of all jobs of a notebook, the newest first.

    A job with a damaged record is skipped with a warning.
    """
    folder = root / store.safe_name(notebook.stem)
    for path in sorted(folder.glob(f"*/{MADE_FROM}"), reverse=True):
        try:
            status, made_from = store.read_status(path.parent), store.read_json(path)
        except LabkitError as error:
            warnings.warn(f"skipped a job: {error}", stacklevel=2)
            continue
        result = JobResult(path.parent, status["state"], status.get("cause"), status.get("rank"))
        yield result, made_from.get("content")


def execute_all(
    specs: Sequence[GallerySpec], root: Path, jobs: int, tell: Callable[[str], None]
) -> Iterator[tuple[GallerySpec, JobResult]]:
    """Execute notebooks concurrently, and yield each result when its job ends.

    Notebooks that read runs of other notebooks are executed last, and never reuse earlier results.

    Args:
        specs: Notebooks with their parameter values.
        root: Folder of all jobs.
        jobs: Greatest number of notebooks that run at the same time.
        tell: Function that is called with the text of each progress line.
    """
    waiting = []
    for spec in specs:
        result = None if spec.reads_runs else spec.completed_result(root)
        if result is None:
            waiting.append(spec)
        else:
            tell(f"{spec}: already completed")
            yield spec, result
    for reads in (False, True):
        yield from _execute_concurrently(
            [spec for spec in waiting if spec.reads_runs is reads], root, jobs, tell
        )


def _execute_concurrently(
    waiting: list[GallerySpec], root: Path, jobs: int, tell: Callable[[str], None]
) -> Iterator[tuple[GallerySpec, JobResult]]:
    running: dict[GallerySpec, NotebookJob] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                spec = waiting.pop(0)
                try:
                    running[spec] = spec.start(root)
                    tell(f"{spec}: running")
                except InvalidInput as error:
                    yield spec, JobResult(root / "nowhere", "failed", str(error))
            time.sleep(LOOK_EVERY)
            for spec in [spec for spec, job in running.items() if job.done()]:
                result = running.pop(spec).result()
                tell(f"{spec}: {result.state}{f': {result.cause}' if result.cause else ''}")
                yield spec, result
    except KeyboardInterrupt as error:
        for job in running.values():
            job.interrupt(interruption_text(error))
        for job in running.values():
            job.result()
        raise
