"""Test that odd files in the cache of verdicts end no run: they are ignored with one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.records.run_metrics import Verdict
from labkit.records.store import write_json
from labkit.worker.equivalence import read_verdict, write_verdict

GOOD = Verdict(verdict="passed", max_abs_difference=1e-12, tolerance=1e-9, reason="20 steps")


def holding(content: object) -> Callable[[Path], object]:
    return lambda path: write_json(path, {"equivalence": content})


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def linked(path: Path) -> None:
    (other := path.with_name("other.json")).write_text("not ours")
    path.symlink_to(other)


ODD: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "cut off": lambda path: path.write_text('{"schema": 1, "equiv'),
    "no text": lambda path: path.write_bytes(b"\xff\x00" * 99),
    "a list": lambda path: path.write_text("[1, 2]"),
    "of a later version": lambda path: path.write_text('{"schema": 99, "equivalence": {}}'),
    "without a verdict": lambda path: write_json(path, {"other": 1}),
    "900 levels": lambda path: path.write_text("[" * 900 + "]" * 900),
    "of text": holding("passed"),
    "of nothing": holding(None),
    "without its reason": holding({"verdict": "passed"}),
    "of an unknown kind": holding({**GOOD, "verdict": "excellent"}),
    "with a difference in words": holding({**GOOD, "max_abs_difference": "small"}),
    "with an odd place": holding({**GOOD, "place": "there"}),
    "huge": huge,
    "a link": linked,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_an_odd_verdict_is_none_with_one_line(
    make: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(path := tmp_path / "0123.json")
    assert read_verdict(path) is None
    told = capsys.readouterr().err
    assert told.startswith("labkit: the cache of the equivalence check: ")
    assert told.count("\n") == 1
    assert str(tmp_path) not in told
    write_verdict(path, GOOD)
    if path.is_dir():
        assert "cannot be written" in capsys.readouterr().err
    else:
        assert read_verdict(path) == GOOD
        assert not path.is_symlink()
    assert capsys.readouterr().err == ""
    if (other := tmp_path / "other.json").exists():
        assert other.read_text() == "not ours"


def test_a_verdict_is_read_as_it_was_written_and_none_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_verdict(tmp_path / "none.json") is None
    for verdict in (GOOD, Verdict(**GOOD | {"verdict": "failed", "max_abs_difference": None})):
        write_verdict(tmp_path / "one.json", verdict)
        assert read_verdict(tmp_path / "one.json") == verdict
    assert capsys.readouterr().err == ""
