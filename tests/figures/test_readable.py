"""Tables for the eye: what they show, and that their values stay."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from labkit.figures import format_table

ROWS = {
    "way": ["ring", "tree"],
    "step_ms": [0.123456789, 12345.678],
    "payload_bytes_per_step": [15780904.0, float("nan")],
    "messages": [24000, 3],
    "right": [True, False],
    "ratio": [1.0, None],
}


def cells(table: pd.DataFrame) -> list[str]:
    return re.findall("<td>(.*?)</td>", table._repr_html_() or "")


def test_numbers_have_four_digits_and_bytes_units() -> None:
    shown = cells(format_table(pd.DataFrame(ROWS)))
    assert shown[:6] == ["ring", "0.1235", "15 MiB", "24,000", "True", "1"]
    assert shown[6:] == ["tree", "12,346", "", "3", "False", ""]


def test_values_stay_and_what_is_made_of_it_is_shown_alike() -> None:
    given = pd.DataFrame(ROWS)
    table = format_table(given)
    pd.testing.assert_frame_equal(pd.DataFrame(table), given)
    assert table["step_ms"].iloc[0] == pytest.approx(0.123456789, abs=0)
    assert type(table.query("messages > 5")[["way", "step_ms"]]) is type(table)
    assert cells(table.head(1))[1] == "0.1235"


def test_two_columns_of_one_name_are_both_shown() -> None:
    table = format_table(pd.DataFrame([[1.23456, 2.34567]], columns=["ms", "ms"]))
    assert cells(table) == ["1.235", "2.346"]
