"""Block coordinate descent: optimality gap by rounds, and dependencies between blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from labkit.common.units import bytes_text, plural
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import clock_and_network, entries
from labkit.figures.kit.findings import Finding, Markdown, published, sentences
from labkit.figures.kit.marks import cells, fade_to, line_over_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import overload, sheet
from labkit.records.analysis.losses import loss_curve
from labkit.records.run import Run
from labkit.records.verdict import seeds_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CLOSE = 1e-6  # of the optimum
_NEVER = math.inf
_DRAWN = 60  # blocks; of more, cells would be smaller than a pixel on a phone
_HALF = 0.5  # of the rounds that chance needs


def optimality_gap(runs: Iterable[Run], optimum: float) -> Figure:
    r"""Draw the optimality gap \((F - F^*) / F^*\) of each run by rounds, in a band of seeds.

    Args:
        runs: whose loss is the whole objective.
        optimum: F*, from an independent solver.
    """
    shown, traces, words = entries(runs), [], []
    for entry in shown:
        group = _gaps(entry.run, optimum)
        # On a logarithmic axis nothing may be below what rounding leaves.
        table = group.clip(lower=np.finfo(float).eps) if len(group) else group
        traces += line_over_band(table, "step", "gap", entry)
        words.append(f"{entry.label}: {group['gap'].iloc[-1]:.2g} after {len(group) - 1} rounds")
    panel = Panel(
        title="How far from the optimum\nmean over seeds; band: their spread",
        x="round",
        y="gap, of the optimum",
        traces=traces,
        y_axis={"type": "log", "exponentformat": "power"},
    )
    title = f"Gap by rounds · {clock_and_network(shown)}"
    return sheet([[panel]], shown, title, overload(shown), words, plot=320)


def dependencies(couplings: NDArray[np.float64], dependency: float) -> Figure:
    """Draw the coupling of each pair of blocks that never change in one round.

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
        traces=[cells(drawn, colors=fade_to("213,94,0", 0.8), most=1.0, hover=hover)],
        y_axis={"autorange": "reversed"},
    )
    pairs, count = int(apart.sum()) // 2, len(couplings)
    of = f"{plural(pairs, 'pair')} of {count * (count - 1) // 2}"
    word = f"{of} with a coupling of {dependency:g} or more"
    remarks = [f"the first {_DRAWN} of {count} blocks"] if count > _DRAWN else []
    return sheet([[panel]], [], "Who depends on whom", remarks, [word], plot=420)


def blocks_reading(runs: Sequence[Run], optimum: float) -> Markdown:
    """Say after how many rounds each run was within a millionth of the optimum, and its bytes.

    Published: blocks chosen by priority are there sooner than those chosen by chance (Lee 2014).
    """
    needed = {_selection(run): _rounds_until(run, optimum) for run in runs}
    return sentences([*_rounds_findings(runs, needed, optimum), *_published(needed)])


def _rounds_findings(
    runs: Sequence[Run], needed: dict[str, list[int | None]], optimum: float
) -> Iterator[Finding]:
    for run, (way, counts) in zip(runs, needed.items(), strict=True):
        sent = bytes_text(float(run.metrics["wire_bytes_per_step"]))
        details = (f"{sent} on the wire a round, in the median",)
        there = [count for count in counts if count is not None]
        if len(there) == len(counts):
            band = (min(there), max(there))
            unit = " rounds to a millionth"
            yield Finding("", way, median(there), band, len(counts), unit=unit, details=details)
        else:
            gap = float(_gaps(run, optimum)["gap"].iloc[-1])
            never = f"{plural(len(counts), 'seed')}, of which {len(there)} came to a millionth"
            last = f"{gap:.2g} of the optimum are left after all rounds"
            yield Finding("", way, details=(never, last, *details))


def _published(needed: dict[str, list[int | None]]) -> Iterator[Finding]:
    """Judge whether the slowest seed of priority is before the quickest one of chance."""
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
    claim = "Priority needs fewer rounds than chance, with all seeds"
    yield published(claim, "Lee 2014", came, unknown if _NEVER in {*ours, *chance} else factor)


def _selection(run: Run) -> str:
    """Return how blocks are selected; other strategies change all of them at once."""
    strategy = run.experiment["strategy"]
    return str(strategy.get("select", "all at once"))


def _rounds_until(run: Run, optimum: float) -> list[int | None]:
    """Return after how many rounds each seed was close to the optimum; None: never."""
    results: list[int | None] = []
    for each in seeds_of(run):
        close = _gaps(each, optimum)["gap"].to_numpy() <= _CLOSE
        # A row holds the loss before the change of its round.
        results.append(int(close.argmax()) if close.any() else None)
    return results


def _gaps(run: Run, optimum: float) -> pd.DataFrame:
    """Return rounds, and the gap with its ends over the seeds."""
    group = loss_curve(run.history)
    ends = [end for end in ("", "_low", "_high") if f"loss{end}" in group]
    # The first row is the loss before any change.
    gaps = {f"gap{end}": group[f"loss{end}"] / optimum - 1 for end in ends}
    return group[["step"]].assign(step=group["step"] - 1, **gaps)
