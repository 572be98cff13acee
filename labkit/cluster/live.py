"""Live: an experiment while it runs: its rows as they come, its end, a panel that shows both."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.cluster.answering import answering
from labkit.cluster.run_progress import Display, Outline, Row, Tally
from labkit.cluster.terminal import in_notebook, line
from labkit.common.canonical_json import JSON
from labkit.experiment import Experiment
from labkit.records.run import Run
from labkit.records.stream import FOLDER, Reader, Told

if TYPE_CHECKING:
    from ipywidgets import Widget

    from labkit.cluster.panel import Panel

READ_EVERY = 0.25  # seconds; ranks tell as often
DRAW_EVERY = 0.5  # seconds; a browser that draws more often has no time for clicks


class Live:
    """A running experiment; made by `Cluster.submit`, and again by `Cluster.live`.

    A thread takes in what the ranks tell, draws it, and sees to the end: no cell has to wait, and
    an interrupt of a cell reaches nobody but the cell.

    Attributes:
        experiment: what runs; of another process's only the outline is known.
        outline: its label, workers and epochs.
        directory: its run directory.
        rows: history rows that have come so far, of all ranks.
        epochs: metrics after each epoch so far.
        tally: what they amount to.
    """

    def __init__(self, experiment: Experiment | Outline, directory: Path) -> None:
        self.experiment, self.directory = experiment, directory
        self.outline = Outline(
            experiment.label, experiment.workers, experiment.epochs, experiment.clock
        )
        self.rows: list[Row] = []
        self.epochs: list[Row] = []
        self.tally = Tally(experiment.epochs)
        self._stream = Reader(directory / FOLDER)
        self._told: dict[float, float] = {}  # by rank its last step; -1: the last epoch
        self._panel: Panel | None = None
        self._displays: list[Display] = []
        self._drawing = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._run: Run | None = None

    def stop(self) -> None:
        """Ask the ranks to end training after the same step; the run is kept as interrupted."""
        self._stream.stop()

    def done(self) -> bool:
        """Whether the ranks have ended and the record is written."""
        return self._ended.is_set()

    @property
    def run(self) -> Run | None:
        """The record, once it is written; None before."""
        return Run(self.directory) if self._error is not None else self._run

    def result(self) -> Run:
        """Wait for the end; return the record.

        Raises:
            RankError: a rank failed; the record keeps its cause and its output.
        """
        with answering():
            self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._run is not None  # for the type checker: an end has one or the other
        return self._run

    def panel(self) -> Widget:
        """The panel as a widget, for a layout of your own; in a cell, a Live displays itself."""
        from labkit.cluster.panel import Panel

        with self._drawing:
            if self._panel is None:
                self._panel = Panel(self)
                self._displays.append(self._panel)
            self._panel.draw(self)
        return self._panel.widget

    def show(self) -> None:
        """A panel in JupyterLab, a line in a terminal, until the end."""
        if in_notebook():
            from IPython.display import display

            display(self.panel())
        else:
            with self._drawing:
                self._displays.append(line())
        if self.done():  # in the meantime
            self._draw(last=True)

    def __repr__(self) -> str:
        state = self.tally.doing if self.run is None else self.run.status["state"]
        return f"<Live {self.outline.label}: {state}, step {self.tally.steps}>"

    def _repr_mimebundle_(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, JSON]:
        bundle = (self.panel()._repr_mimebundle_() or {}) if in_notebook() else {}
        return bundle | {"text/plain": repr(self)}

    # --- the thread --------------------------------------------------------------------------

    def begin(self, show: bool = False) -> None:
        """Follow it from here on, and show it."""
        # A daemon: an interpreter that ends does not wait for ranks.
        threading.Thread(target=self._follow, name="labkit-live", daemon=True).start()
        if show:
            try:
                self.show()
            except Exception as error:
                warnings.warn(f"{self!r} cannot be shown: {error!r}", stacklevel=2)

    def _follow(self) -> None:
        try:
            for _ in self._watch():
                self._take()
            self._take(last=True)
            self._run = self._keep()
        except BaseException as error:
            try:
                self._lose(error)
            finally:
                # Kept whatever becomes of the record: who waits in `result` must hear of it.
                self._error = error  # for the one who waits, see result()
        finally:
            try:
                self._close()
                self._draw(last=True)
            finally:
                # Last, when all is written, drawn and let go: then `result` returns.
                self._ended.set()

    def _watch(self) -> Iterator[None]:
        """Yield now and then, until the ranks have ended."""
        raise NotImplementedError

    def _keep(self) -> Run:
        """See to the record when they have; what it raises is the run's failure."""
        raise NotImplementedError

    def _lose(self, error: BaseException) -> None:
        """Record a failure, where that is this process's to do."""

    def _close(self) -> None:
        """Let go of the ranks."""

    _taken_at = _drawn_at = 0.0

    def _take(self, last: bool = False) -> None:
        now = time.monotonic()
        if last or now - self._taken_at > READ_EVERY:
            self._taken_at = now
            # Read outside the lock: files may be slow, and a click waits for it.
            told = self._stream.read()
            with self._drawing:
                self._add(told)
        if not last and now - self._drawn_at > DRAW_EVERY:
            self._drawn_at = now
            self._draw()

    def _add(self, told: list[Told]) -> None:
        told = [each for each in told if self._is_new(*each)]
        self.tally.add(told)
        self.rows += [record for kind, record in told if kind == "step"]
        self.epochs += [record for kind, record in told if kind == "epoch"]

    def _is_new(self, kind: str, record: Row) -> bool:
        """Whether it was not told before: ranks that go back repeat what they have told."""
        if kind not in ("step", "epoch"):
            return True
        whose = -1 if kind == "epoch" else record["rank"]
        number = record[kind]
        is_new = number > self._told.get(whose, -1)
        if is_new:
            self._told[whose] = number
        return is_new

    def _draw(self, last: bool = False) -> None:
        with self._drawing:
            for display in list(self._displays):
                try:
                    display.close(self) if last else display.draw(self)
                except Exception as error:  # a display that breaks must not end a run
                    self._displays.remove(display)
                    warnings.warn(f"{self!r} is not shown any more: {error!r}", stacklevel=2)
