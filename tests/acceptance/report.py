"""Time the writing of a report of many runs, and the first figure's display in a browser."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from labkit.bench.command import AS_JSON, numbers, show_rows
from labkit.common.errors import InvalidInput, LabkitError
from labkit.records import store
from labkit.records.run import Run, load_runs
from tests.acceptance.records import timed

if TYPE_CHECKING:
    from labkit.bench.timing import Row

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LIMIT = 120.0  # timeout until a browser has drawn all figures, seconds
# The script scrolls to each figure, because the page draws a figure only when it is visible.
READ = """async () => {
    const isDrawn = (plot) => !plot.querySelector("svg.still") && plot.textContent;
    for (const plot of document.querySelectorAll(".plot")) {
        plot.scrollIntoView();
        while (!isDrawn(plot)) await new Promise((done) => setTimeout(done, 20));
    }
}"""
_LEFT = ("model.keras", "logs")  # files of a run that no report reads


def measure(folder: Path, counts: Sequence[int]) -> Iterator[Row]:
    """Yield a row per number of runs: seconds to write and to open the page, and its size.

    Raises: LabkitError if there are no runs or no browser.
    """
    runs = load_runs(folder)
    if not runs or min(counts) < 1:
        raise InvalidInput(f"{len(runs)} runs in {folder}, counts {counts}: both must be 1 or more")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise LabkitError("no Chromium found: apt-get install chromium")
    for count in counts:
        with TemporaryDirectory(prefix="labkit-pages-") as place:
            copied = _copies(runs, Path(place) / "runs", count)
            seconds, processor = timed(["report", "runs"], Path(place))
            page = Path(place) / "report.html"
            first, every = opened(page, browser)
            row: Row = {"bench": "report", "runs": count, "copied": copied, "made_s": seconds}
            row |= {"processor_s": processor, "mb": page.stat().st_size / 1e6}
            yield row | {"first_s": first, "all_s": every}


def opened(page: Path, browser: str) -> tuple[float, float]:
    """Return the seconds until a page has drawn its first figure, and until it has drawn all."""
    sync_api = import_module("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = chromium.new_context(offline=True).new_page()
        begun = time.monotonic()
        tab.goto(page.as_uri())
        tab.set_default_timeout(1e3 * LIMIT)
        tab.wait_for_selector("html[data-first]")
        tab.evaluate(READ)
        tab.wait_for_selector("html[data-drawn]")
        every = time.monotonic() - begun
        first = float(tab.get_attribute("html", "data-first") or 0) / 1e3
        chromium.close()
    return first, every


def _copies(runs: Sequence[Run], folder: Path, count: int) -> int:
    """Copy many run folders, chosen evenly; return how many have another learning rate."""
    for number in range(count):
        # If there are more runs than copies, the copied runs are spaced evenly; if there are fewer,
        # runs are copied again.
        again, place = divmod(number, len(runs))
        run = runs[place * len(runs) // count if count < len(runs) else place]
        target = folder / f"{number:05d}"
        shutil.copytree(run.path, target, ignore=shutil.ignore_patterns(*_LEFT))
        if again:
            record = json.loads((target / "experiment.json").read_text())
            record["learning_rate"] = (record.get("learning_rate") or 0.001) * (1 + again)
            (target / "experiment.json").write_text(store.json_text(record))
    return max(0, count - len(runs))


@click.command("report")
@click.argument("folder", metavar="RUNS", type=click.Path(path_type=Path))
@click.option("--counts", default="2,14,200,1000", show_default=True, callback=numbers)
@AS_JSON
def command(folder: Path, counts: list[int], file: Path | None) -> None:
    """Time reports of several numbers of runs from RUNS, and their display in an offline browser.

    If RUNS contains too few runs, the campaign copies their records with other learning rates.
    """
    rows = list(measure(folder, counts))
    columns = {"runs": "runs", "copied": "of them copied", "made_s": "made, s"}
    columns |= {"processor_s": "processor, s", "mb": "MB", "first_s": "first figure, s"}
    show_rows(rows, columns | {"all_s": "all figures, s"}, file)
