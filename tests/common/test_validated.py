"""Test that validated records refuse invalid values in one line: the value and what is allowed."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import Field, PositiveInt, field_validator

from labkit.common.errors import InvalidInput
from labkit.common.validated import Checked


class Cup(Checked):
    size: PositiveInt = 1
    of: str | tuple[int, ...] = "tea"

    @field_validator("of")
    @classmethod
    def _drinkable(cls, value: object) -> object:
        if value == "sand":
            raise ValueError("of='sand' cannot be drunk; allowed: tea")
        return value


def refusal(**fields: object) -> str:
    with pytest.raises(InvalidInput) as caught:
        Cup(**fields)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


def test_an_unknown_field_is_told_what_there_is() -> None:
    assert refusal(sise=2) == "Cup has no 'sise' (did you mean 'size'?); it has: size, of"


def test_a_field_without_its_name_and_one_that_is_missing_are_told_with_what_to_write() -> None:
    class Needs(Checked):
        inner: Cup

    with pytest.raises(
        InvalidInput, match=r"Needs\(Cup.*give fields by name, as in Needs\(inner=…\)"
    ):
        Needs(Cup())
    with pytest.raises(InvalidInput, match="Needs needs 'inner': give inner=…"):
        Needs()


def test_the_most_telling_field_may_be_given_by_position() -> None:
    class Tea(Checked):
        leaves: int = 3
        minutes: float = Field(2.0, gt=0, kw_only=False)

    assert Tea(4).minutes == 4
    assert Tea(4, leaves=5) == Tea(leaves=5, minutes=4.0)
    with pytest.raises(
        InvalidInput, match=r"Tea\(4, 5\): only minutes may be given without its na"
    ):
        Tea(4, 5)  # type: ignore[misc]
    with pytest.raises(InvalidInput, match=r"Tea\(4, minutes=5\) gives minutes twice"):
        Tea(4, minutes=5)  # type: ignore[misc]
    with pytest.raises(InvalidInput, match="minutes=-1 is impossible"):
        Tea(-1)


def test_an_impossible_value_is_told_with_its_rule() -> None:
    assert refusal(size=0) == "size=0 is impossible: input should be greater than 0"


def test_a_sentence_of_ours_is_passed_on_as_it_is() -> None:
    assert refusal(of="sand") == "of='sand' cannot be drunk; allowed: tea"


def test_a_value_of_no_allowed_kind_is_told_by_its_field_alone() -> None:
    assert refusal(of=5).startswith("of=5 is impossible: ")


def test_a_large_value_does_not_flood_the_message() -> None:
    refusal(of=np.zeros((1000, 1000)))
    refusal(size="9" * 5000 + "x")


def test_a_record_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Cup().size = 2  # type: ignore[misc]


def test_the_refusal_is_both_ours_and_a_value_error() -> None:
    with pytest.raises(ValueError, match="impossible"):
        Cup(size=-1)
