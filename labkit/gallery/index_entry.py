"""Entry of an executed notebook in the index of the site: question, answer and figure."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.jobs import cells
from labkit.records.executed_notebook import read_notebook
from labkit.records.store import Record

PLOTLY = "application/vnd.plotly.v1+json"
ANSWER, PICTURE = "answer", "picture"  # tags of the notebook cells with the answer and the figure


@dataclass(frozen=True)
class Output:
    """An output of a code cell, with the tags of this cell."""

    tags: tuple[str, ...]
    data: Record

    @property
    def text(self) -> str:
        """Markdown text of the output; an empty text if the output is not Markdown."""
        text = self.data.get("text/markdown", "")
        return "".join(map(str, text)) if isinstance(text, list) else str(text)


@dataclass(frozen=True)
class IndexEntry:
    """A notebook's question (first line), answer (its last line), and figure (Plotly JSON)."""

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
