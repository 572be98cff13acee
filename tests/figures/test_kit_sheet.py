"""A sheet's words: what is seen is heard, of as many as one listens to."""

from __future__ import annotations

import pytest

from labkit.figures.kit.entries import MANY
from labkit.figures.kit.sheet import Sheet


@pytest.mark.parametrize("count", [1, MANY, MANY + 3])
def test_the_words_of_very_many_are_told_of_some(count: int) -> None:
    said = Sheet([], [], "Title", ["* remark"], [f"run {number}" for number in range(count)]).alt
    assert said.startswith("Title. * remark. run 0")
    assert said.count("run ") == min(count, MANY)
    assert said.endswith("and 3 more, which a table has." if count > MANY else f"{count - 1}.")
