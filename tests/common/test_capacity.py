"""Test that ranks are refused for which the machine has too little memory or too few cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit import Cluster
from labkit.cluster import launch
from labkit.common.errors import InvalidInput
from labkit.common.machine import OVERSUBSCRIBE, Capacity, capacity, check_ranks

SMALL = Capacity(cores=2, free=20.0, total=24.0)


@pytest.fixture(autouse=True)
def no_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERSUBSCRIBE, raising=False)


@pytest.mark.parametrize(
    ("machine", "ranks", "told"),
    [
        (
            SMALL,
            17,
            "17 ranks on 2 cores: allowed are at most 16 ranks .8 per core.; .*oversubscribe=True",
        ),
        (
            SMALL,
            30,
            "30 ranks need at least 21.0 GiB of memory, but only 20.0 GiB of memory are free; "
            ".*--force",
        ),
        (
            SMALL,
            64,
            "64 ranks need at least 44.8 GiB .* has 24.0 GiB; allowed are at most 34 ranks: "
            ".* fewer",
        ),
        (
            SMALL._replace(free=1.0),
            2,
            "2 ranks need at least 1.4 GiB .* only 1.0 GiB of memory are free",
        ),
    ],
)
def test_ranks_without_memory_or_cores_are_refused_with_the_numbers(
    machine: Capacity, ranks: int, told: str
) -> None:
    with pytest.raises(InvalidInput, match=told):
        check_ranks(ranks, machine=machine)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_usual_numbers_of_ranks_fit_a_small_machine(ranks: int) -> None:
    check_ranks(ranks, machine=Capacity(cores=2, free=6.0, total=7.0))


def test_oversubscribe_lifts_all_but_the_hard_limit_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = SMALL._replace(free=0.5)
    check_ranks(34, oversubscribe=True, machine=busy)
    monkeypatch.setenv(OVERSUBSCRIBE, "1")  # as the option --force sets it
    check_ranks(34, machine=busy)
    with pytest.raises(InvalidInput, match="neither oversubscribe=True nor --force"):
        check_ranks(35, oversubscribe=True, machine=busy)


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_memory_limit_of_a_container_counts(tmp_path: Path, file: str) -> None:
    whole = capacity(tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / file).write_text(f"{2**29}\n")
    assert capacity(tmp_path) == Capacity(whole.cores, 0.5, 0.5)
    (tmp_path / file).write_text("max\n")
    assert capacity(tmp_path).total == whole.total


@pytest.mark.parametrize("more", [{}, {"oversubscribe": True}, {"hosts": "localhost:9999"}])
def test_a_cluster_of_more_ranks_than_any_machine_holds_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, bool]
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("the keeper starts")

    monkeypatch.setattr(launch, "launch", start)  # the refusal must come before any process starts
    with pytest.raises(InvalidInput, match=r"9999 ranks need at least .* oversubscribe=True"):
        Cluster(workers=9_999, **more)
