"""How soon scheduled blocks come to an optimum: the gap by rounds, and who was there first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.units import bytes_text, plural
from labkit.figures.kit.cells import cells, towards
from labkit.figures.kit.entries import clock_and_network, entries
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import line_over_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import busy, sheet
from labkit.figures.runs.servers import it_came
from labkit.records.analysis.losses import loss_curve
from labkit.records.run import Run
from labkit.records.verdict import seeds_of

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from labkit.figures.kit.canvas import Figure

_CLOSE = 1e-6  # of the optimum
_NEVER = math.inf
_DRAWN = 60  # blocks; of more, cells would be smaller than a pixel on a phone
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
        words.append(f"{entry.label}: {own['gap'].iloc[-1]:.2g} after {len(own) - 1} rounds")
    panel = Panel(
        title="How far from the optimum\nmean over seeds; band: their spread",
        x="round",
        y="gap, of the optimum",
        traces=traces,
        y_axis={"type": "log", "exponentformat": "power"},
    )
    title = f"Gap by rounds · {clock_and_network(shown)}"
    return sheet([[panel]], shown, title, busy(shown), words, plot=320)


def dependencies(couplings: NDArray[np.float64], dependency: float) -> Figure:
    """Who depends on whom: the coupling of each two blocks, as far as it keeps them apart.

    Args:
        couplings: shape (blocks, blocks), see `labkit.schedules.blocks.couplings`; of many blocks
            the first ones are drawn.
        dependency: blocks whose coupling is at least this are never changed in one round.
    """
    apart = couplings >= dependency
    np.fill_diagonal(apart, False)
    few = slice(0, _DRAWN)
    drawn = np.where(apart, couplings, 0.0)[few, few]
    hover = "%{y} and %{x}: %{z:.2f}"
    panel = Panel(
        title="Blocks that never change in one round\ncolour: their coupling, 0 (clear) to 1",
        x="block",
        y="block",
        traces=[cells(drawn, colors=towards("213,94,0", 0.8), most=1.0, hover=hover)],
        y_axis={"autorange": "reversed"},
    )
    pairs, count = int(apart.sum()) // 2, len(couplings)
    of = f"{plural(pairs, 'pair')} of {count * (count - 1) // 2}"
    word = f"{of} with a coupling of {dependency:g} or more"
    remarks = [f"the first {_DRAWN} of {count} blocks"] if count > _DRAWN else []
    return sheet([[panel]], [], "Who depends on whom", remarks, [word], plot=420)


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
            never = f"{plural(len(counts), 'seed')}, of which {len(there)} came to a millionth"
            last = f"{gap:.2g} of the optimum are left after all rounds"
            yield Finding("", way, said=(never, last, *said))


def _published(needed: dict[str, list[int | None]]) -> Iterator[Finding]:
    """Whether the slowest seed of priority is before the quickest one of chance, and how far."""
    ours, chance = (
        [_NEVER if count is None else count for count in needed.get(select, [])]
        for select in ("priority", "random")
    )
    if not ours or not chance or min(*ours, *chance) == _NEVER:
        return
    came, share = max(ours) < min(chance), median(ours) / median(chance)
    half = "no more than half" if share <= _HALF else "more than half"
    factor = f"{share:.2f} of chance's rounds in the median, {half}"
    unknown = "chance was not there with every seed, so that no factor is known"
    yield Finding(
        f"**Priority needs fewer rounds than chance, with all seeds** (Lee 2014): {it_came(came)}",
        said=(unknown if _NEVER in {*ours, *chance} else factor,),
    )


def _way(run: Run) -> str:
    """How its blocks are chosen; whose blocks are all of them, has another strategy."""
    strategy = run.experiment["strategy"]
    return str(strategy.get("select", "all at once"))


def _rounds_until(run: Run, optimum: float) -> list[int | None]:
    """After how many rounds each seed was close; None: never."""
    found: list[int | None] = []
    for each in seeds_of(run):
        close = _gaps(each, optimum)["gap"].to_numpy() <= _CLOSE
        # What is written down is the loss before a round's change.
        found.append(int(close.argmax()) if close.any() else None)
    return found


def _gaps(run: Run, optimum: float) -> pd.DataFrame:
    """Rounds, and the gap by then with its ends over the seeds."""
    own = loss_curve(run.history)
    ends = [end for end in ("", "_low", "_high") if f"loss{end}" in own]
    # The first row is the loss before any change.
    gaps = {f"gap{end}": own[f"loss{end}"] / optimum - 1 for end in ends}
    return own[["step"]].assign(step=own["step"] - 1, **gaps)
