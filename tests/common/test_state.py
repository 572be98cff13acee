"""Test classes that only hold state, as declared by the names of their fields."""

from __future__ import annotations

import errno
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from tokenize import TokenError
from typing import NamedTuple
from zipfile import BadZipFile

import pytest

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.state import decoding, record, record_named, record_of


@record()
class Pair(NamedTuple):
    one: int
    two: int


@record()
@dataclass
class Moment:
    seconds: float

    def __post_init__(self) -> None:
        raise AssertionError("a constructor runs")


@record("first", "lazy")
class Counter:
    def __init__(self) -> None:
        self.first = 1

    @cached_property
    def lazy(self) -> int:
        return 2


def test_dataclasses_and_named_tuples_list_their_fields() -> None:
    assert record_named("Pair").values(Pair(1, 2)) == {"one": 1, "two": 2}
    assert record_named("Pair").tuple_of({"two": 2, "one": 1}) == Pair(1, 2)
    assert record_named("Moment").names == ("seconds",)


def test_an_instance_begins_blank() -> None:
    assert vars(record_named("Moment").blank()) == {}


def test_a_field_that_is_computed_when_it_is_wanted_may_be_missing() -> None:
    entry, counter = record_named("Counter"), Counter()
    assert entry.values(counter) == {"first": 1}
    entry.validate_names(entry.values(counter))
    assert counter.lazy == 2
    assert entry.values(counter) == {"first": 1, "lazy": 2}


@pytest.mark.parametrize("names", [{}, {"lazy": 1}, {"first": 1, "third": 1}, {"__class__": 1}])
def test_other_fields_are_refused(names: dict[str, int]) -> None:
    with pytest.raises(
        LabkitError, match="the saved state of Counter must have the fields first, lazy; missing"
    ):
        record_named("Counter").validate_names(names)


def test_a_class_is_state_only_where_it_says_so() -> None:
    class Other(Counter):
        pass

    Other.__name__ = "Counter"
    assert record_of(Counter) is not None
    assert record_of(Other) is None
    assert record_of(int) is None
    with pytest.raises(LabkitError, match=r"unknown class 'Other'; allowed: .*Counter"):
        record_named("Other")


def test_two_records_of_one_name_are_refused() -> None:
    class Twin:
        pass

    Twin.__name__ = "Pair"
    with pytest.raises(TypeError, match="two classes whose state is saved have the name Pair"):
        record("x")(Twin)


def test_what_odd_data_raise_becomes_one_line() -> None:
    says = r"the file is damaged or was changed \(KeyError\('a'\)\)"
    with pytest.raises(LabkitError, match=says), decoding("the file"):
        {}["a"]
    with pytest.raises(InvalidInput, match="as it is"), decoding("the file"):
        raise InvalidInput("as it is")


@pytest.mark.parametrize("kind", [BadZipFile, TokenError, SyntaxError, struct.error, zlib.error])
def test_what_readers_of_arrays_raise_becomes_one_line(kind: type[Exception]) -> None:
    with pytest.raises(LabkitError, match="the file is damaged"), decoding("the file"):
        raise kind("odd")


def test_a_disk_that_fails_is_no_damage_and_an_impossible_offset_is() -> None:
    with pytest.raises(OSError, match="Input/output"), decoding("the file"):
        raise OSError(errno.EIO, "Input/output error")
    with pytest.raises(LabkitError, match="the file is damaged"), decoding("the file"):
        raise OSError(errno.EINVAL, "Invalid argument")
