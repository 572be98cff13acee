"""Test that tables and status lines fit a terminal, in which some letters take two columns."""

from __future__ import annotations

import sys
from unicodedata import east_asian_width

import pytest

from labkit.common.terminal import fit, status_line, text_width
from labkit.jobs.listing import table

NAMES = ("baseline", "基线-学习率", "🚀 fast", "ﾊﾝｶｸ", "größer", "e\u0301te")


def columns(text: str) -> int:
    """Return the width of a text without combining characters after other ones than U+0301."""
    return sum(1 + (east_asian_width(c) in "WF") for c in text if c != "\u0301")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [0, 3, 4, 20])
def test_a_text_takes_exactly_the_given_columns(name: str, width: int) -> None:
    assert text_width(name) == columns(name)
    assert columns(fit(name, width)) == width
    if width >= columns(name):
        assert fit(name, width).rstrip() == name


def test_columns_of_a_table_are_aligned_beside_wide_letters() -> None:
    head, *lines = table([(name, "state", "✓") for name in NAMES], ("name", "b", "c")).split("\n")
    starts = {columns(line[: line.index("state")]) for line in lines}
    assert starts == {columns(head[: head.index("b")])} == {2 + max(map(columns, NAMES))}


def test_a_status_line_is_narrower_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert columns(status_line("学" * 40)) in (28, 29)
    assert status_line("a" * 40) == "a" * 29
    assert status_line("3 of 4\x1b[2J") == "3 of 4\\x1b[2J"


def test_plain_letters_need_no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.cells", None)  # an import raises ImportError
    assert text_width("abc") == 3
    assert fit("abc", 5) == "abc  "
