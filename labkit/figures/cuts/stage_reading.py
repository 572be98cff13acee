"""What the tables of models cut across ranks say, made from their numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from labkit.common.units import bytes_text
from labkit.figures.cuts.stage_tables import pipeline_table, rank_table
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas

Row = dict[str, float]

GAIN = 1.05  # below this a speed-up is none, on machines whose steps vary by some percent
NEAR = 0.9  # of what is possible


def pipeline_reading(runs: Iterable[Run] | Run, baseline: Run | None = None) -> Markdown:
    """For each run its bubble beside theory and its speed-up; then what more micro-batches bring.

    Args and raises: as `pipeline_table`.
    """
    table = pipeline_table(runs, baseline)
    found = [Finding(f"**{label}**", said=tuple(_bubbles(row))) for label, row in _rows(table)]
    for (schedule, ranks), rows in table.groupby(["schedule", "ranks"], sort=False):
        known = rows.dropna(subset=["speedup"]).sort_values("microbatches")
        if known["microbatches"].nunique() > 1:
            found.append(Finding(f"**{schedule}** on {ranks} ranks", said=(_growth(known),)))
    return sentences(found)


def cut_reading(runs: Iterable[Run] | Run, baseline: Run | None = None) -> Markdown:
    """For each way to cut a model: memory of the fullest rank, idleness, traffic, length of a step.

    Args: runs: of one model; baseline: what they are compared with, one process; default: the
    first of the runs with workers=1.
    Raises: as `rank_table`.
    """
    given = [runs] if isinstance(runs, Run) else list(runs)
    table = rank_table(given)
    # Replicas do not measure their activations: what is predicted stands for it, and is said.
    table["counted"] = table["bytes"].notna()
    table["bytes"] = table["bytes"].fillna(table["bytes_predicted"])
    by_run = table.groupby(level="run", sort=False).agg(
        # The fullest rank must fit its machine, and the slowest sets the pace; idleness is
        # everybody's.
        bytes=("bytes", "max"),
        counted=("counted", "all"),
        payload=("payload_bytes", "max"),
        utilisation=("utilisation", "mean"),
        step_ms=("step_ms", "max"),
    )
    base = baseline or next((run for run in given if run.experiment["workers"] == 1), None)
    # The baseline's row by its place: the table keeps the order of the runs.
    places = [number for number, run in enumerate(given) if base and run.path == base.path]
    own = by_run.iloc[places[0]].to_dict() if places else None
    found = [
        Finding(f"**{label}**", said=(", ".join(_cut(row, own)),)) for label, row in _rows(by_run)
    ]
    return sentences([*found, *([Finding(_extremes(by_run))] if len(by_run) > 1 else [])])


def _rows(table: pandas.DataFrame) -> Iterable[tuple[str, Row]]:
    return zip(table.index, table.to_dict("records"), strict=True)


def _bubbles(row: Row) -> Iterable[str]:
    if _known(row["bubble_measured"]):
        yield (
            f"ranks wait {row['bubble_measured']:.0%} of a step "
            f"({row['bubble_low']:.0%} to {row['bubble_high']:.0%})"
        )
    yield f"the simulation with the seconds of these stages says {row['bubble_simulated']:.0%}"
    if _known(row["bubble_formula"]):
        yield f"the formula of equal stages {row['bubble_formula']:.0%}"
    if _known(row["speedup"]) and _known(row["bound"]):
        yield f"speed-up {row['speedup']:.2f}, at most {row['bound']:.2f} by theory"


def _growth(rows: pandas.DataFrame) -> str:
    first, last = rows.iloc[0], rows.iloc[-1]
    said = (
        f"from {first['microbatches']} to {last['microbatches']} micro-batches the speed-up goes "
        f"from {first['speedup']:.2f} to {last['speedup']:.2f}"
    )
    if first["microbatches"] == 1 and first["speedup"] < GAIN:
        said += "; one micro-batch brings no time, for its stages wait for each other"
    if not _known(last["bound"]):
        return said
    share = last["speedup"] / last["bound"]
    if share >= NEAR:
        return f"{said}; the last is {share:.0%} of what the bubble allows"
    return (
        f"{said}; that is {share:.0%} of what the bubble allows: the rest goes to unequal stages, "
        "messages, small micro-batches and what processes on one machine take from each other"
    )


def _cut(row: Row, own: Row | None) -> Iterable[str]:
    if _known(row["bytes"]):
        held = f"the fullest rank keeps {bytes_text(row['bytes'])}"
        if own is not None and _known(own["bytes"]):
            held += f" ({_share(row['bytes'] / own['bytes'])} of one process)"
        yield held if row["counted"] else f"{held}, as predicted"
    yield f"the busiest hands over {bytes_text(row['payload'])} a step"
    if _known(row["utilisation"]):
        yield f"ranks compute {row['utilisation']:.0%} of the time"
    if _known(row["step_ms"]):
        step = f"a step takes {row['step_ms']:.3g} ms"
        if own is not None and _known(own["step_ms"]):
            step += f", {_share(row['step_ms'] / own['step_ms'])} of one process"
        yield step


def _share(value: float) -> str:
    """Three digits: of a short step more would be noise."""
    return f"{value:.2f}" if value < 10 else f"{value:.3g}"


def _extremes(table: pandas.DataFrame) -> str:
    said = []
    if table["bytes"].notna().any():
        said.append(f"least memory on a rank: **{table['bytes'].idxmin()}**")
    if table["step_ms"].notna().any():
        said.append(f"shortest step: **{table['step_ms'].idxmin()}**")
    sending = table[table["payload"] > 0]["payload"]
    if len(sending):
        said.append(f"least traffic of those that send: **{sending.idxmin()}**")
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}"


def _known(value: float) -> bool:
    return value == value  # what is missing in a table is NaN, which equals nothing
