"""Test an experiment's faults, checksums and number checks, which belong to its content."""

from __future__ import annotations

from typing import Any

import pytest

import labkit as lk
from labkit import Experiment, Fault
from labkit.common.errors import InvalidInput

KILL = {"kind": "kill", "rank": 1, "step": 2}
DROP = Fault("drop", rank=1, step=2)
RING = lk.AllReduce("ring")


def test_faults_are_given_in_any_way_and_written_down() -> None:
    kill = Fault(**KILL)
    ways = [Experiment(workers=2, faults=each) for each in ([kill], (kill,), kill, KILL, [KILL])]
    assert {way.hash8 for way in ways} == {ways[0].hash8}
    assert ways[0].to_json()["faults"] == [KILL]
    assert Experiment(workers=2, faults=ways[0].to_json()["faults"]) == ways[0]
    assert "kill" in repr(ways[0])


def test_what_is_not_given_leaves_the_hash_as_it_was() -> None:
    plain = Experiment(workers=2)
    unsaid = {"faults", "on_nonfinite", "replica_check_interval", "checksums"}
    assert not unsaid & plain.to_json().keys()
    others = [{"faults": KILL}, {"on_nonfinite": "skip"}, {"on_nonfinite": "stop"}]
    others += [{"replica_check_interval": 5}, {"checksums": True, "strategy": RING}]
    assert len({plain.hash8, *(plain.replace(**each).hash8 for each in others)}) == 6


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"faults": {**KILL, "rank": 2}}, "give a rank from 0 to 1"),
        (
            {"faults": {**KILL, "step": 99}, "epochs": 2, "steps_per_epoch": 10},
            "the training has only 1. steps",
        ),
        ({"faults": DROP}, "only if labkit itself sends all messages"),
        (
            {"faults": DROP, "strategy": lk.AllReduce("mpi")},
            "only if labkit itself sends all messages",
        ),
        (
            {"faults": DROP, "strategy": RING, "clock": "virtual"},
            "only if labkit itself sends all messages",
        ),
        ({"faults": KILL, "strategy": lk.TFDistribute()}, "in separate processes"),
        ({"faults": KILL, "clock": "virtual"}, "would wait forever"),
        ({"faults": KILL, "strategy": lk.Downpour(stages=2)}, "splits the model of a worker"),
        ({"checksums": True}, "checksums=True: message faults and checksums work only if"),
        (
            {"checksums": True, "strategy": lk.AllReduce("shared_memory")},
            "only if labkit itself sends",
        ),
        ({"replica_check_interval": 2, "strategy": lk.Pipeline()}, "equal after each step"),
        ({"replica_check_interval": 2, "clock": "virtual"}, "equal after each step"),
        (
            {"on_nonfinite": "skip", "strategy": lk.AllReduce(schedule="priority")},
            "no complete step can be skipped",
        ),
        (
            {"on_nonfinite": "skip", "strategy": lk.DelayedGradients()},
            "no complete step can be skipped",
        ),
        ({"on_nonfinite": "mend"}, "on_nonfinite='mend' is impossible"),
    ],
)
def test_what_does_not_exist_is_refused_before_a_rank_starts(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        Experiment(**{"workers": 2, **fields})
