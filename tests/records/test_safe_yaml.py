"""Test that YAML is read as plain data, with memory and time in proportion to its length."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from labkit.common.canonical_json import NotPlain
from labkit.records.safe_yaml import read_plain, read_plain_file

# Nine lines that expand to 9⁹ words.
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{inner}'] * 9)}]\n"
    for inner, name in zip("abcdefgh", "bcdefghi", strict=True)
)
# PyYAML itself cannot read back every line separator that it writes.
TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "anchors"),
        ("a: &a [*a]", "anchors"),
        ("base: &base {x: 1}\nother: {<<: *base}", "anchors"),
        ("[" * 30 + "]" * 30, "20 levels"),
        ("[" * 20_000 + "]" * 20_000, "20 levels"),
        ("- " * 20_000 + "1", "20 levels"),
        ("x" * 100_001, "100,001 characters"),
        ("x: " + "1" * 5000, "plain"),
        ("? [1, 2]\n: 3", "not YAML"),
        ("{a: ", "not YAML"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
        ("a: \x1b[31m", "not YAML"),
    ],
)
def test_what_is_not_plain_is_refused(text: str, reason: str) -> None:
    with pytest.raises(NotPlain, match=reason):
        read_plain(text)


@given(VALUES)
def test_what_records_hold_is_read_back(value: object) -> None:
    assert read_plain(yaml.safe_dump(value, allow_unicode=True)) == value


def test_a_file_that_cannot_be_read_is_refused_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for name in ("pipe", "bytes", "missing"):
        with pytest.raises(NotPlain):
            read_plain_file(tmp_path / name)
