"""Test the fuzz campaign: commands handle random invalid input, and failures are detected."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from labkit.cli.app import app
from tests.acceptance.fuzz import measure
from tests.acceptance.odd_records import base, fields
from tests.acceptance.readers import READERS, WHO, readers_of


@pytest.mark.slow
def test_odd_input_of_every_kind_ends_in_order_or_in_one_line() -> None:
    rows = list(measure(app, cases=200, seed=0))
    assert [row for row in rows if "what" in row] == []
    assert all(row["tried"] == 200 // len(rows) for row in rows)
    # Commands accept some cases of each kind; they refuse some cases of the kinds that a user
    # writes.
    assert all(row["exit 0"] for row in rows)
    assert all(
        row["exit 2"] for row in rows if row["case"] not in ("records", "reports", "folders")
    )


def test_a_command_that_breaks_or_writes_elsewhere_is_found() -> None:
    @click.command(context_settings={"ignore_unknown_options": True})
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    def careless(words: tuple[str, ...]) -> None:
        if words[0] == "run":
            raise KeyError("cells")
        if words[0] == "sweep":
            open("../left.txt", "w").close()
        if words[0] == "ls":
            click.echo("\x1b]0;title\x07")
        raise SystemExit(1)

    found = {str(row["what"]).split(" in ")[0] for row in measure(careless, 50, 0) if "what" in row}
    assert found >= {"KeyError", "wrote left.txt outside", "control characters reach the terminal"}
    assert "0 lines say why, not one: ''" in found


def test_odd_records_are_drawn_of_every_field_and_every_reader_meets_some(tmp_path: Path) -> None:
    files = base(tmp_path)
    drawn = fields(files, 400, 0)
    changed = {path for odd in drawn for path in odd.files if odd.files[path] != files[path]}
    assert changed >= {path for path in files if path.endswith(b".json") and b"/b/" not in path}
    met = {name for path in changed for name in readers_of([os.fsdecode(path)])}
    assert met | {"live panel", "checkpoints", "report of a job"} >= set(READERS)
    assert {name for names in WHO.values() for name in names} == set(READERS)
