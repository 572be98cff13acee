"""Test options: given values, defaults, and one-sentence error messages."""

from __future__ import annotations

import pytest
from pydantic import Field

from labkit.common.errors import InvalidInput
from labkit.common.options import Count, Options, lookup, parse


class Oven(Options):
    """Example options for these tests."""

    trays: Count = Field(2, description="number of trays, 1 or more")
    degrees: tuple[Count, ...] = Field((180,), description="whole numbers, such as [180, 200]")


def test_given_options_replace_the_defaults() -> None:
    assert parse(Oven, "oven", {"degrees": [200]}) == Oven(trays=2, degrees=(200,))


@pytest.mark.parametrize("trays", [0, -1, 1.5, "2", True, None])
def test_a_count_is_a_whole_number_of_one_or_more(trays: object) -> None:
    with pytest.raises(InvalidInput, match=r"trays=.* is impossible; allowed: number of trays"):
        parse(Oven, "oven", {"trays": trays})


def test_one_bad_element_shows_the_whole_value() -> None:
    with pytest.raises(InvalidInput, match=r"oven: degrees=\[180, -1\] is impossible; allowed: wh"):
        parse(Oven, "oven", {"degrees": [180, -1]})


def test_an_unknown_option_lists_the_known_and_suggests_the_nearest() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(Oven, "oven", {"tray": 3})
    assert str(caught.value) == (
        "oven has no option 'tray' (did you mean 'trays'?); allowed: trays, degrees"
    )


def test_where_there_are_no_options_the_message_says_none() -> None:
    with pytest.raises(InvalidInput, match="allowed: none"):
        parse(Options, "spoon", {"length": 3})


@pytest.mark.parametrize("name", ["mnits", "", None, 3, ["mnist"]])
def test_an_unknown_name_lists_the_family(name: object) -> None:
    with pytest.raises(InvalidInput, match=r"unknown data set .*; allowed: adult, mnist"):
        lookup({"mnist": 1, "adult": 2}, name, "data set")


def test_a_name_nearly_right_gets_the_right_one_suggested() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'mnist'"):
        lookup({"mnist": 1, "adult": 2}, "mnits", "data set")
