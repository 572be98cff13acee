"""`labkit docs`: build the book from the notebooks and their guide, without a network."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.imports import optional
from labkit.common.output import check_output
from labkit.common.terminal import say

FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("folder", metavar="[NOTEBOOKS]", default="notebooks", type=FOLDER)
@click.option(
    "-o",
    "book",
    default="book",
    show_default=True,
    type=FOLDER,
    help="Folder to which the book is written.",
)
@click.option("--open", "opens", is_flag=True, help="Open the book in a browser.")
@click.option("--strict", is_flag=True, help="Fail on each warning, such as a broken link.")
@click.option(
    "--force", is_flag=True, help="Overwrite existing pages even if labkit did not write them."
)
def docs(folder: Path, book: Path, opens: bool, strict: bool, force: bool) -> None:
    """Build the book: guide, notebooks and reference, as HTML."""
    if not (folder / "conf.py").exists():
        raise InvalidInput(f"{folder} has no conf.py; give the folder of labkit's notebooks")
    page = book / "index.html"
    if not (book / ".buildinfo").exists():  # Sphinx's mark of a book
        check_output(page, force)
    build_main = optional("sphinx.cmd.build").build_main
    checks = ["--nitpicky", "--fail-on-warning", "--keep-going"] if strict else []
    if build_main(["-b", "html", "--quiet", *checks, str(folder), str(book)]):
        raise LabkitError("the book was not built; the lines above say why")
    say(f"book: {page}")
    if opens:
        webbrowser.open(page.resolve().as_uri())
