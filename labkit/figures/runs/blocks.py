"""How soon scheduled blocks come to an optimum: the gap by rounds, and who was there first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.units import bytes_text
from labkit.figures.kit.entries import clock_and_network, entries
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import curve, line_over_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import busy, sheet
from labkit.figures.runs.servers import it_came
from labkit.records.questions.losses import loss_curve
from labkit.records.run import Run
from labkit.records.verdict import seeds_of

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

CLOSE = 1e-6  # of the optimum
_HALF = 0.5  # of the rounds that chance needs


def optimality_gap(runs: Iterable[Run], optimum: float) -> Figure:
    r"""How far each run is above an optimum by rounds, \((F - F^*) / F^*\); a band of seeds.

    Args:
        runs: whose loss is the whole of what is minimized.
        optimum: F*, from a solver of its own.
    """
    shown, traces, words = entries(runs), [], []
    for entry in shown:
        own = _gaps(entry.run, optimum)
        # On a logarithmic axis nothing may be below what rounding leaves.
        table = own.clip(lower=np.finfo(float).eps) if len(own) else own
        traces += line_over_band(table, "step", "gap", entry)
        words.append(f"{entry.label}: {own['gap'].iloc[-1]:.2g} after {len(own)} rounds")
    panel = Panel(
        title="How far from the optimum\nmean over seeds; band: their spread",
        x="round",
        y="gap, of the optimum",
        traces=traces,
        y_axis={"type": "log", "exponentformat": "power"},
    )
    title = f"Gap by rounds · {clock_and_network(shown)}"
    return sheet([[panel]], shown, title, busy(shown), words, plot=320)


def blocks_reading(runs: Sequence[Run], optimum: float) -> Markdown:
    """After how many rounds each was within a millionth of the optimum, and what it had said.

    Published: blocks chosen by priority are there sooner than those chosen by chance (Lee 2014).
    """
    needed = {_way(run): _rounds_until(run, optimum) for run in runs}
    return sentences([*_said(runs, needed, optimum), *_published(needed)])


def _said(
    runs: Sequence[Run], needed: dict[str, list[int | None]], optimum: float
) -> Iterator[Finding]:
    for run, (way, counts) in zip(runs, needed.items(), strict=True):
        sent = bytes_text(float(run.metrics["wire_bytes_per_step"]))
        said = (f"{sent} on the wire a round, in the median",)
        there = [count for count in counts if count is not None]
        if len(there) == len(counts):
            band = (min(there), max(there))
            unit = " rounds to a millionth"
            yield Finding("", way, median(there), band, len(counts), unit=unit, said=said)
        else:
            gap = float(_gaps(run, optimum)["gap"].iloc[-1])
            never = f"{len(counts) - len(there)} of {len(counts)} seeds are not there"
            last = f"{gap:.2g} of the optimum are left after all rounds"
            yield Finding("", way, said=(never, last, *said))


def _published(needed: dict[str, list[int | None]]) -> Iterator[Finding]:
    ours, chance = needed.get("priority"), needed.get("random")
    if not ours or not chance or None in ours:
        return
    slowest, quickest = _least(ours, max), _least(chance, min)
    if quickest is None:
        yield Finding(
            f"**Priority needs fewer rounds than chance** (Lee 2014): {it_came(True)}",
            said=("chance was there with no seed",),
        )
        return
    assert slowest is not None
    ratio = median(c for c in ours if c is not None) / quickest
    half = "at most half" if ratio <= _HALF else "more than half"
    yield Finding(
        "**Priority needs fewer rounds than chance, with all seeds** (Lee 2014): "
        f"{it_came(slowest < quickest)}",
        said=(f"{ratio:.2f} of chance's quickest seed, {half}",),
    )
