"""Test the result of a call, by the way in which its ranks end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from labkit.cluster.calls import Calls, PendingCalls, RankError


class EngineError(Exception):
    """ipyparallel's error for an engine without heartbeat for a minute."""


class Answer:
    """One rank's answer: its value or its error; None if the rank has not answered.

    Args:
        given: The rank's return value, the ranks whose deaths it survived, its number, and the
            files that it read (or None); or an error.
    """

    def __init__(self, given: Any) -> None:
        self._given, self.metadata = given, {"received": 0}

    def ready(self) -> bool:
        return self._given is not None

    def successful(self) -> bool:
        return not isinstance(self._given, Exception)

    def exception(self) -> Any:
        return self._given

    def get(self) -> Any:
        return self._given


def call(*given: Any, outlives: bool = True, dead: list[int] | None = None) -> Calls[str]:
    cluster: Any = SimpleNamespace(
        how=SimpleNamespace(fault_tolerant=outlives),
        state=lambda: {"dead": dead or [], "pid": 7},
        how_ended=lambda: None,
        timeout=60.0,
    )
    found: Calls[str] = Calls.__new__(Calls)
    PendingCalls.__init__(found, cluster, [Answer(each) for each in given])  # type: ignore[misc]
    found._silent = set()
    return found


GONE = EngineError("Engine 1 died while running task 'x'")


def test_the_client_s_word_of_a_dead_engine_ends_no_call_that_outlives_it() -> None:
    late = call(("a", [1], 0, None), GONE, ("c", [1], 2, None))
    assert late.first_failure() is None
    assert late.dead() == {1}
    assert late.survivor_results() == {0: "a", 2: "c"}


def test_elsewhere_it_is_the_failure() -> None:
    assert call(None, GONE, outlives=False).first_failure() == 1


def test_a_rank_that_answered_before_it_died_counts_and_one_that_did_not_is_missed() -> None:
    both = call(("a", [], 0, None), ("b", [], 1, None), dead=[1])
    assert both.survivor_results() == {0: "a", 1: "b"}
    assert call(("a", [], 0, None), None, dead=[1]).survivor_results() == {0: "a"}
    assert call(("a", [], 0, None), None).survivor_results() is None


@pytest.mark.parametrize("silent", [{2}, set()])
def test_a_rank_that_waits_for_the_dead_for_ever_is_given_up(silent: set[int]) -> None:
    waiting = call(("a", [], 0, None), None, None, dead=[1])
    waiting._silent = silent
    assert waiting.running() == sorted({2} - silent)


def test_a_call_on_engines_in_whose_place_others_are_ends_and_leaves_those_alone() -> None:
    waiting = call(None, None)
    assert waiting.why_ended() is None
    waiting._cluster.state = lambda: {"dead": [], "pid": 8}  # type: ignore[method-assign,assign]
    with pytest.raises(RankError, match=r"the engines ended: .* has restarted the engines"):
        list(waiting.watch())
    waiting._turn, waiting._closed = SimpleNamespace(release=lambda: None), False  # type: ignore[assign]
    waiting.close()  # would end the engines if they still belonged to this call
