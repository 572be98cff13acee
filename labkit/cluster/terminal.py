"""The progress line of a run in a terminal or in a log file."""

from __future__ import annotations

import os
import sys
import time

from labkit.cluster.run_progress import ProgressView


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook that can show widgets."""
    if "LABKIT_JOB" in os.environ or "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def line() -> ProgressLine:
    """Return a progress line: a terminal rewrites it, and a log receives a new line every 5 s."""
    if sys.stderr.isatty() and "LABKIT_JOB" not in os.environ:
        return ProgressLine(every=0.2, end="")
    return ProgressLine(every=5.0, end="\n")


class ProgressLine:
    """A line of text with the step, the loss, the samples/s of each rank, and the time left."""

    def __init__(self, every: float, end: str) -> None:
        self.every, self.end = every, end
        self._shown_at, self._shown = 0.0, ""

    def draw(self, live: ProgressView) -> None:
        """Rewrite the line, but not more often than every `every` seconds."""
        if time.monotonic() - self._shown_at > self.every:
            self._print(live, self.end)

    def close(self, live: ProgressView) -> None:
        """Print the run's last progress line, with a line break."""
        self._print(live, "\n")

    def _print(self, live: ProgressView, end: str) -> None:
        text = _text(live)
        # An unchanged line is not printed again, because it would fill a log.
        if not live.rows or text + end == self._shown:
            return
        self._shown_at, self._shown = time.monotonic(), text + end
        lead = "" if self.end else "\r\x1b[2K"
        print(f"{lead}{text}", end=end, file=sys.stderr, flush=True)


def _text(live: ProgressView) -> str:
    progress, outline = live.progress, live.outline
    speeds = [f"rank {n} {r.speed:,.0f}/s" for n, r in sorted(progress.ranks.items()) if r.speed]
    seconds_left = progress.seconds_left
    return "  ".join(
        [
            f"{outline.label}  epoch {progress.epoch + 1}/{outline.epochs}",
            f"step {progress.steps}  loss {progress.loss:.4f}",
            *speeds,
            *([f"{seconds_left:.0f} s left"] if seconds_left and live.run is None else []),
        ]
    )
