"""`labkit gallery`: notebooks as a site of questions and answers; their words held to numbers."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from labkit.common.output import check_output
from labkit.common.terminal import say

FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("folder", metavar="[NOTEBOOKS]", default="notebooks", type=FOLDER)
@click.option("-o", "site", default="site", show_default=True, type=FOLDER, help="The folder.")
@click.option("--only", default="", metavar="NAMES", help="Such as tour,scheduling.")
@click.option("-j", "jobs", default=1, show_default=True, type=click.IntRange(1), help="At a time.")
@click.option("--check", is_flag=True, help="Hold words against numbers, with small values.")
@click.option("--force", is_flag=True, help="Replace a page that labkit has not written.")
def gallery(folder: Path, site: Path, only: str, jobs: int, check: bool, force: bool) -> None:
    """Execute the notebooks of a folder and write a site that opens offline: an index with a
    question, an answer and a picture of each, and a page each.

    What has completed is kept, so that the command goes on where it ended. With --check each
    notebook runs with each set of values in its folder's check.yaml, and what its sentences say is
    held against what its tables, figures and records show.
    """
    from labkit.gallery import chosen
    from labkit.gallery import gallery as write_gallery
    from labkit.jobs.listing import shown
    from labkit.records.endings import terminate

    signal.signal(signal.SIGTERM, terminate)
    notebooks = chosen(folder, only)
    check_output(site / "index.html", force)
    if check:
        sys.exit(1 if _check(notebooks, site, jobs) else 0)
    for notebook in notebooks:
        check_output(site / f"{notebook.stem}.html", force)
    others = chosen(folder, "")
    ended = write_gallery(notebooks, site, jobs, lambda line: say(line, err=True), others)
    failed = sum(result.state != "completed" for result in ended)
    say(f"gallery: {shown(site / 'index.html')}" + (f"; {failed} failed" if failed else ""))
    sys.exit(1 if failed else 0)


def _check(notebooks: list[Path], site: Path, jobs: int) -> int:
    """Say of each run what does not hold; how many runs have a fault."""
    from labkit.gallery.check import check, small_values
    from labkit.gallery.execution import execute_all

    faulty = 0
    gallery_specs = small_values(notebooks)
    for gallery_spec, result in execute_all(
        gallery_specs, site / "check", jobs, lambda line: say(line, err=True)
    ):
        if result.state != "completed":
            faulty += 1
            say(f"{gallery_spec}: {result.state}: {result.cause}")
            continue
        verdict = check(gallery_spec, result.path)
        say(f"{gallery_spec}: {verdict}")
        for fault in verdict.faults:
            say(f"  {fault}")
        faulty += bool(verdict.faults)
    say(f"{len(gallery_specs)} runs, {faulty} with a fault")
    return faulty
