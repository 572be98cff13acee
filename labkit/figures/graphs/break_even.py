"""Products on two devices by size, and from which size on the way to the faster one pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.common.units import plural
from labkit.figures.kit.entries import lines
from labkit.figures.kit.findings import Finding, Markdown
from labkit.figures.kit.marks import line_with_band
from labkit.figures.kit.sheet import Panel, sheet
from labkit.records.placed import WAY, Row

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

BAND = "band: least to largest of the repeats"
NONE = (
    "TensorFlow lists no GPU here, so products and copies of one are not measured; on a machine "
    "with one this cell draws them, and the size from which on the way there pays."
)


def break_even_table(rows: Sequence[Row]) -> pd.DataFrame:
    """A row a size: seconds on the host and on the other device, alone and with the copies.

    Args:
        rows: of `labkit.worker.devices.Examined.speeds`.

    Returns:
        n, host_ms, device_ms, in_ms and out_ms (of one matrix); there_ms, in which two matrices go
        there, the product is made and comes back; pays, whether that is less than on the host, in
        all repeats.
    """
    import pandas as pd

    table = pd.DataFrame(rows)
    table["ms"] = 1e3 * table["seconds"]
    host, device = table[table["what"] == "product"]["device"].unique()
    by = table.pivot_table(index="n", columns="device", values="ms")
    found = pd.DataFrame(
        {
            "host_ms": by[host],
            "device_ms": by[device],
            "in_ms": by[f"{host} to {device}"],
            "out_ms": by[f"{device} to {host}"],
        }
    )
    way = table[table["what"] == WAY].set_index("n")
    alone = table[(table["what"] == "product") & (table["device"] == host)].set_index("n")
    found["there_ms"] = way["ms"]
    found["pays"] = way["seconds_high"] < alone["seconds_low"]
    return found.reset_index()


def break_even(rows: Sequence[Row]) -> Figure | Markdown:
    """Time of a product by size on both devices, of copies, and of the way there and back.

    Bands span the repeats. Without rows, which is without a GPU, a sentence and no figure.
    """
    import pandas as pd

    if not rows:
        return Markdown(NONE)
    table = pd.DataFrame(rows)
    for end in ("", "_low", "_high"):
        table[f"ms{end}"] = 1e3 * table[f"seconds{end}"]
    table["line"] = table["what"] + ", " + table["device"]
    way = break_even_table(rows)
    host, device = table[table["what"] == "product"]["device"].unique()
    looks = lines(table["line"].unique())
    drawn = line_with_band(table, "n", "ms", looks, by="line", marks=True)
    threads = plural(int(table["threads"].iloc[0]), "thread")
    panel = Panel(
        title=f"n × n products and copies, float32, {threads} of the CPU\n{BAND}",
        x="n",
        y="time, ms",
        traces=drawn,
        x_axis={"type": "log", "tickvals": way["n"].tolist()},
        y_axis={"type": "log"},
    )
    title = f"Product on {host} and {device} by size · wall clock · network not emulated"
    return sheet([[panel]], looks.values(), title, [], [_verdict(way, host, device)], plot=320)


def break_even_finding(rows: Sequence[Row]) -> Finding:
    """From which measured size on the way there pays; the sentence where nothing was measured."""
    if not rows:
        return Finding(NONE.removesuffix("."))
    devices = list(dict.fromkeys(str(row["device"]) for row in rows if row["what"] == "product"))
    return Finding(_verdict(break_even_table(rows), *devices))


def _verdict(way: pd.DataFrame, host: str, device: str) -> str:
    pays = way["pays"].tolist()
    if not pays[-1]:
        most = way["n"].iloc[-1]
        there = f"a product on {device} with its copies"
        return f"Up to n = {most} {there} is not done before one on {host}"
    since = len(pays) - next((at for at, each in enumerate(pays[::-1]) if not each), len(pays))
    row = way.iloc[since]
    return (
        f"From n = {row['n']:.0f} on a product on {device} with its copies takes less "
        f"({row['there_ms']:.3g} ms) than on {host} ({row['host_ms']:.3g} ms), in all repeats"
    )
