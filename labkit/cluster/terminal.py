"""What a person sees while ranks work, where there are no widgets: a line."""

from __future__ import annotations

import os
import sys
import time

from labkit.cluster.run_progress import ProgressView


def in_notebook() -> bool:
    """Whether widgets can be seen: in the kernel of a notebook that a person has open."""
    if "LABKIT_JOB" in os.environ or "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def line() -> Line:
    """The line of a terminal, which is rewritten; in a batch job's log a few lines that stay."""
    if sys.stderr.isatty() and "LABKIT_JOB" not in os.environ:
        return Line(every=0.2, end="")
    return Line(every=5.0, end="\n")


class Line:
    """One line: step, loss, samples per second of each rank, time left."""

    def __init__(self, every: float, end: str) -> None:
        self.every, self.end = every, end
        self._shown_at, self._shown = 0.0, ""

    def draw(self, live: ProgressView) -> None:
        """Rewrite the line, at most every so many seconds."""
        if time.monotonic() - self._shown_at > self.every:
            self._print(live, self.end)

    def close(self, live: ProgressView) -> None:
        """Leave the last line standing."""
        self._print(live, "\n")

    def _print(self, live: ProgressView, end: str) -> None:
        text = _text(live)
        # A line that says nothing new would fill a log.
        if not live.rows or text + end == self._shown:
            return
        self._shown_at, self._shown = time.monotonic(), text + end
        lead = "" if self.end else "\r\x1b[2K"
        print(f"{lead}{text}", end=end, file=sys.stderr, flush=True)


def _text(live: ProgressView) -> str:
    tally, outline = live.tally, live.outline
    speeds = [f"rank {n} {r.speed:,.0f}/s" for n, r in sorted(tally.ranks.items()) if r.speed]
    left = tally.seconds_left
    return "  ".join(
        [
            f"{outline.label}  epoch {tally.epoch + 1}/{outline.epochs}",
            f"step {tally.steps}  loss {tally.loss:.4f}",
            *speeds,
            *([f"{left:.0f} s left"] if left and live.run is None else []),
        ]
    )
