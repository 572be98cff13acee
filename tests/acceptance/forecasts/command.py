"""The command of the campaign of forecasts: its options, and its tables."""

from __future__ import annotations

from pathlib import Path

import click

from labkit.bench.command import AS_JSON, show_rows
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.output import output_option
from labkit.common.terminal import say
from tests.acceptance.forecasts.campaign import measure
from tests.acceptance.forecasts.comparison import compared, summary, verify, worst
from tests.acceptance.forecasts.predictions import known
from tests.acceptance.forecasts.settings import settings
from tests.acceptance.rows import read_rows, record_rows


@click.command("forecasts")
@click.option(
    "--calibration",
    "path",
    type=click.Path(path_type=Path),
    help="What `labkit calibrate -o FILE` has written; default: measured first, beside the rows.",
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--only", default="", help="Settings of whose name this is a part: '2 ranks'.")
@output_option("--figure", help="Draw the diagonal, as HTML.")
@AS_JSON
def command(
    path: Path | None, repeats: int, only: str, figure: Path | None, file: Path | None
) -> None:
    """Compare forecasts with runs; all forecasts are written before the first run starts.

    There are 76 settings: 64 settings with two ranks; the others have one rank, more ranks than
    cores, or two hosts. All runs take about 40 minutes. The campaign does not measure rows again
    that FILE already contains.
    """
    if not (chosen := settings(only)):
        cases = "; ".join(dict.fromkeys(each.case for each in settings()))
        raise InvalidInput(f"only={only!r} is in no case; there are: {cases}")
    rows = read_rows(file)
    record_rows(measure(chosen, repeats, rows, known(chosen, path, file)), rows, file)
    for row in (row for row in rows if row["what"] == "skipped"):
        say(f"skipped: {row['case']}: {row['reason']}")
    columns = {"case": "case", "network": "network", "predicted_ms": "predicted ms"}
    columns |= {"measured_ms": "measured ms", "least_ms": "least", "most_ms": "most"}
    columns |= {"error": "error", "held": "held", "group": "group"}
    show_rows(compared(rows), columns, None)
    errors = {f"error_{name}": f"{name} error" for name in ("median", "p90", "bias")}
    show_rows(
        summary(rows), {"group": "group", "settings": "settings"} | errors | {"held": "held"}, None
    )
    if figure is not None:
        from labkit.figures import forecast_diagonal
        from labkit.figures.kit.canvas import html_page
        from labkit.records.store import write_atomically

        figure.parent.mkdir(parents=True, exist_ok=True)
        page = html_page(forecast_diagonal(compared(rows), str(rows[0]["calibration"])))
        write_atomically(figure, page)
    say("the worst:")
    show_rows(worst(rows), columns, None)
    if wrong := verify(rows):
        raise LabkitError(f"the rows prove nothing: {'; '.join(wrong)}")
