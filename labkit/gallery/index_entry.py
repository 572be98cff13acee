"""What the index shows of an executed notebook: its question, its answer, a picture."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.jobs import cells
from labkit.records.notebook import read_notebook
from labkit.records.store import Record

PLOTLY = "application/vnd.plotly.v1+json"
ANSWER, PICTURE = "answer", "picture"  # tags of the cells that give them


@dataclass(frozen=True)
class Output:
    """What one output of a code cell shows, and the tags of its cell."""

    tags: tuple[str, ...]
    data: Record

    @property
    def text(self) -> str:
        """Its Markdown; empty where it is something else."""
        found = self.data.get("text/markdown", "")
        return "".join(map(str, found)) if isinstance(found, list) else str(found)


@dataclass(frozen=True)
class IndexEntry:
    """A notebook's first line; the last sentence of its answer; a figure, as Plotly's JSON."""

    question: str
    answer: str = ""
    picture: Record | None = None

    @classmethod
    def of(cls, notebook: Path, executed: Path) -> IndexEntry:
        """Read them of a notebook, and of what it gave where it has run.

        The answer is made by the cell tagged `answer`, the picture by that tagged `picture`, or
        else it is the first figure.
        """
        prose = [cell.source for cell in cells.read(notebook) if cell.kind == "markdown"]
        lines = prose[0].splitlines() if prose else []
        question = lines[0].lstrip("# ") if lines else notebook.stem
        found = _outputs_of(executed)
        answers = [each.text for each in found if ANSWER in each.tags and each.text]
        drawn = [each for each in found if isinstance(each.data.get(PLOTLY), dict)]
        first = [each for each in drawn if PICTURE in each.tags] or drawn
        lines = answers[-1].strip().splitlines() if answers else [""]
        return cls(question, lines[-1].removeprefix("- "), _still(first[0]) if first else None)


def _outputs_of(executed: Path) -> list[Output]:
    """What an executed notebook shows; nothing of one that has not run, or is damaged."""
    try:
        return list(outputs(executed))
    except FileNotFoundError:
        return []
    except LabkitError as error:
        warnings.warn(f"left out: {error}", stacklevel=2)
        return []


def _still(output: Output) -> Record:
    """A figure without what plays it."""
    figure = dict(output.data[PLOTLY])
    figure.pop("frames", None)
    layout = figure.get("layout")
    layout = layout if isinstance(layout, dict) else {}
    kept = {k: v for k, v in layout.items() if k not in ("sliders", "updatemenus")}
    return figure | {"layout": kept}


def outputs(executed: Path) -> Iterator[Output]:
    """What the cells of an executed notebook show, in order."""
    for cell in read_notebook(executed)["cells"]:
        for output in cell.get("outputs", []):
            yield Output(tuple(cell["metadata"].get("tags", [])), output.get("data", {}))
