"""Test the values of one parameter: read from a text or a file, or refused in one sentence."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.jobs.sweep.grid import LARGEST, Axis, Draw, from_text, from_yaml


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", ("1",)),
        ("a,b,c", ("a", "b", "c")),
        (" a , b ", ("a", "b")),
        ("range(1,5)", (1, 2, 3, 4)),
        ("range(3)", (0, 1, 2)),
        ("range(8, 0, -4)", (8, 4)),
        ("1,range(4,6),9", ("1", 4, 5, "9")),
        ("[1,2],[3]", ("[1,2]", "[3]")),
        ('{"name": "TopK", "ratio": 0.1},Int8', ('{"name": "TopK", "ratio": 0.1}', "Int8")),
        ("'a,b',''", ("a,b", "")),
        ('["a]b"],c', ('["a]b"]', "c")),
        ("don't,can't", ("don't", "can't")),
        ("ranges,of(1", None),
        ("range", ("range",)),
        ("f(1,2)", ("f(1,2)",)),
    ],
)
def test_commas_outside_of_brackets_and_quotes_divide_values(text: str, values: Axis) -> None:
    if values is None:
        with pytest.raises(InvalidInput, match="lacks a closing"):
            from_text("x", text)
    else:
        assert from_text("x", text) == values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty item"),
        ("a,,b", "empty item"),
        ("a,", "empty item"),
        ("[1,2", "lacks a closing ]"),
        ("'a", "lacks a closing '"),
        ("range()", "one to three whole numbers"),
        ("range(1,2,3,4)", "one to three whole numbers"),
        ("range(1.5)", "one to three whole numbers"),
        ("range(a,b)", "one to three whole numbers"),
        ("range(1,true)", "one to three whole numbers"),
        ("range(1,5,0)", "must not be 0"),
        ("range(5,1)", "has no values"),
        ("range(0)", "has no values"),
        ("range(100000000000000000000)", "more than 10,000 values"),
        ("uniform(1)", "two numbers"),
        ("uniform(2,1)", "two numbers"),
        ("uniform(1,2,3)", "two numbers"),
        ("uniform(a,b)", "two numbers"),
        ("uniform(0,.inf)", "two numbers"),
        ("loguniform(0,1)", "above 0"),
        ("uniform(0,1),2", "mixes"),
    ],
)
def test_what_has_no_values_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as refused:
        from_text("x", text)
    assert "x" in str(refused.value)


def test_a_file_has_lists_ranges_distributions_and_single_values() -> None:
    assert from_yaml("x", [1, "a", [2]]) == (1, "a", [2])
    assert from_yaml("x", "range(1, 3)") == (1, 2)
    assert from_yaml("x", "loguniform(1e-4, 0.1)") == Draw(1e-4, 0.1, log=True)
    assert from_yaml("x", "a,b") == ("a,b",)
    assert from_yaml("x", {"widths": [1]}) == ({"widths": [1]},)
    with pytest.raises(InvalidInput, match="the list of x is empty"):
        from_yaml("x", [])


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        axis = from_text("x", text)
    except InvalidInput:
        return
    assert axis if isinstance(axis, tuple) else axis.low < axis.high


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-7, 7))
def test_a_range_is_pythons(start: int, stop: int, step: int) -> None:
    numbers = tuple(range(start, stop, step)) if step else ()
    if numbers:
        assert from_text("x", f"range({start},{stop},{step})") == numbers
    else:
        with pytest.raises(InvalidInput):
            from_text("x", f"range({start},{stop},{step})")


def test_the_largest_range_is_as_large_as_a_sweep() -> None:
    assert len(from_text("x", f"range({LARGEST})")) == LARGEST  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        from_text("x", f"range({LARGEST + 1})")


@given(st.integers(), st.booleans())
def test_a_draw_lies_within_its_bounds_and_has_four_figures(seed: int, log: bool) -> None:
    value = Draw(0.003, 7.0, log).sample(random.Random(seed))
    assert 0.003 <= value <= 7.0
    assert value == float(f"{value:.4g}")


def test_a_logarithmic_draw_favours_no_order_of_magnitude() -> None:
    generator = random.Random(0)
    values = [Draw(1e-4, 1.0, log=True).sample(generator) for _ in range(400)]
    assert 60 < sum(value < 1e-3 for value in values) < 140  # about a quarter of the values
