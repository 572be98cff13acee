"""Test simulations that are saved midway and continue in another virtual runtime."""

from __future__ import annotations

import ast
import json
import pickle
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_programs import FAST, begun

from labkit import (
    AllReduce,
    BlockCoordinateDescent,
    Codistillation,
    Downpour,
    ElasticAveraging,
    Gossip,
    ParameterAveraging,
    ParameterServer,
    SoftSync,
    StaleSynchronous,
)
from labkit.common.errors import LabkitError
from labkit.network import ComputeTime
from labkit.programs.program_state import ProgramState, keep, restore_object
from labkit.programs.runtime import Event
from labkit.programs.virtual_runtime import VirtualRuntime
from labkit.strategies import STRATEGIES, ProgramStrategy

ROOT = Path(__file__).parents[2]
CASES = [
    AllReduce(),
    ParameterServer(2),
    ParameterServer(2, backup_workers=1),
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
    ParameterAveraging(4, fragments=2, overlap_steps=1, outer_optimizer="nesterov"),
    STRATEGIES["AsynchronousDiLoCo"](period=3),
    Codistillation(period=3),
    BlockCoordinateDescent(block=500, blocks_per_round=2),
]


def test_every_strategy_that_plays_is_here() -> None:
    played = {
        kind for kind in STRATEGIES.values() if isinstance(kind, type) and hasattr(kind, "program")
    }
    assert played == {type(each) for each in CASES}
    assert all(isinstance(each, ProgramStrategy) for each in CASES)


@pytest.mark.battery(6, 12)
@pytest.mark.parametrize("strategy", CASES, ids=str)
@pytest.mark.parametrize("network", [FAST, FAST.model_copy(update={"sharing": "fifo"}), None])
def test_what_is_taken_up_is_the_whole_play_bit_for_bit(strategy: Any, network: Any) -> None:
    given: Any = {
        "network": network,
        "compute": ComputeTime(0.1, distribution="lognormal"),
        "steps": 6,
    }
    world, scenes, diary, _ = begun(strategy, 4, epochs=2, **given)
    moments: list[float] = []
    world.play(lambda own: moments.append(own.now))

    kept: list[tuple[ProgramState, Any]] = []
    first, seen, _, roles = begun(strategy, 4, epochs=2, **given)
    first.keeps({"roles": roles, "strategy": strategy})
    chosen = {moments[place] for place in np.linspace(0, len(moments) - 1, 7).astype(int)}

    def look(own: VirtualRuntime) -> None:
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
        assert repr(held.rows) == repr(scenes.rows)  # repr, because some losses are NaN
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
    one, two, (three,) = restore_object(kept, {})
    assert one is two is three is array


CLASSES = [
    (".".join(path.relative_to(ROOT).with_suffix("").parts), node.name)
    for path in sorted((ROOT / "labkit").rglob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.ClassDef)
]
_events: list[str] | None = None  # audit events of Python while a test watches


def _note(event: str, arguments: tuple[object, ...]) -> None:
    acts = ("pickle.find_class", "exec", "compile", "open", "os.system", "subprocess.Popen")
    imports = event == "import" and str(arguments[0]).startswith("labkit.")
    if _events is not None and (event in acts or imports):
        _events.append(f"{event} {arguments}")


sys.addaudithook(_note)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noticed: list[str] = []
    monkeypatch.setattr(sys.modules[__name__], "_events", noticed)
    return noticed


def nodes(*content: Any, root: Any = (0,)) -> str:
    return json.dumps({"schema": 1, "root": root, "nodes": content})


def refusal(form: str) -> str:
    with pytest.raises(LabkitError) as caught:
        restore_object(ProgramState(form, ()), {})
    return str(caught.value)


def test_a_forged_state_of_any_class_runs_nothing(events: list[str]) -> None:
    # The constructor of this class would start a process.
    assert ("labkit.hosts.host_namespaces", "HostNamespaces") in CLASSES
    assert len(CLASSES) > 500
    for module, name in CLASSES:
        pickled = f"c{module}\n{name}\n((dVname\nVa\nstR."  # the pickle calls the class with a dict
        records = [
            nodes(["record", [each, ["name"], ["a"]]]) for each in (name, f"{module}.{name}")
        ]
        bombs = [nodes([kind, {"module": module, "class_name": name}]) for kind in (name, "dict")]
        for form in (pickled, *records, *bombs):
            assert len(refusal(form).splitlines()) == 1
    assert events == []


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("mark", "w")


def test_a_pickle_in_place_of_a_state_is_refused_with_the_schema(events: list[str]) -> None:
    for protocol in range(6):
        form = pickle.dumps([Bomb()], protocol).decode("ascii", "replace")
        assert "not JSON of schema 1" in refusal(form)
    assert events == []
    assert not Path("mark").exists()


def test_a_record_begins_without_its_constructor() -> None:
    names = ["_leads", "_each", "_epoch", "_epochs", "_granted", "_total", "_done", "_at_work"]
    values = dict(zip([*names, "_lost", "_kept"], range(10), strict=True))
    quota = restore_object(
        ProgramState(nodes(["record", ["Quota", [*values], [*values.values()]]]), ()), {}
    )
    assert vars(quota) == values


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("", "not JSON of schema 1"),
        ('{"schema": 2, "root": 1, "nodes": []}', "has schema 2, but this labkit reads schema 1"),
        ('{"schema": 1}', "KeyError"),
        ('{"schema": 1, "root": ' + "[" * 100_000, "RecursionError"),
        (nodes(root=[0]), "IndexError"),
        (nodes(["list", []], root=[-1]), "IndexError"),
        (nodes(["list", [[0, 1]]]), "ValueError"),
        (nodes(["tuple", [[0]]]), "IndexError"),
        (nodes(["object", 1]), "a state has a node 'object'; allowed: list, tuple, set, dict"),
        (nodes(["array", 0]), "IndexError"),
        (nodes(["outside", "world"]), "KeyError"),
        (nodes(["record", ["Popen", [], []]]), "unknown class 'Popen'; allowed: AllReduceAction, "),
        (nodes(["record", ["Quota", ["x"], [1]]]), "missing or unknown are _at_work"),
        (nodes(["record", ["Quota", [7], [1]]]), "missing or unknown are 7, _at_work"),
        (nodes(["dtype", "O"]), "dtype of Python objects"),
        (nodes(["scalar", ["O", "00"]]), "type of Python objects"),
        (nodes(["scalar", ["float64", "00"]]), "ValueError"),
        (nodes(["generator", {"bit_generator": "MT19937"}]), "ValueError"),
        (nodes(["compressor", {"name": "os.system"}]), "os.system"),
        (nodes(["list", []], ["set", [[0]]], root=[1]), "a key of type list"),
        (nodes(["tuple", []], ["tuple", [[0], [0]]], ["set", [[1]]]), "a key of type tuple"),
    ],
    ids=lambda value: value[:40],
)
def test_a_state_that_is_none_is_refused_in_one_line(form: str, says: str) -> None:
    message = refusal(form)
    assert says in message
    assert len(message.splitlines()) == 1


PRIME = 2**61 - 1  # Python hashes integers modulo this prime


@pytest.mark.parametrize(
    "keys",
    [
        [*range(0, 100 * PRIME, PRIME)],
        [["scalar", ["complex128", np.complex128(complex(-1000003 * n, n)).tobytes().hex()]]
         for n in range(100)],
        [["tuple", [0, PRIME * n]] for n in range(100)],
    ],
    ids=["numbers", "complex numbers", "tuples"],
)  # fmt: skip
def test_keys_that_are_forged_to_share_a_hash_are_refused(keys: list[Any]) -> None:
    parts = [key for key in keys if isinstance(key, list)]
    members = [[n] for n in range(len(parts))] or keys
    for last in (["set", members], ["dict", [members, members]]):
        assert "100 keys with the same hash; allowed: 32" in refusal(nodes(*parts, last))


@pytest.mark.parametrize("strategy", [ParameterServer(2), ParameterAveraging(4, fragments=2)])
def test_a_state_with_odd_values_is_taken_or_refused(strategy: Any) -> None:
    world, _, _, roles = begun(strategy, 3, steps=2)
    world.keeps({"roles": roles, "strategy": strategy})
    states: list[ProgramState] = []
    world.play(lambda own: states.append(own.keep()))
    state = states[len(states) // 2]
    draw = np.random.default_rng(0)
    odd = [None, -1, 10**30, 1e300, "x", [0], [10**9], [[0]], {"a": 1}, [], True]
    refusals = []
    for _ in range(200):
        content = json.loads(state.form)
        place: Any = content["nodes"]
        while isinstance(place[key := int(draw.integers(len(place)))], list) and place[key]:
            place = place[key]
        place[key] = odd[draw.integers(len(odd))]
        try:
            restore_object(
                ProgramState(json.dumps(content), state.arrays),
                {"roles": roles, "strategy": strategy},
            )
        except LabkitError as error:
            refusals.append(str(error))
    assert len(refusals) > 20
    assert {len(message.splitlines()) for message in refusals} == {1}


def test_an_event_of_a_state_calls_no_other_method() -> None:
    world, *_ = begun(ParameterServer(1), 2)
    world._schedule(0.0, Event("__setattr__", ("mark", 1)))
    with pytest.raises(LabkitError, match="names the event '__setattr__'; allowed: _arrive"):
        world.play()
    assert not hasattr(world, "mark")
