"""Test that a fault says what fails, when and where, and refuses fields that do not apply."""

from __future__ import annotations

import math

import numpy as np
import pytest

from labkit import Fault
from labkit.common.errors import InvalidInput


def test_a_fault_says_no_more_than_belongs_to_its_kind() -> None:
    assert Fault("kill", rank=1, step=2).model_dump() == {"rank": 1, "step": 2, "kind": "kill"}
    assert Fault("slow", rank=0, step=1).model_dump()["factor"] == 2.0
    with pytest.raises(InvalidInput, match=r"seconds=2\.0 does not apply to kind='kill'"):
        Fault("kill", rank=1, step=2, seconds=2)
    with pytest.raises(InvalidInput, match="kind='burn' is impossible"):
        Fault("burn", rank=1, step=2)


def test_a_fault_goes_on_for_its_steps() -> None:
    slow = Fault("slow", rank=0, step=3, steps=2)
    assert [step for step in range(7) if slow.hits(step)] == [3, 4]


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_one_bit_and_no_other_is_flipped(dtype: type) -> None:
    given = np.arange(12, dtype=dtype).reshape(3, 4)
    for seed in range(20):
        found = Fault("corrupt", rank=1, step=seed).flipped(given, seed)
        assert found.shape == given.shape
        changed = np.unpackbits(found.view(np.uint8)) != np.unpackbits(given.view(np.uint8))
        assert changed.sum() == 1
    named = Fault("corrupt", rank=1, step=0, offset=2, bit=3)
    assert (named.flipped(given, 0).reshape(-1) != given.reshape(-1)).nonzero()[0].tolist() == [2]


def test_a_gradient_is_poisoned_at_its_offset_and_stays_as_it_was_given() -> None:
    given = np.zeros((2, 3), np.float32)
    assert math.isinf(Fault("inf", rank=0, step=0, offset=4).poisoned(given)[1, 1])
    assert math.isnan(Fault("nan", rank=0, step=0).poisoned(given)[0, 0])
    assert not given.any()
