"""Parameter servers and an allreduce over the number of workers: where each stops to pay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from labkit.figures.kit.entries import Entry, clock_and_network, entries, lines, safe_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import line_with_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import busy, sheet
from labkit.figures.runs.speed import refusals
from labkit.records.analysis.columns import spread
from labkit.records.run import Run, gate_failed

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

_CLIFF = 1.5  # twice the workers bring less than this


def server_scaling(runs: Iterable[Run] | Run) -> Figure:
    """Samples a second over workers: a line for each way to hold the weights, in a band of seeds.

    Runs with a slow worker are left out, as they are of another world.
    """
    shown = [entry for entry in entries(runs) if not entry.run.experiment.get("slow")]
    table = _table(shown)
    looks = lines(table["way"])
    speeds = {
        way: dict(zip(own["workers"], own["rate"], strict=True))
        for way, own in table.groupby("way", sort=False)
    }
    ticks = sorted(set(table["workers"]))
    panel = Panel(
        title="Throughput by workers\nmedian over seeds; band: their spread",
        x="workers",
        y="samples/s",
        traces=line_with_band(table, "workers", "rate", looks, by="way", marks=True),
        note=refusals(shown) or "no speed was measured",
        always_note=bool(refusals(shown)),
        x_axis={"type": "log", "tickvals": ticks, "ticktext": [str(tick) for tick in ticks]},
        y_axis={"rangemode": "tozero"},
    )
    title = f"Parameter servers and allreduce · {clock_and_network(shown)}"
    words = [
        f"{way}: " + ", ".join(f"{rate:,.0f} samples/s on {n}" for n, rate in own.items())
        for way, own in speeds.items()
    ]
    return sheet([[panel]], looks.values(), title, busy(shown), [*words, refusals(shown)], plot=300)


def server_prediction(predicted: Sequence[Run], measured: Sequence[Run]) -> pd.DataFrame:
    """A row a pair of runs that differ in their clock: the step on both, ms, and their ratio.

    A step of a run whose equivalence gate failed is missing.
    """
    import pandas as pd

    rows = [
        {"way": _way(virtual), "workers": virtual.experiment["workers"]}
        | {"virtual_ms": _step(virtual), "wall_ms": _step(wall)}
        | {"wall_over_virtual": _step(wall) / _step(virtual)}
        for virtual, wall in zip(predicted, measured, strict=True)
    ]
    return pd.DataFrame(rows).set_index("way")


def server_reading(runs: Iterable[Run] | Run) -> Markdown:
    """Where each way's cliff is, and whether the shapes that were published came.

    They are: one server saturates and more servers move the cliff; servers on the workers' own
    links collapse before those on separate ones (Bugliarello); a backup worker shortens the step
    where one worker is slow (Chen 2016). The last sentence says which way gets most done.
    """
    found = [run for run in ([runs] if isinstance(runs, Run) else runs) if not gate_failed(run)]
    fast = [run for run in found if not run.experiment.get("slow")]
    by = {
        way: {run.experiment["workers"]: run for run in fast if _way(run) == way}
        for way in dict.fromkeys(map(_way, fast))
    }
    slow = [run for run in found if run.experiment.get("slow")]
    return sentences([*_cliffs(by), *_more(by), *_colocated(by), *_backups(slow), *_most(by)])


def _cliffs(by: dict[str, dict[int, Run]]) -> Iterator[Finding]:
    for way, own in by.items():
        if len(own) < 2:
            continue
        counts = sorted(own)
        ends = [b for a, b in pairwise(counts) if _gain(own, a, b) < _CLIFF]
        said = (
            f"doubling the workers brings less than {_CLIFF:g} × from {ends[0]} on"
            if ends
            else (f"no cliff up to {counts[-1]} workers")
        )
        yield _speed(own[counts[-1]], f"On {counts[-1]} workers", way, said)


def _more(by: dict[str, dict[int, Run]]) -> Iterator[Finding]:
    """One server saturates, and more servers move the cliff."""
    separate = [way for way in by if "server" in way and "co-located" not in way]
    few, many = (separate[0], separate[-1]) if separate else ("", "")
    both = sorted(set(by.get(few, {})) & set(by.get(many, {})))
    if few == many or not both:
        return
    most = both[-1]
    one, more = (_rate(by[way][most]) for way in (few, many))
    came = more > one
    yield Finding(
        f"**More servers move the cliff** ({most} workers): {it_came(came)}",
        said=(f"{many} serve {more:,.0f} samples/s, {few} {one:,.0f}: {more / one:.2f} ×",),
    )


def _colocated(by: dict[str, dict[int, Run]]) -> Iterator[Finding]:
    """Servers that share the workers' links collapse first."""
    for way, own in by.items():
        apart = by.get(way.removesuffix(", co-located"), {})
        both = sorted(set(own) & set(apart))
        if not way.endswith("co-located") or not both:
            continue
        ratios = [_rate(own[n]) / _rate(apart[n]) for n in both]
        said = ", ".join(f"{ratio:.2f} on {n}" for n, ratio in zip(both, ratios, strict=True))
        yield Finding(
            f"**Co-located servers collapse first** (Bugliarello): {it_came(min(ratios) < 1)}",
            said=(f"of the throughput of separate ones {way} have {said} workers",),
        )


def _backups(slow: Sequence[Run]) -> Iterator[Finding]:
    """A backup worker shortens the step where one is slow."""
    without = [run for run in slow if not run.experiment["strategy"].get("backups")]
    backed = [run for run in slow if run.experiment["strategy"].get("backups")]
    for run in backed:
        base = next((each for each in without if _like(each) == _like(run)), None)
        if base is None:
            continue
        ratio = _step(run) / _step(base)
        number = run.experiment["strategy"]["backups"]
        yield Finding(
            f"**A backup worker shortens the step** (Chen 2016), {run.experiment['workers']} "
            f"workers of which one is slow: {it_came(ratio < 1)}",
            said=(
                f"with {number} backup a step takes {_step(run):.3g} ms, without "
                f"{_step(base):.3g} ms: {ratio:.2f} ×",
                f"samples/s that count {_rate(run):,.0f} against {_rate(base):,.0f}",
            ),
        )


def _most(by: dict[str, dict[int, Run]]) -> Iterator[Finding]:
    """Which way gets most done on most workers, the next, and servers where these are none."""
    most = max((n for own in by.values() for n in own), default=0)
    ranked = sorted((own[most] for own in by.values() if most in own), key=_rate, reverse=True)
    if len(ranked) < 2:
        return
    said = [f"next {_way(ranked[1])}, {_rate(ranked[1]):,.0f}"]
    served = next((run for run in ranked if "server" in _way(run)), None)
    if served is not None and served not in ranked[:2]:
        said.append(f"of servers {_way(served)}, {_rate(served):,.0f}")
    yield _speed(ranked[0], f"Most is done on {most} workers by", _way(ranked[0]), "; ".join(said))


def _table(shown: Sequence[Entry]) -> pd.DataFrame:
    """A row a run: way, workers, rate with rate_low and rate_high over seeds."""
    import pandas as pd

    rows = []
    for entry in shown:
        if not entry.gate_failed and entry.metrics.get("samples_per_second"):
            rate = _rate(entry.run)
            low, high = spread(entry.run, "samples_per_second") or (rate, rate)
            rows.append((_way(entry.run), entry.run.experiment["workers"], rate, low, high))
    columns = ["way", "workers", "rate", "rate_low", "rate_high"]
    return pd.DataFrame(rows, columns=columns).sort_values("workers", kind="stable")


def _way(run: Run) -> str:
    """`4 servers, co-located`; `AllReduce`."""
    strategy = run.experiment["strategy"]
    count = strategy.get("servers")
    if count is None:
        return safe_text(str(strategy["name"]))
    late = "" if strategy.get("synchronous", True) else ", asynchronous"
    place = ", co-located" if strategy.get("colocated") else ""
    return f"{count} server{'s' * (count > 1)}{late}{place}"


def _like(run: Run) -> tuple[str, int]:
    return _way(run), run.experiment["workers"]


def _speed(run: Run, what: str, who: str, said: str) -> Finding:
    ends = spread(run, "samples_per_second")
    seeds = run.metrics.get("repeats", 1)
    text, unit = "{:,.0f}".format, " samples/s"
    return Finding(what, who, _rate(run), ends, seeds, text, unit, said=(said,))


def _gain(own: dict[int, Run], few: int, many: int) -> float:
    """What twice the workers would bring, were all steps between these two counts alike."""
    return float((_rate(own[many]) / _rate(own[few])) ** (1 / math.log2(many / few)))


def _rate(run: Run) -> float:
    return float(run.metrics["samples_per_second"])


def _step(run: Run) -> float:
    return float("nan") if gate_failed(run) else float(run.metrics["step_ms"]["median"])


def it_came(came: bool) -> str:
    """What is said of a shape that was published."""
    return "it came" if came else "it did **not** come"
