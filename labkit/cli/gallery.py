"""`labkit gallery`: execute notebooks, write a web site of them, and check their claims."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from labkit.common.imports import require
from labkit.common.output import check_output
from labkit.common.terminal import say

FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("folder", metavar="[NOTEBOOKS]", default="notebooks", type=FOLDER)
@click.option(
    "-o",
    "site",
    default="site",
    show_default=True,
    type=FOLDER,
    help="Folder to which the web site is written.",
)
@click.option(
    "--only",
    default="",
    metavar="NAMES",
    help="Notebooks to execute, e.g. tour,scheduling.  [default: all]",
)
@click.option(
    "-j",
    "jobs",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Number of notebooks that are executed at the same time.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Run notebooks with the parameter values of check.yaml, and compare the claims of "
    "their text with measured numbers.",
)
@click.option(
    "--force", is_flag=True, help="Overwrite existing pages even if labkit did not write them."
)
def gallery(folder: Path, site: Path, only: str, jobs: int, check: bool, force: bool) -> None:
    """Execute notebooks, and write a web site that opens offline.

    The site has one page per notebook. The site's index page shows a question, an answer and a
    picture for each notebook. If the command was interrupted, start it again. It then skips the
    notebooks that have been executed. With --check, each notebook runs once for each set of values.
    The file check.yaml in the notebook's folder contains the sets of values. The command then
    compares the claims in the notebook's text with the results. The results are the tables, figures
    and records of the run.
    """
    from labkit.jobs.gallery import gallery as write_gallery
    from labkit.jobs.gallery import select_notebooks
    from labkit.jobs.listing import displayed_path
    from labkit.records.endings import terminate

    require("train")
    signal.signal(signal.SIGTERM, terminate)
    notebooks = select_notebooks(folder, only)
    check_output(site / "index.html", force)
    if check:
        sys.exit(1 if _check(notebooks, site, jobs) else 0)
    for notebook in notebooks:
        check_output(site / f"{notebook.stem}.html", force)
    others = select_notebooks(folder, "")
    ended = write_gallery(notebooks, site, jobs, lambda line: say(line, err=True), others)
    failed = sum(result.state != "completed" for result in ended)
    say(
        f"gallery: {displayed_path(site / 'index.html')}" + (f"; {failed} failed" if failed else "")
    )
    sys.exit(1 if failed else 0)


def _check(notebooks: list[Path], site: Path, jobs: int) -> int:
    """Print the false claims of each notebook run, and return the number of runs with errors."""
    from labkit.jobs.gallery.check import check_notebook, check_specs
    from labkit.jobs.gallery.index_entry import execute_all

    faulty = 0
    gallery_specs = check_specs(notebooks)
    for gallery_spec, result in execute_all(
        gallery_specs, site / "check", jobs, lambda line: say(line, err=True)
    ):
        if result.state != "completed":
            faulty += 1
            say(f"{gallery_spec}: {result.state}: {result.cause}")
            continue
        verdict = check_notebook(gallery_spec, result.path)
        say(f"{gallery_spec}: {verdict}")
        for fault in verdict.faults:
            say(f"  {fault}")
        faulty += bool(verdict.faults)
    say(f"{len(gallery_specs)} runs, {faulty} with a fault")
    return faulty
