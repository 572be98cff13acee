"""Test that objects are stored as plain nodes, and that reading restores equal objects."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from labkit import ErrorFeedback, TopK
from labkit.common.errors import LabkitError
from labkit.programs.actions import Gradient, Message
from labkit.programs.program_state import ProgramState, keep, restore_object
from labkit.programs.runtime import Event


def again(thing: Any, **outside: object) -> Any:
    return restore_object(keep(thing, outside), outside)


@pytest.mark.parametrize(
    "thing",
    [
        None, True, 1, 2**127, -0.0, float("inf"), "é\ud800", [], (), set(), {}, deque(maxlen=2),
        [1, [2, (3, {4: "a"})]], {(1, 2): {"x"}, None: deque([1, 2], 3)}, {1: 1, 1.5: 2, "1": 3},
        np.float32(0.1), np.int64(3), np.bool_(True), np.dtype("int8"), np.dtype("bfloat16"),
        ml_dtypes.bfloat16(0.1), Event("_comes", (1, 2)), ProgramState("{}", ()), {np.int64(1): 2},
        ErrorFeedback(TopK(0.2)),
    ],
    ids=repr,
)  # fmt: skip
def test_data_come_back_as_they_were(thing: Any) -> None:
    result = again(thing)
    assert type(result) is type(thing)
    assert repr(result) == repr(thing)
    assert result == thing


def test_what_is_one_stays_one() -> None:
    message, numbers = Message(1), [1]
    result = again([message, {message}, {message: numbers}, numbers, Event("_comes", (message,))])
    first, others, (key,), second, event = (*result[:2], tuple(result[2]), *result[3:])
    assert others == {first}
    assert key is first is event.given[0]
    assert result[2][first] is second


def test_objects_may_hold_each_other_in_a_ring() -> None:
    ring: list[Any] = []
    ring.append({"ring": ring, "pair": (ring,)})
    result = again(ring)
    assert result[0]["ring"] is result
    assert result[0]["pair"][0] is result


def test_what_is_outside_is_no_part_of_it() -> None:
    outside = object()
    result = again([outside, 1], roles=outside)
    assert result[0] is outside


def test_random_numbers_go_on() -> None:
    random = np.random.default_rng(3)
    random.standard_normal(5)
    state = keep(random, {})
    assert restore_object(state, {}).bytes(9) == random.bytes(9)


def test_a_record_has_the_arrays_that_others_have() -> None:
    values = np.arange(3.0)
    state = keep([Gradient(values, 2, 0.5, 1), values], {})
    gradient, array = restore_object(state, {})
    assert gradient.values is array
    assert (gradient.rows, gradient.before) == (2, ())


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (os.system, "not data"),
        (object(), "a state holds a builtins.object, which is not data; allowed: numbers"),
        (Message, "not data"),
        (np.array([None]), "an array of Python objects"),
        (np.random.Generator(np.random.MT19937(1)), "not data"),
    ],
)
def test_what_is_no_data_is_refused_when_it_is_kept(thing: Any, says: str) -> None:
    with pytest.raises(LabkitError, match=says):
        keep([thing], {})
