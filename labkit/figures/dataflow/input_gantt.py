"""When training computed, when it stood idle, and when its batches were made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput, short
from labkit.figures.kit.lanes import Kind, Lanes, lanes
from labkit.records.input_wait import InputTrace, input_costs

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure

SHOWN = 5  # steps, where nothing else is asked for
LANE = 24  # pixels a lane
MOST_LANES = 4  # batches that are made at a time, of which more would make the figure too high
STEP = "step %{customdata[0]:.0f}"
# Okabe and Ito (2008), as in `entries`: told apart with any colour vision.
KINDS = {
    "compute": Kind("training computes", "#56B4E9", f"computes, {STEP}"),
    "idle": Kind("training waits for its batch", "#E69F00", f"waits for its batch, {STEP}"),
    "made": Kind("a batch is made", "#009E73", f"the batch of {STEP} is made"),
}


def input_timeline(trace: InputTrace, steps: int = SHOWN) -> Figure:
    """A Gantt a way: training, and below it the batches that were made meanwhile.

    Drawn are steps in a row from the middle of the turn whose median step is the median of all
    turns of that way, on one scale of time. Orange is what one would like to be rid of.

    Args:
        trace: of `labkit.bench.input_pipeline.measure`.
        steps: how many.

    Raises:
        InvalidInput: fewer than one step.
    """
    if steps < 1:
        raise InvalidInput(f"steps={short(steps)}: draw at least 1")
    table, costs = trace.frame(), input_costs(trace)
    drawn = {way: _middle(table[table["way"] == way], steps) for way in trace.ways}
    end = max(float(rows[rows["kind"] != "made"]["stop"].max()) for rows in drawn.values())
    panels, words = [], []
    for way, rows in drawn.items():
        own = costs.loc[way]
        said = f"idle {own['idle_share']:.0%} of the time in all steps"
        panels.append(_panel(f"{way}\n{said}", rows, end))
        words.append(f"{way}: {said}, {own['idle_ms']:.3g} ms a step at the median")
    title = "Input of a training step, 1 process · wall clock · network not used"
    return lanes(panels, KINDS, title, "", words, LANE, end)


def _middle(steps: pandas.DataFrame, count: int) -> pandas.DataFrame:
    """Bars of a usual turn's steps, ms since the first of them: kind, lane, start, stop, step."""
    import pandas as pd

    medians = steps.groupby("repeat")["step_ms"].median().sort_values()
    turn = steps[steps["repeat"] == medians.index[len(medians) // 2]].sort_values("step")
    first = max((len(turn) - count) // 2, 0)
    shown = turn.iloc[first : first + count]
    zero, last = shown["start"].min(), shown["stop"].max()
    parts = [
        _bars(shown, "idle", "start", "ready"),
        _bars(shown, "compute", "ready", "stop"),
        # Batches of later steps, too, where they are made in this time.
        _bars(turn[turn["made_start"] < last], "made", "made_start", "made_stop"),
    ]
    bars = pd.concat(parts, ignore_index=True)
    bars[["start", "stop"]] = 1e3 * (bars[["start", "stop"]] - zero)
    bars = bars[bars["stop"] > 0]
    made = bars["kind"] == "made"
    bars.loc[made, "lane"] = _stacked(bars[made])
    return bars


def _bars(rows: pandas.DataFrame, kind: str, start: str, stop: str) -> pandas.DataFrame:
    found = rows[["step", start, stop]].set_axis(["step", "start", "stop"], axis=1)
    return found.assign(kind=kind, lane="training")


def _stacked(bars: pandas.DataFrame) -> list[str]:
    """A lane for each batch: the first that is free when it begins."""
    free: list[float] = []
    found = {}
    for row in bars.sort_values("start").itertuples():
        lane = next((n for n, end in enumerate(free) if end <= row.start), len(free))
        free[lane : lane + 1] = [row.stop]
        found[row.Index] = f"input {min(lane, MOST_LANES - 1) + 1}"
    return [found[place] for place in bars.index]


def _panel(title: str, rows: pandas.DataFrame, end: float) -> Lanes:
    # What is still being made when the last step ends is cut there.
    start, stop = rows["start"].clip(lower=0), rows["stop"].clip(upper=end)
    bars = rows.assign(start=start, length=stop - start, text="")
    order = ["training", *sorted(set(rows["lane"]) - {"training"})]
    return Lanes(title, order, bars[bars["length"] > 0], ("step",))
