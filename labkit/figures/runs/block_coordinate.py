"""Block coordinate descent: optimality gap by rounds, and couplings between blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from labkit.common.units import bytes_text, plural
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    Finding,
    Markdown,
    clock_and_network,
    entries,
    published,
    sentences,
)
from labkit.figures.kit.marks import cells, fade_to, line_over_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import overload, sheet
from labkit.records.analysis.curves import loss_curve
from labkit.records.run import Run
from labkit.records.verdict import completed_seeds

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CLOSE = 1e-6  # relative gap at which a run counts as having reached the optimum
_NEVER = math.inf
_DRAWN = 60  # maximum number of drawn blocks, because cells need at least a pixel
# A ratio of rounds up to 0.5 is described as "at most half". Priority then needs at most half of
# the rounds of random selection.
_HALF = 0.5


def optimality_gap(runs: Iterable[Run], optimum: float) -> Figure:
    r"""Draw each run's optimality gap \((F - F^*) / F^*\) over rounds, with its range over seeds.

    Args:
        runs: Runs of block coordinate descent, or other runs whose loss is the complete objective
            F.
        optimum: Least value F* of the objective, from an independent solver.
    """
    shown, traces, words = entries(runs), [], []
    for entry in shown:
        group = _gaps(entry.run, optimum)
        # Gaps below the rounding error are raised to the rounding error, because a logarithmic axis
        # needs positive values.
        table = group.clip(lower=np.finfo(float).eps) if len(group) else group
        traces += line_over_band(table, "step", "gap", entry)
        words.append(f"{entry.label}: {group['gap'].iloc[-1]:.2g} after {len(group) - 1} rounds")
    panel = Panel(
        title="Distance from the optimum\nmean over seeds; band: range over seeds",
        x="round",
        y="relative gap",
        traces=traces,
        y_axis={"type": "log", "exponentformat": "power"},
    )
    title = f"Optimality gap by rounds · {clock_and_network(shown)}"
    return sheet([[panel]], shown, title, overload(shown), words, plot=320)


def dependencies(couplings: NDArray[np.float64], dependency: float) -> Figure:
    """Draw which pairs of blocks never change in the same round; the colour shows the coupling.

    Args:
        couplings: Couplings from 0 to 1, shape (blocks, blocks), from
            `labkit.schedules.blocks.couplings`. If there are many blocks, only the first blocks are
            drawn.
        dependency: Coupling (0 to 1) from which on two blocks never change in the same round.
    """
    dependent = couplings >= dependency
    np.fill_diagonal(dependent, False)
    few = slice(0, _DRAWN)
    drawn = np.where(dependent, couplings, 0.0)[few, few]
    hover = "%{y} and %{x}: %{z:.2f}"
    panel = Panel(
        title="Pairs of blocks that never change in the same round\ncolour: coupling of the "
        "pair, 0 (transparent) to 1",
        x="block",
        y="block",
        traces=[cells(drawn, colors=fade_to("213,94,0", 0.8), most=1.0, hover=hover)],
        y_axis={"autorange": "reversed"},
    )
    pairs, count = int(dependent.sum()) // 2, len(couplings)
    of = f"{plural(pairs, 'pair')} of {count * (count - 1) // 2}"
    word = f"{of} with a coupling of {dependency:g} or more"
    remarks = [f"the figure shows the first {_DRAWN} of {count} blocks"] if count > _DRAWN else []
    return sheet([[panel]], [], "Dependencies between blocks", remarks, [word], plot=420)


def summarize_blocks(runs: Sequence[Run], optimum: float) -> Markdown:
    """Summarize each run's bytes per round, and its rounds to a relative optimality gap of 1e-6.

    Published: selection by priority needs fewer rounds than random selection (Lee 2014).
    """
    needed = {_selection(run): _rounds_until(run, optimum) for run in runs}
    return sentences([*_rounds_findings(runs, needed, optimum), *_priority_claim(needed)])


def _rounds_findings(
    runs: Sequence[Run], needed: dict[str, list[int | None]], optimum: float
) -> Iterator[Finding]:
    for run, (way, counts) in zip(runs, needed.items(), strict=True):
        sent = bytes_text(float(run.metrics["wire_bytes_per_step"]))
        details = (f"{sent} on the wire per round (median)",)
        reached = [count for count in counts if count is not None]
        if len(reached) == len(counts):
            band = (min(reached), max(reached))
            unit = " rounds to a relative gap of 1e-6"
            yield Finding("", way, median(reached), band, len(counts), unit=unit, details=details)
        else:
            gap = float(_gaps(run, optimum)["gap"].iloc[-1])
            never = (
                f"{plural(len(counts), 'seed')}, {len(reached)} of them reached a relative gap "
                "of 1e-6"
            )
            last = f"relative gap {gap:.2g} after all rounds"
            yield Finding("", way, details=(never, last, *details))


def _priority_claim(needed: dict[str, list[int | None]]) -> Iterator[Finding]:
    """Judge whether selection by priority needs fewer rounds than random selection in all seeds."""
    priority, by_chance = (
        [_NEVER if count is None else count for count in needed.get(select, [])]
        for select in ("priority", "random")
    )
    if not priority or not by_chance or min(*priority, *by_chance) == _NEVER:
        return
    holds, share = max(priority) < min(by_chance), median(priority) / median(by_chance)
    half = "at most half" if share <= _HALF else "more than half"
    factor = f"{share:.2f} of the rounds of random selection in the median, {half}"
    unknown = "some seeds of random selection did not reach this gap, so the factor is unknown"
    claim = (
        "With all seeds, selection of blocks by priority needs fewer rounds than random selection"
    )
    yield published(
        claim, "Lee 2014", holds, unknown if _NEVER in {*priority, *by_chance} else factor
    )


def _selection(run: Run) -> str:
    """Return a run's block selection rule; without a rule, all blocks change at once."""
    strategy = run.experiment["strategy"]
    return str(strategy.get("selection", "all at once"))


def _rounds_until(run: Run, optimum: float) -> list[int | None]:
    """Return each seed's number of rounds to a relative gap of 1e-6; None if not reached."""
    results: list[int | None] = []
    for seed_run in completed_seeds(run):
        close = _gaps(seed_run, optimum)["gap"].to_numpy() <= _CLOSE
        # A row contains the loss before the update of its round. The index of a row therefore
        # equals the number of completed rounds.
        results.append(int(close.argmax()) if close.any() else None)
    return results


def _gaps(run: Run, optimum: float) -> pd.DataFrame:
    """Return a table of relative optimality gaps by round, with their range over seeds."""
    group = loss_curve(run.history)
    ends = [end for end in ("", "_low", "_high") if f"loss{end}" in group]
    # The first row contains the loss before any update, so its round number is 0.
    gaps = {f"gap{end}": group[f"loss{end}"] / optimum - 1 for end in ends}
    return group[["step"]].assign(step=group["step"] - 1, **gaps)
