"""Test that JSON from others is read as plain data, or refused in one line."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from labkit.common.canonical_json import DEEPEST, MOST_VALUES, NotPlain, read_plain_json

PLAIN = some.recursive(
    some.none()
    | some.booleans()
    | some.integers(-(10**17), 10**17)
    | some.floats(allow_nan=False, allow_infinity=False)
    | some.text(some.characters(codec="utf-8"), max_size=20),
    lambda inner: (
        some.lists(inner, max_size=4)
        | some.dictionaries(some.text(some.characters(codec="utf-8"), max_size=9), inner)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 900 + "]" * 900, "nested brackets"),
        ("[" * 100_000, "nested brackets"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"a": 1e999}', "exceeds the range of 64-bit floats"),
        (f'{{"a": {10**400}}}', "401 digits"),
        ('{"a": ' + "1" * 5000 + "}", "cannot be read"),
        (r'{"a": "\ud800"}', "unpaired Unicode surrogate"),
        (r'{"\ud800": 1}', "unpaired Unicode surrogate"),
        (json.dumps({"n" * 5000: 1}), "a name of 5,000 characters"),
        (json.dumps({str(n): 1 for n in range(60_000)}), "an object of 60,000 names"),
        (json.dumps("t" * 2_000_000), "a text of 2,000,000 characters"),
        ("[" + "[]," * MOST_VALUES + "[]]", "values; allowed"),
        ("", "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_what_is_not_plain_is_refused_in_one_line(text: str, reason: str) -> None:
    begin = time.process_time()
    with pytest.raises(NotPlain, match=reason) as told:
        read_plain_json(text.encode())
    assert len(str(told.value).splitlines()) == 1
    assert len(str(told.value)) < 300
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("content", [b"\xff", '{"schema": 1}'.encode("utf-16")])
def test_bytes_that_are_not_utf8_are_refused(content: bytes) -> None:
    with pytest.raises(NotPlain, match="not UTF-8"):
        read_plain_json(content)


def test_notebooks_may_hold_numbers_that_are_not_finite_and_records_may_not() -> None:
    assert read_plain_json(b'{"y": [NaN, 1e999]}', strict=False)
    with pytest.raises(NotPlain):
        read_plain_json(b"[" * (DEEPEST + 2) + b"]" * (DEEPEST + 2), strict=False)


@settings(max_examples=60, deadline=None)
@given(PLAIN)
def test_plain_data_are_read_as_they_were_written(value: object) -> None:
    assert read_plain_json(json.dumps(value).encode()) == value
