"""`labkit examples`: copy the notebooks of labkit into a folder."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from labkit.common.errors import InvalidInput, cannot_write
from labkit.common.files import example_files
from labkit.common.output import check_output
from labkit.common.terminal import say


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace files that exist in the folder.")
def examples(folder: Path, force: bool) -> None:
    """Copy the example notebooks into FOLDER.

    The command also copies the pages of the book, which `labkit docs` builds, the checks of
    `labkit gallery --check` (check.yaml), and the list of data sets (DATA.md). Example: labkit
    examples notebooks
    """
    from labkit.jobs.listing import displayed_path
    from labkit.records.store import write_atomically

    files = example_files()
    if not force:
        _require_absent([folder / name for name in files])
    for name in files:
        check_output(folder / name, replace=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, source.read_bytes())
    say(f"examples: {displayed_path(folder)} ({len(files)} files)")
    say(f"to run one: {shlex.join(['labkit', 'run', displayed_path(folder / 'tour.ipynb')])}")
    say("to open all in JupyterLab: labkit lab")


def _require_absent(paths: list[Path]) -> None:
    existing = [path for path in paths if os.path.lexists(path)]
    if existing:
        more = f" and {len(existing) - 1} more" if len(existing) > 1 else ""
        raise InvalidInput(
            f"{existing[0]}{more} would be overwritten: give another folder, or replace existing "
            "files with --force"
        )
