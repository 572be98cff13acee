"""What real input costs against tensors that lie in memory, way by way."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from labkit.common.units import bytes_text
from labkit.figures.kit.entries import INK, Line, safe_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import points, rule
from labkit.figures.kit.sheet import Panel, Trace, sheet
from labkit.records.input_wait import SYNTHETIC, InputTrace, input_costs

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure

# Colour and hatch: told apart without colour, too.
PARTS = {"compute_ms": ("compute", "#56B4E9", ""), "idle_ms": ("idle", "#E69F00", "/")}
STEP = Line("measured step", INK, "solid", "diamond")
OVERHEAD = Line("I/O overhead", "#D55E00", "solid", "circle")
_LETTERS = 12  # of a line below a bar


def input_overhead(trace: InputTrace) -> Figure:
    """Two panels: compute and idle time of a step, way by way; and the I/O overhead of each.

    Medians over repeats, bars from the least repeat to the greatest; the overhead is that of
    `labkit.records.input_wait.input_costs`, and 0 the synthetic input.
    """
    costs = input_costs(trace)
    repeats = trace.frame()["repeat"].nunique()
    names = ["<br>".join(textwrap.wrap(safe_text(way), _LETTERS)) for way in costs.index]
    axis: Trace = {
        "tickvals": list(range(len(names))),
        "ticktext": names,
        "range": [-0.6, len(names) - 0.4],
        "showgrid": False,
        "tickangle": 0,
    }
    rows = costs.reset_index().assign(place=range(len(costs)))
    parts = Panel(
        title=f"Where a step goes\nmedian of {repeats} repeats; ◆ measured step, least to greatest",
        x="input",
        y="ms a step",
        traces=[*(_part(rows, name) for name in PARTS), _steps(rows)],
        note=_passed(trace),
        always_note=True,
        x_axis=axis,
        y_axis={"rangemode": "tozero"},
    )
    over = Panel(
        title="I/O overhead\n(real − synthetic) / synthetic, pairs of one repeat",
        x="input",
        y="overhead",
        traces=[_zero(len(rows)), _overheads(rows[rows["way"] != SYNTHETIC])],
        x_axis=axis,
        y_axis={"tickformat": "+.0%"},
    )
    looks = [Line(said, color, "solid", "square") for said, color, _ in PARTS.values()]
    words = [
        f"{way}: step {row['step_ms']:.3g} ms, idle {row['idle_ms']:.3g} ms, "
        f"overhead {row['overhead']:.0%}"
        for way, row in costs.iterrows()
    ]
    title = "Synthetic and real input, 1 process · wall clock · network not used"
    figure = sheet([[parts], [over]], [*looks, STEP, OVERHEAD], title, (), words, below=62)
    # Compute and idle add up to the step, which the diamond shows as measured.
    figure.update_layout(barmode="stack")
    return figure


def input_reading(trace: InputTrace) -> Markdown:
    """What the input costs, what hides it, and what is left."""
    costs = input_costs(trace)
    real = costs.drop(SYNTHETIC)
    repeats = trace.frame()["repeat"].nunique()
    base = costs.loc[SYNTHETIC]
    found = [
        Finding(
            f"**{SYNTHETIC}**",
            said=(f"a step takes {base['step_ms']:.3g} ms where its batch lies in memory",),
        )
    ]
    found += [_finding(way, row, repeats) for way, row in real.iterrows()]
    found.append(Finding(_passed(trace)))
    least = real["overhead"].idxmin()
    found.append(Finding(_answer(least, real.loc[least])))
    return sentences(found)


def _finding(way: str, row: pandas.Series, repeats: int) -> Finding:
    spread = f"repeats {row['overhead_low']:.0%} to {row['overhead_high']:.0%}"
    number = f"{row['overhead']:.0%}" + (f" ({spread})" if repeats > 1 else "")
    return Finding(
        f"**{way}**",
        said=(
            f"a step takes {row['step_ms']:.3g} ms, and training is idle {row['idle_share']:.0%} "
            "of its time",
            f"I/O overhead {number}",
        ),
        verdict="within noise, for repeats lie on both sides of 0"
        if row["overhead_low"] <= 0 <= row["overhead_high"]
        else "",
    )


def _passed(trace: InputTrace) -> str:
    """What a cache costs once."""
    return (
        f"The first pass, which filled the cache, took {trace.filled:.3g} s; the file has "
        f"{bytes_text(trace.nbytes)}"
    )


def _answer(way: str, row: pandas.Series) -> str:
    """The sentence that stands alone."""
    if row["overhead_low"] <= 0:
        return f"**{way}** comes nearest to tensors in memory, and its difference lies within noise"
    return (
        f"**{way}** comes nearest to tensors in memory; {row['overhead']:.0%} of a synthetic step "
        "are still the price of real input"
    )


def _part(rows: pandas.DataFrame, column: str) -> Trace:
    name, color, hatch = PARTS[column]
    return {
        "type": "bar",
        "x": rows["place"],
        "y": rows[column],
        "marker": {"color": color, "pattern": {"shape": hatch, "fillmode": "overlay"}},
        "hovertemplate": f"{name} %{{y:.3g}} ms<extra></extra>",
        "name": name,
        "legendgroup": name,
        "showlegend": False,
    }


def _steps(rows: pandas.DataFrame) -> Trace:
    table = rows.assign(hover=[f"measured step {value:.3g} ms" for value in rows["step_ms"]])
    return points(table, "place", "step_ms", STEP, size=9)


def _overheads(rows: pandas.DataFrame) -> Trace:
    said = [
        f"{way}: {middle:+.0%} ({low:+.0%} to {high:+.0%})"
        for way, middle, low, high in zip(
            rows["way"], rows["overhead"], rows["overhead_low"], rows["overhead_high"], strict=True
        )
    ]
    return points(rows.assign(hover=said), "place", "overhead", OVERHEAD, size=9)


def _zero(count: int) -> Trace:
    return rule([-0.6, count - 0.4], [0, 0], "dot")
