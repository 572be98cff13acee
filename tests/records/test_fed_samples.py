"""Test whether the samples fed to ranks include every sample once per epoch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.acceptance.ledger import SUFFIX, Account, SampleRecord, audit, encode_entry, hashes, read

X, Y = np.arange(12.0).reshape(6, 2), np.arange(6)
NAMES = hashes([X, Y])
# Two steps an epoch of three samples each; rank 1 is gone in the second, which is taken again.
#   step 0   rank 0: a     rank 1: b c
#   step 1   rank 0: d     rank 1: e f     in vain
#   step 1   rank 0: d e f
FED = [
    SampleRecord(0, 0, 0, NAMES[:1]),
    SampleRecord(0, 1, 0, NAMES[1:3]),
    SampleRecord(1, 0, 0, NAMES[3:4]),
    SampleRecord(1, 1, 0, NAMES[4:]),
    SampleRecord(1, 0, 1, NAMES[3:]),
]


def account(entries: list[SampleRecord]) -> Account:
    return audit(entries, [X, Y], steps=2, epochs=1)


def test_a_step_that_was_taken_back_counts_once() -> None:
    found = account(FED)
    assert found == Account(1, 2, 0, 0, 1, 0, {0: 4, 1: 2})
    assert found.is_exact


@pytest.mark.parametrize(
    ("entries", "lost", "repeated"),
    [
        ([*FED[:4], SampleRecord(1, 0, 1, NAMES[3:5])], 1, 0),
        ([*FED[:4], SampleRecord(1, 0, 1, [*NAMES[3:], NAMES[0]])], 0, 1),
        ([*FED[:4], SampleRecord(1, 0, 1, [*NAMES[3:5], "another"])], 1, 1),
        (FED[:2], 3, 0),
        ([FED[0], *FED[2:]], 2, 0),
    ],
)
def test_what_is_lost_or_comes_twice_is_counted(
    entries: list[SampleRecord], lost: int, repeated: int
) -> None:
    found = account(entries)
    assert (found.lost, found.repeated, found.is_exact) == (lost, repeated, False)


def test_samples_that_differ_in_any_leaf_have_other_names() -> None:
    assert len(set(NAMES)) == 6
    assert hashes([X, Y + 1])[0] not in NAMES


def test_a_line_that_was_torn_by_a_death_is_left_out(tmp_path: Path) -> None:
    written = b"".join(map(encode_entry, FED))
    (tmp_path / f"1{SUFFIX}").write_bytes(written + encode_entry(FED[0])[:-9])
    assert [SampleRecord(*each[:3], list(each[3])) for each in read(tmp_path)] == FED
