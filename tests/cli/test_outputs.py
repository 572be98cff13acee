"""Test that commands check the files they will write, and unusual names, before other work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from labkit.cli.app import app
from labkit.common.output import OutputFile
from tests.acceptance.__main__ import campaigns

WRITTEN = {"-o", "--json", "--csv", "--parquet", "--map", "--figure"}


def outputs(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Parameter]]:
    """Yield the options for output files of all commands, each with the name of its command."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from outputs(command, f"{path}{name} ")
        for option in command.params:
            if WRITTEN & set(option.opts) and isinstance(option.type, click.Path):
                yield f"{path}{name}", option


def test_every_command_that_writes_a_file_checks_it_first() -> None:
    found = [*outputs(app), *outputs(campaigns)]
    assert len(found) > 25
    # The outputs of `docs` and `gallery` are folders, so they check the index file in the folder.
    odd = [name for name, option in found if not isinstance(option.type, OutputFile)]
    assert odd == ["docs", "gallery"]


@pytest.mark.parametrize(
    "words",
    [
        ["methods", "--map", "/"],
        ["methods", "--map", "."],
        ["compare", "nowhere", "-o", "notes.md"],
        ["compare", "nowhere", "--csv", "file/below.csv"],
        ["report", "nowhere", "-o", "notes.md"],
        ["trace", "nowhere", "-o", "n" * 300],
        ["trace", "n" * 300],
        ["ls", "n" * 300],
        ["report", "n" * 300],
        ["stop", "n" * 300],
        ["container", "-o", "notes.md"],
        ["calibrate", "-o", "notes.md"],
        ["calibrate", "--threads", "inf"],
        ["calibrate", "--batches", "nan"],
        ["simulate", "--published", "--json", "notes.md"],
        ["bench", "exchange", "--json", "notes.md"],
        ["gallery", "books", "-o", "file"],
        ["gallery", "books", "-o", "docs"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_what_cannot_be_written_or_read_is_one_line_and_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("notes.md").write_text("# Notes on labkit\n")
    Path("books").mkdir()
    Path("docs").mkdir()
    Path("docs/n.html").write_text("<title>mine</title>")
    Path("books/n.ipynb").write_text('{"cells": []}')
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code in (1, 2)
    said = [line for line in done.stderr.splitlines() if line.startswith(("labkit: ", "Error: "))]
    assert len(said) == 1
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
