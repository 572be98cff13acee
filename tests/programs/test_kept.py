"""Plays that are kept in their midst, and go on from there in another world."""

from __future__ import annotations

import pickle
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
from sample_programs import FAST, begun

from labkit import (
    AllReduce,
    Codistillation,
    Downpour,
    ElasticAveraging,
    Gossip,
    ParameterAveraging,
    ParameterServer,
    ScheduledBlocks,
    SoftSync,
    StaleSynchronous,
)
from labkit.common.errors import LabkitError
from labkit.network import ComputeTime
from labkit.programs.kept import Kept, keep, taken
from labkit.programs.virtual import VirtualWorld
from labkit.strategies import STRATEGIES, Played

CASES = [
    AllReduce(),
    ParameterServer(2),
    ParameterServer(2, backups=1),
    ParameterServer(2, synchronous=False),
    ParameterServer(1, synchronous=False, stages=2),
    StaleSynchronous(1),
    StaleSynchronous(0),
    SoftSync(2),
    Downpour(3, push_every=2),
    ElasticAveraging(period=2),
    ElasticAveraging(period=2, center="allreduce"),
    Gossip("random_pairs"),
    Gossip("ring", asynchronous=True),
    ParameterAveraging(4),
    ParameterAveraging(4, fragments=2, delay=1, outer="nesterov"),
    STRATEGIES["AsynchronousDiLoCo"](period=3),
    Codistillation(period=3),
    ScheduledBlocks(block=500, parallel=2),
]


def test_every_strategy_that_plays_is_here() -> None:
    played = {
        kind for kind in STRATEGIES.values() if isinstance(kind, type) and hasattr(kind, "program")
    }
    assert played == {type(each) for each in CASES}
    assert all(isinstance(each, Played) for each in CASES)


@pytest.mark.parametrize("strategy", CASES, ids=str)
@pytest.mark.parametrize("network", [FAST, FAST.model_copy(update={"sharing": "fifo"}), None])
def test_what_is_taken_up_is_the_whole_play_bit_for_bit(strategy: Any, network: Any) -> None:
    given: Any = {"network": network, "compute": ComputeTime(0.1, law="lognormal"), "steps": 6}
    world, scenes, diary, _ = begun(strategy, 4, epochs=2, **given)
    moments: list[float] = []
    world.play(lambda own: moments.append(own.now))

    kept: list[tuple[Kept, Any]] = []
    first, seen, _, roles = begun(strategy, 4, epochs=2, **given)
    first.keeps({"roles": roles, "strategy": strategy})
    chosen = {moments[place] for place in np.linspace(0, len(moments) - 1, 7).astype(int)}

    def look(own: VirtualWorld) -> None:
        if own.now in chosen:
            kept.append((own.keep(), deepcopy(seen)))

    first.play(look)
    assert first.now == world.now
    assert len(kept) >= 7
    for state, held in kept:
        again, _, told, others = begun(strategy, 4, epochs=2, scenes=held, **given)
        again.keeps({"roles": others, "strategy": strategy})
        again.take(state, partial(strategy.program, others))
        again.play()
        assert again.now == world.now
        assert repr(held.rows) == repr(scenes.rows)  # some losses are not numbers
        assert told.events == diary.events
        assert held.epochs == scenes.epochs
        for number, weights in scenes.held.items():
            assert held.held[number].tobytes() == weights.tobytes()


def test_programs_remember_no_more_than_since_their_last_mark() -> None:
    strategy = ParameterServer(1, synchronous=False)
    world, _, _, roles = begun(strategy, 3)
    most: list[int] = []

    def look(own: Any) -> None:
        most.append(max(len(player.heard) for player in own._players.values()))

    world.keeps({"roles": roles, "strategy": strategy})
    world.play(look)
    assert max(most) < 12


def test_arrays_that_are_one_stay_one_and_are_not_copied() -> None:
    array = np.arange(3.0)
    kept = keep([array, array, (array,)], {})
    assert kept.arrays[0] is array
    assert len(kept.arrays) == 1
    one, two, (three,) = taken(kept, {})
    assert one is two is three is array


def test_bytes_that_name_something_else_are_refused() -> None:
    import os

    kept = keep([1], {})
    planted = Kept(pickle.dumps(os.system), kept.arrays)
    with pytest.raises(LabkitError, match=r"posix\.system, which no state is made of"):
        taken(planted, {})
    reached = Kept(pickle.dumps(np.load), kept.arrays)
    with pytest.raises(LabkitError, match="no state is made of"):
        taken(reached, {})
