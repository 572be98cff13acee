"""Test the moments at which the campaign of calls kills ranks, and how it detects phases."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.acceptance.faults.calls import EARLY, PHASES, Sight, draw
from tests.acceptance.faults.entry_points import ENTRY_POINTS

LENGTHS = dict(zip(PHASES, (6.0, 0.1, 3.0, 0.5, 1.0, 4.0, 0.4), strict=True))


def test_moments_are_even_over_a_call_and_a_third_is_early() -> None:
    kills = [draw(number, LENGTHS) for number in range(600)]
    assert Counter(entry_point for entry_point, _, _ in kills) == dict.fromkeys(ENTRY_POINTS, 120)
    assert {victim for _, victim, _ in kills} == {0, 1, 2}
    assert all(0 <= moment.share <= 1 for _, _, moment in kills)
    early = [moment.phase for _, _, moment in kills[::3]]
    assert Counter(early) == Counter({phase: 67 if k < 2 else 66 for k, phase in enumerate(EARLY)})
    others = Counter(m.phase for number, (_, _, m) in enumerate(kills) if number % 3)
    for phase, seconds in LENGTHS.items():
        assert abs(others[phase] / 400 - seconds / sum(LENGTHS.values())) < 0.07


def test_phases_are_seen_from_outside(tmp_path: Path) -> None:
    sight = Sight(tmp_path)
    sight.look()
    assert sight.phase == ""
    live = tmp_path / "runs" / "some" / "live"
    live.mkdir(parents=True)
    sight.look()
    assert sight.phase == "starting"
    with (live / "rank0.jsonl").open("a", buffering=1) as file:
        for kind, record, phase in (
            ("doing", {"what": "checking equivalence"}, "checking equivalence"),
            ("doing", {"what": "training"}, "first step"),
            ("step", {"rank": 0, "step": 0}, "training"),
            ("doing", {"what": "evaluating"}, "evaluating"),
        ):
            file.write(json.dumps([kind, record]) + "\n")
            sight.look()
            assert sight.phase == phase
