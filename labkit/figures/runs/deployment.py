"""A model before and after compression: accuracy against bytes on disk and time of inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.common.units import bytes_axis, bytes_text
from labkit.figures.kit.axes import SHARES
from labkit.figures.kit.entries import PALETTE, SYMBOLS, Line
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import points_with_bars
from labkit.figures.kit.sheet import Panel, sheet

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure

ORIGINAL = "original"
LEVEL = 0.05  # of the sign test, below which accuracies are told apart
WORTH = 1.02  # what is smaller by less is called of the same size

Row: TypeAlias = dict[str, Any]  # of what `labkit.deployment.compare` returned


def deployment(table: pandas.DataFrame) -> Figure:
    """Accuracy against bytes on disk, and against the time of an inference, of each method.

    A marker's shape is the family of its method; up and to the left is better in both
    panels. The whisker spans the repeats. Methods that could do nothing with the model are named.

    Args: table, what `labkit.deployment.compare` returned.
    """
    rows = _measured(table)
    shown = _lines(rows)
    panels = _panels(table[table["bytes"].notna()], shown)
    refused = [name for name, row in _rows(table).items() if row["bytes"] != row["bytes"]]
    remark = f"not possible with this model: {', '.join(refused)}" if refused else ""
    title = f"Compressed for deployment, {len(rows) - 1} ways · wall clock · 1 process"
    words = "; ".join(
        f"{name}: {row['accuracy']:.1%} of the test data right, {bytes_text(row['bytes'])}, "
        f"{row['time_ratio']:.3g} times the original's inference time"
        for name, row in rows.items()
    )
    return sheet([panels], shown.values(), title, [remark], [words], plot=300)


def deployment_reading(table: pandas.DataFrame) -> Markdown:
    """For each method what it did, lost and saved; then the smallest file without a loss shown."""
    rows = _rows(table)
    original = rows[ORIGINAL]
    found = [
        f"**{ORIGINAL}**: {original['accuracy']:.1%} of {original['test_answers']:.0f} test "
        f"answers right, {bytes_text(original['bytes'])} on disk, {original['inference_ms']:.3g} "
        f"ms for a batch of {original['batch_size']:.0f}"
    ]
    others = {name: row for name, row in _measured(table).items() if name != ORIGINAL}
    for name, row in rows.items():
        if name in others:
            parts = (row["what"], _accuracy(row), _bytes(row), _time(row))
            found.append(f"**{name}**: {'; '.join(parts)}")
        elif name != ORIGINAL:
            found.append(f"**{name}**: not possible with this model. {row['what']}")
    return sentences(map(Finding, [*found, *_together(others)]))


def _accuracy(row: Row) -> str:
    said = f"{row['accuracy']:.1%} right"
    if not row["lost"] + row["gained"]:
        return f"{said}, on the same answers as the original"
    said = f"{said}, {row['lost']:.0f} lost and {row['gained']:.0f} gained against the original"
    if row["chance"] >= LEVEL:
        return f"{said}, which chance could do (p = {row['chance']:.2g})"
    return f"{said}, {'better' if row['gained'] > row['lost'] else 'worse'} beyond chance"


def _bytes(row: Row) -> str:
    text = f"{bytes_text(row['bytes'])}, {_times(row['smaller'], 'smaller', 'larger')}"
    if row["file"].endswith(".keras"):
        return text
    # Anybody has so much for nothing.
    return f"{text}; gzip leaves {bytes_text(row['keras_gzip_bytes'])} of its .keras file"


def _time(row: Row) -> str:
    spread = f"{row['time_ratio_low']:.2f} to {row['time_ratio_high']:.2f}"
    said = f"{row['time_ratio']:.2f}x the original's inference time (repeats {spread})"
    if _faster(row):
        return f"{said}: faster"
    if row["time_ratio_low"] > 1:
        return f"{said}: slower"
    return f"{said}: no difference beyond the spread"


def _together(others: dict[str, Row]) -> list[str]:
    lines = []
    if trained := [name for name, row in others.items() if row["extra_epochs"]]:
        lines.append(
            f"Trained longer than the original: {', '.join(trained)}. What they gain in accuracy "
            "may be the training's"
        )
    faster = [name for name, row in others.items() if _faster(row)]
    lines.append(f"Faster than the original beyond the spread: {', '.join(faster) or 'none'}")
    kept = {name: row for name, row in others.items() if _kept(row) and row["smaller"] > WORTH}
    if not kept:
        return [*lines, "Each file here that is smaller has lost accuracy beyond chance"]
    best = min(kept, key=lambda name: kept[name]["bytes"])
    return [
        *lines,
        f"Smallest file whose loss, if any, these test answers cannot tell from chance: "
        f"**{best}** ({kept[best]['lost']:.0f} lost, {kept[best]['gained']:.0f} gained), "
        f"{kept[best]['smaller']:.3g}x smaller than the original",
    ]


def _kept(row: Row) -> bool:
    """Whether the test shows no loss of accuracy."""
    return bool(row["gained"] >= row["lost"] or row["chance"] >= LEVEL)


def _faster(row: Row) -> bool:
    return bool(row["time_ratio_high"] < 1)


def _times(ratio: float, more: str, less: str) -> str:
    if 1 / WORTH <= ratio <= WORTH:
        return "as large (within 2 %)"
    return f"{ratio:.3g}x {more}" if ratio > 1 else f"{1 / ratio:.3g}x {less}"


def _rows(table: pandas.DataFrame) -> dict[str, Row]:
    return dict(zip(map(str, table.index), table.to_dict("records"), strict=True))


def _measured(table: pandas.DataFrame) -> dict[str, Row]:
    # NaN, which is not equal to itself, is what a method has that the model does not allow.
    return {name: row for name, row in _rows(table).items() if row["bytes"] == row["bytes"]}


def _lines(rows: dict[str, Row]) -> dict[str, Line]:
    """A marker a family of methods, a colour a member of it."""
    members: dict[str, list[str]] = {}
    for name, row in rows.items():
        members.setdefault(row["family"], []).append(name)
    return {
        name: Line(
            label=name,
            color=PALETTE[names.index(name) % len(PALETTE)],
            dash="solid",
            symbol=SYMBOLS[place % len(SYMBOLS)],
        )
        for place, names in enumerate(members.values())
        for name in names
    }


def _panels(table: pandas.DataFrame, shown: dict[str, Line]) -> list[Panel]:
    """Accuracy over bytes on disk, and over the time of an inference."""
    rows = table.assign(run=table.index.map(str), hover=[*map(_hover, table.to_dict("records"))])
    batch, right = rows["batch_size"].iloc[0], ("accuracy on the test data", dict(SHARES))
    return [
        Panel(
            title="Bytes on disk\nof the file that is read back",
            x="bytes on disk",
            y=right[0],
            traces=points_with_bars(rows, "bytes", "accuracy", shown, size=11),
            x_axis=bytes_axis(0.8 * rows["bytes"].min(), 1.25 * rows["bytes"].max()),
            y_axis=right[1],
        ),
        Panel(
            title="Time of an inference\nwhisker: least to largest of the repeats",
            x=f"time of a batch of {batch:.0f} / the original's",
            y=right[0],
            traces=points_with_bars(rows, "time_ratio", "accuracy", shown, size=11),
            x_axis={"rangemode": "tozero"},
            y_axis=right[1],
        ),
    ]


def _hover(row: Row) -> str:
    return (
        f"{row['accuracy']:.2%} right<br>{bytes_text(row['bytes'])}, {row['smaller']:.3g}x smaller"
        f"<br>{row['inference_ms']:.3g} ms, {row['time_ratio']:.2f}x the original's"
    )
