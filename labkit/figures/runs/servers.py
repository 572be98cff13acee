"""Throughput of parameter servers and of an allreduce, as the number of workers grows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import pandas as pd

from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    Finding,
    Markdown,
    RunEntry,
    clock_and_network,
    entries,
    lines,
    published,
    reproduced_text,
    safe_text,
    sentences,
)
from labkit.figures.kit.marks import line_with_band
from labkit.figures.kit.panels import Panel, counts_axis
from labkit.figures.kit.sheet import overload, sheet
from labkit.figures.runs.speed import refusals
from labkit.records.analysis.columns import seed_range
from labkit.records.run import Run, equivalence_failed

# The throughput counts as saturated if doubling the workers multiplies it by less than this factor.
_CLIFF = 1.5


def server_scaling(runs: Iterable[Run] | Run) -> Figure:
    """Draw samples per second over workers: a line per server configuration, bands over seeds.

    Runs with a slow worker are excluded, because their speed is not comparable with that of other
    runs.
    """
    shown = [entry for entry in entries(runs) if not entry.run.experiment.get("stragglers")]
    table = _table(shown)
    looks = lines(table["way"])
    speeds = {
        way: dict(zip(group["workers"], group["rate"], strict=True))
        for way, group in table.groupby("way", sort=False)
    }
    panel = Panel(
        title="Throughput by workers\nmedian over seeds; band: range over seeds",
        x="workers",
        y="samples/s",
        traces=line_with_band(table, "workers", "rate", looks, by="way", marks=True),
        note=refusals(shown) or "no speed was measured",
        always_note=bool(refusals(shown)),
        x_axis=counts_axis(table["workers"]),
        y_axis={"rangemode": "tozero"},
    )
    title = f"Parameter servers and allreduce · {clock_and_network(shown)}"
    words = [
        f"{way}: " + ", ".join(f"{rate:,.0f} samples/s on {n}" for n, rate in group.items())
        for way, group in speeds.items()
    ]
    return sheet(
        [[panel]],
        looks.values(),
        title,
        overload(shown),
        [*words, refusals(shown)],
        plot=300,
    )


def server_prediction(predicted: Sequence[Run], measured: Sequence[Run]) -> pd.DataFrame:
    """Return one row per simulated and measured run: step times in ms, and their ratio.

    Runs that failed the equivalence check have no step time.
    """
    rows = [
        {"way": _way(virtual), "workers": virtual.experiment["workers"]}
        | {"virtual_ms": _step(virtual), "wall_ms": _step(wall)}
        | {"wall_over_virtual": _step(wall) / _step(virtual)}
        for virtual, wall in zip(predicted, measured, strict=True)
    ]
    return pd.DataFrame(rows).set_index("way")


def summarize_server(runs: Iterable[Run] | Run) -> Markdown:
    """Summarize where each server configuration stops scaling; compare with published claims.

    Published claim: one parameter server saturates; several servers saturate only with more
    workers. Published claim (Bugliarello): throughput collapses earlier with servers on the
    workers' machines. Servers on separate machines sustain more workers in the claim of
    Bugliarello. Published claim (Chen 2016): a backup worker shortens the step if one worker is
    slow. The last sentence of the summary names the configuration with the highest throughput.
    """
    passed = [
        run for run in ([runs] if isinstance(runs, Run) else runs) if not equivalence_failed(run)
    ]
    fast = [run for run in passed if not run.experiment.get("stragglers")]
    runs_by_way = {
        way: {run.experiment["workers"]: run for run in fast if _way(run) == way}
        for way in dict.fromkeys(map(_way, fast))
    }
    slow = [run for run in passed if run.experiment.get("stragglers")]
    return sentences(
        [
            *_cliffs(runs_by_way),
            *_more_servers(runs_by_way),
            *_colocated_servers(runs_by_way),
            *_backup_workers(slow),
            *_highest_throughput(runs_by_way),
        ]
    )


def _cliffs(runs_by_way: dict[str, dict[int, Run]]) -> Iterator[Finding]:
    for way, group in runs_by_way.items():
        if len(group) < 2:
            continue
        counts = sorted(group)
        ends = [b for a, b in pairwise(counts) if _gain(group, a, b) < _CLIFF]
        cliff = f"throughput grows with each doubling of the workers up to {counts[-1]}"
        if ends:
            cliff = f"doubling the workers to {ends[0]} gives less than {_CLIFF:g} × the throughput"
        yield _speed(group[counts[-1]], f"On {counts[-1]} workers", way, cliff)


def _more_servers(runs_by_way: dict[str, dict[int, Run]]) -> Iterator[Finding]:
    """Judge whether more servers give a higher throughput with the greatest number of workers."""
    separate = [way for way in runs_by_way if "server" in way and "co-located" not in way]
    fewer_servers, more_servers = (separate[0], separate[-1]) if separate else ("", "")
    both = sorted(set(runs_by_way.get(fewer_servers, {})) & set(runs_by_way.get(more_servers, {})))
    if fewer_servers == more_servers or not both:
        return
    most = both[-1]
    one, more = (_rate(runs_by_way[way][most]) for way in (fewer_servers, more_servers))
    rates = (
        f"{more_servers} serve {more:,.0f} samples/s, {fewer_servers} serve {one:,.0f}: "
        f"{more / one:.2f} ×"
    )
    yield published("More servers give a higher throughput", f"{most} workers", more > one, rates)


def _colocated_servers(runs_by_way: dict[str, dict[int, Run]]) -> Iterator[Finding]:
    """Judge whether servers that share the links of workers have a lower throughput."""
    for way, group in runs_by_way.items():
        separate = runs_by_way.get(way.removesuffix(", co-located"), {})
        both = sorted(set(group) & set(separate))
        if not way.endswith("co-located") or not both:
            continue
        ratios = [_rate(group[n]) / _rate(separate[n]) for n in both]
        shares = ", ".join(f"{ratio:.2f} on {n}" for n, ratio in zip(both, ratios, strict=True))
        details = f"throughput relative to separate servers: {way} have {shares} workers"
        claim = "Co-located servers have a lower throughput than separate servers"
        yield published(claim, "Bugliarello", min(ratios) < 1, details)


def _backup_workers(slow: Sequence[Run]) -> Iterator[Finding]:
    """Judge whether a backup worker shortens the step if one worker is slow."""
    without = [run for run in slow if not run.experiment["strategy"].get("backup_workers")]
    backed = [run for run in slow if run.experiment["strategy"].get("backup_workers")]
    for run in backed:
        base = next(
            (other for other in without if _placement_key(other) == _placement_key(run)), None
        )
        if base is None:
            continue
        ratio = _step(run) / _step(base)
        number = run.experiment["strategy"]["backup_workers"]
        yield Finding(
            f"**A backup worker shortens the step** (Chen 2016), {run.experiment['workers']} "
            f"workers of which one is slow: {reproduced_text(ratio < 1)}",
            details=(
                f"with backup_workers={number} a step takes {_step(run):.3g} ms, without "
                f"{_step(base):.3g} ms: {ratio:.2f} ×",
                f"effective samples/s {_rate(run):,.0f} against {_rate(base):,.0f}",
            ),
        )


def _highest_throughput(runs_by_way: dict[str, dict[int, Run]]) -> Iterator[Finding]:
    """Name the two fastest configurations, and the fastest one that has parameter servers."""
    most = max((n for group in runs_by_way.values() for n in group), default=0)
    ranked = sorted(
        (group[most] for group in runs_by_way.values() if most in group), key=_rate, reverse=True
    )
    if len(ranked) < 2:
        return
    details = [f"next {_way(ranked[1])}, {_rate(ranked[1]):,.0f}"]
    served = next((run for run in ranked if "server" in _way(run)), None)
    if served is not None and served not in ranked[:2]:
        details.append(f"best with servers {_way(served)}, {_rate(served):,.0f}")
    yield _speed(
        ranked[0], f"Highest throughput on {most} workers", _way(ranked[0]), "; ".join(details)
    )


def _table(shown: Sequence[RunEntry]) -> pd.DataFrame:
    """Return a table row per run: label (`way`), workers, and samples/s with range over seeds."""
    rows = []
    for entry in shown:
        if not entry.equivalence_failed and entry.metrics.get("samples_per_second"):
            rate = _rate(entry.run)
            low, high = seed_range(entry.run, "samples_per_second") or (rate, rate)
            rows.append((_way(entry.run), entry.run.experiment["workers"], rate, low, high))
    columns = ["way", "workers", "rate", "rate_low", "rate_high"]
    return pd.DataFrame(rows, columns=columns).sort_values("workers", kind="stable")


def _way(run: Run) -> str:
    """Return the label of a configuration, such as `4 servers, co-located` or `AllReduce`."""
    strategy = run.experiment["strategy"]
    count = strategy.get("servers")
    if count is None:
        return safe_text(str(strategy["name"]))
    late = "" if strategy.get("synchronous", True) else ", asynchronous"
    place = ", co-located" if strategy.get("colocated") else ""
    return f"{count} server{'s' * (count > 1)}{late}{place}"


def _placement_key(run: Run) -> tuple[str, int]:
    return _way(run), run.experiment["workers"]


def _speed(run: Run, head: str, subject: str, details: str) -> Finding:
    ends = seed_range(run, "samples_per_second")
    seeds = run.metrics.get("repeats", 1)
    text, unit = "{:,.0f}".format, " samples/s"
    return Finding(head, subject, _rate(run), ends, seeds, text, unit, details=(details,))


def _gain(group: dict[int, Run], few: int, many: int) -> float:
    """Return by which factor each doubling of workers multiplies the throughput, on average."""
    return float((_rate(group[many]) / _rate(group[few])) ** (1 / math.log2(many / few)))


def _rate(run: Run) -> float:
    return float(run.metrics["samples_per_second"])


def _step(run: Run) -> float:
    return float("nan") if equivalence_failed(run) else float(run.metrics["step_ms"]["median"])
