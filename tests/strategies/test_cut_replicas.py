"""Test replicas cut into stages against whole ones: as formulas, in any order, and as models."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_programs import PASSED, play

from labkit import (
    Cluster,
    ComputeTime,
    Downpour,
    Experiment,
    ParameterServer,
    SoftSync,
    StaleSynchronous,
    TopK,
)
from labkit.common.errors import InvalidInput
from labkit.experiment import VirtualClock
from labkit.programs import Message, Program, Receive, Roles, Send, placed, whole_replica_program
from labkit.schedules.grid_layers import crossing

LAW = ComputeTime(0.1, distribution="lognormal")
WAYS: list[Any] = [
    Downpour(servers=2, placement="sharded"),
    Downpour(3, push_every=2, servers=3),
    ParameterServer(2, synchronous=False, placement="greedy"),
    ParameterServer(3, backup_workers=1, placement="sharded"),
    StaleSynchronous(2, servers=2, staleness_correction="delay_compensated"),
    StaleSynchronous(0, servers=2),
    SoftSync(2, staleness_correction="per_gradient"),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: type(way).__name__)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_servers_see_no_difference(way: Any, stages: int) -> None:
    law: Any = {"compute": LAW, "network": None, "epochs": 2, "lost": {}}
    _, ours, diary = play(way.model_copy(update={"stages": stages}), 3, **law)
    _, theirs, plain = play(way, 3, **law)
    told = ("server", "update", "worker", "step", "version", "rows", "staleness")
    assert [[event[name] for name in told] for event in diary.events] == [
        [event[name] for name in told] for event in plain.events
    ]
    assert ours.epochs == theirs.epochs
    assert all(ours.held[n] == pytest.approx(theirs.held[n], abs=1e-12) for n in theirs.held)
    # Each stage writes its rows, but loss and samples occur once per replica.
    assert len(ours.rows) == stages * len(theirs.rows)
    heads, whole_ones = (
        sorted((row["rank"], row["step"], row["loss"]) for row in scenes.rows if row["samples"])
        for scenes in (ours, theirs)
    )
    assert heads == whole_ones


def test_bytes_are_those_of_whole_replicas_and_what_passes_both_ways() -> None:
    whole_one, cut = (
        sum(row["wire_bytes"] for row in play(Downpour(servers=2, stages=stages), 3)[1].rows)
        for stages in (1, 4)
    )
    assert cut - whole_one == 3 * 10 * 2 * 3 * PASSED * 8


def test_places_push_at_the_same_time() -> None:
    # Each half of the weights has its own link, and four servers accept both.
    whole_one, cut = (
        play(Downpour(servers=4, stages=stages, placement="sharded"), 1, steps=10)[0].now
        for stages in (1, 2)
    )
    assert cut < whole_one


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pieces_in_any_order_are_whole_pushes(data: st.DataObject) -> None:
    workers, stages, servers = (data.draw(st.integers(1, 3)) for _ in range(3))
    shapes = [(data.draw(st.integers(1, 4)),) for _ in range(max(stages, servers) + 1)]
    placement = data.draw(st.sampled_from(["round_robin", "greedy", "sharded"]))
    parts, cut = placed(shapes, servers, placement), placed(shapes, stages, "round_robin")
    weights = np.arange(float(sum(size for (size,) in shapes)))
    roles = Roles(workers, parts, 1, 1, weights, [], cut=cut)
    server = workers + data.draw(st.integers(0, servers - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    pushes = {(w, k): rng.normal(size=weights.size) for w in range(workers) for k in range(3)}
    seen: list[Message] = []

    def serve(mark: Any) -> Program:
        for _ in pushes:
            push = yield Receive()
            seen.append(push)
            yield Send(push.source, Message(server, push.values, version=len(seen)), push)

    lines = {
        member: deque(_piece(roles, member, server, k, pushes[w, k]) for k in range(3))
        for w in range(workers)
        for member in roles.members(w)
    }
    answered: dict[int, list[Any]] = {member: [] for member in lines}
    program, answer = whole_replica_program(serve, roles, server), None
    while len(seen) < len(pushes) or any(len(each) < 3 for each in answered.values()):
        action = program.send(answer)
        answer = None
        if isinstance(action, Send):
            answered[action.to].append(action)
        else:
            answer = lines[data.draw(st.sampled_from([m for m in lines if lines[m]]))].popleft()
    for message in seen:
        push = roles.part(server).take(pushes[message.source, message.step])
        assert message.values is not None
        assert (message.values.tolist(), message.rows) == (push.tolist(), 1)
    for member, said in answered.items():
        for k, send in enumerate(said):
            piece = _piece(roles, member, server, k, pushes[roles.place(member).worker, k])
            assert send.message.values.tolist() == piece.values.tolist()
            assert (send.answers.source, send.answers.step) == (member, k)


def _piece(roles: Roles, member: int, server: int, step: int, push: Any) -> Any:
    """Return the part of a push that a stage sends to a server."""
    stage = roles.place(member).member
    part = roles.of_member(stage).part(server).take(roles.cut[stage].take(push))
    return Message(member, part, rows=int(member < roles.workers), step=step)


SMALL: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": {"rows": 100, "test_rows": 10},
    "model_options": {"widths": [8, 6]},
    "batch_size": 30,
    "epochs": 2,
    "precision": "float64",
    "virtual": {"compute_time": LAW},
    "network": "1GbE",
}


def furthest(communicator: Any, pairs: list[tuple[Experiment, Any]]) -> list[float]:
    """Return how far weights are from those of whole replicas with the same order of events."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    def train(wanted: Experiment) -> Any:
        session = TrainingSession(wanted, communicator, read(wanted, communicator))
        session.feed.validation = None
        wanted.strategy.train(session)
        return session

    found = []
    whole_ones: dict[str, Any] = {}
    for plain, cut in pairs:
        theirs = whole_ones.get(plain.hash8) or train(plain)
        whole_ones[plain.hash8] = theirs
        events = sorted(theirs.interleaving, key=lambda each: each["applied"])
        order = [tuple(int(event[k]) for k in ("server", "worker", "step")) for event in events]
        strategy = plain.strategy.model_copy(update=cut)
        virtual = VirtualClock(compute_time=LAW, update_order=order)
        ours = train(plain.replace(strategy=strategy, virtual=virtual))
        assert len(ours.interleaving) == len(events)
        assert len(ours.partition.get("edges", [])) == (1 + cut["stages"] if "stages" in cut else 0)
        weights = zip(ours.model.weights, theirs.model.weights, strict=True)
        found.append(max(float(abs(a.numpy() - b.numpy()).max()) for a, b in weights))
    return found


@pytest.mark.slow
def test_as_models_they_are_whole_ones_at_the_same_interleaving(cluster: Cluster) -> None:
    def asked(workers: int, optimizer: str, **options: Any) -> Experiment:
        strategy = Downpour(servers=2, placement="sharded", optimizer=optimizer)
        return Experiment(strategy=strategy, workers=workers, **SMALL | options)

    names = ("adagrad", "adam")
    pairs = [(asked(1, name), {"stages": stages}) for name in names for stages in (2, 3)]
    pairs.append((asked(3, "adagrad"), {"stages": 2}))
    unshared = {"model": "locally_connected", "model_options": {"filters": [2], "kernel": 3}}
    # This is the kind of model that DistBelief used.
    pairs.append((asked(2, "adagrad", **unshared), {"stages": 2}))
    for pair, apart in zip(pairs, cluster.call(furthest, pairs, ranks=1)[0], strict=True):
        assert apart <= 1e-10, pair


UNSHARED: dict[str, Any] = {"model": "locally_connected", "model_options": {"filters": [2, 3]}}
CONVOLUTION: dict[str, Any] = {"model": "cnn", "model_options": {"filters": [3, 2], "dense": 6}}
SINGLE = {"dataset_options": {"rows": 8, "test_rows": 10}, "batch_size": 2}  # one worker has no row


@pytest.mark.slow
def test_over_a_grid_they_are_whole_ones_at_the_same_interleaving(cluster: Cluster) -> None:
    distbelief = Downpour(servers=2, placement="sharded")
    steps_of_their_own = Downpour(2, push_every=3, servers=2)
    cases: list[tuple[Any, dict[str, Any], tuple[int, int]]] = [
        (distbelief, UNSHARED, (2, 2)),
        (steps_of_their_own, CONVOLUTION, (1, 2)),
        (Downpour(), UNSHARED | SINGLE, (1, 2)),
    ]
    pairs = [
        (Experiment(strategy=strategy, workers=3, **SMALL | fields), {"grid": grid})
        for strategy, fields, grid in cases
    ]
    for pair, apart in zip(pairs, cluster.call(furthest, pairs, ranks=1)[0], strict=True):
        assert apart <= 1e-10, pair


def sent(communicator: Any, experiments: list[Experiment]) -> list[float]:
    """Return the bytes that workers and servers have sent."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    found = []
    for experiment in experiments:
        session = TrainingSession(experiment, communicator, read(experiment, communicator))
        session.feed.validation = None
        experiment.strategy.train(session)
        found.append(sum(row["wire_bytes"] for row in session.stage.rows))
    return found


@pytest.mark.slow
def test_between_tiles_goes_what_crosses_and_between_machines_kernels(cluster: Cluster) -> None:
    grid = (1, 2)
    wholes = [
        Experiment(strategy=Downpour(), workers=1, **SMALL | fields | {"epochs": 1})
        for fields in (UNSHARED, CONVOLUTION)
    ]
    cuts = [each.replace(strategy=Downpour(grid=grid)) for each in wholes]
    whole_ones, ours = (cluster.call(sent, each, ranks=1)[0] for each in (wholes, cuts))
    kernels = (3 * 3 + 1) * 3 + (3 * 3 * 3 + 1) * 2
    for each, theirs, own, handed in zip(wholes, whole_ones, ours, (0, kernels), strict=True):
        data = crossing(each.grid_layers or (), grid)
        values = 100 * (data.values.sum() + data.values_back.sum()) + 4 * 2 * handed
        assert own - theirs == 8 * values


@pytest.mark.slow
def test_a_lost_machine_is_a_lost_replica(cluster: Cluster) -> None:
    strategy = ParameterServer(synchronous=False, grid=(1, 2))
    fields = (
        SMALL
        | UNSHARED
        | {"virtual": {"compute_time": 0.1, "worker_failures": {1: 0.12}}, "epochs": 1}
    )
    run = cluster.run(Experiment(strategy=strategy, workers=3, **fields), show=False)
    assert run.metrics["equivalence"]["verdict"] == "passed"
    (loss,) = run.metrics["exchange"]["lost"]
    assert loss == {"worker": 1, "seconds": 0.12, "gradients": 2}
    assert sum(run.history["rank"] == 1) == 2  # in half the time of one rank
    assert run.history["samples"].sum() >= 100 - 10  # other workers compute its rows
    assert set(run.history["rank"]) == {0, 1, 2, 4, 5, 6}


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (Downpour(stages=9), "stages=9 need at least one block each, but the model is a chain of"),
        (Downpour(stages=2, compressor=TopK()), "stages=2 does not support a compressor, because"),
        (
            ParameterServer(stages=2, transport="one_sided"),
            "stages=2 does not support transport='one_sided'",
        ),
        (
            Downpour(grid=(1, 2), stages=2),
            "with stages=2 divides a replica in two ways",
        ),
        (Downpour(grid=(1, 2), compressor=TopK()), r"grid=\(1, 2\) does not support a compressor"),
        (
            Downpour(grid=(1, 2), transport="one_sided"),
            r"grid=\(1, 2\) does not support transport='one_s",
        ),
        (Downpour(grid=(3, 4)), r"'dense_2' of 10 units; allowed: \(3, 3\), \(2, 4\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(strategy: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        Experiment(dataset="digits", workers=2, strategy=strategy)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"model": "transformer", "dataset": "shakespeare"},
            "cannot be divided over a grid",
        ),
        ({"precision": "mixed_bfloat16"}, "use precision='float32' or 'float64'"),
    ],
)
def test_models_that_have_no_grid_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        Experiment(**{"dataset": "digits", "strategy": Downpour(grid=(1, 2))} | fields)


def refused(communicator: Any) -> list[str]:
    """Return the error messages for models that cannot be cut."""
    import keras
    import tensorflow as tf
    from keras.layers import Dense, Embedding, GlobalAveragePooling1D, Input, Softmax

    from labkit.programs.actions import Place
    from labkit.programs.cut_replica import cut

    def said(stages: int, *layers: Any) -> str:
        model = keras.Sequential(layers)
        model.compile(loss="mse")
        x, y = tf.ones((2, 4)), tf.zeros((2, 1))

        def go_forward() -> None:
            (first, *_), *_ = cut(model, lambda worker, number: (x, y, None), stages)
            first.forward(Place(0, 0), first.weights, ())

        with pytest.raises(InvalidInput) as caught:
            go_forward()
        return str(caught.value)

    start = Input((4,))
    return [
        said(4, start, Dense(3), Dense(1)),
        said(2, start, Dense(3), Softmax()),
        said(2, start, Dense(3, kernel_regularizer="l2"), Dense(1)),
        said(2, start, Dense(3, dtype="mixed_bfloat16"), Dense(1)),
        said(2, start, Embedding(9, 3, mask_zero=True), GlobalAveragePooling1D(), Dense(30)),
    ]


def test_models_that_cannot_be_cut_are_refused(cluster: Cluster) -> None:
    (found,) = cluster.call(refused, ranks=1)
    wanted = [
        "the model has 2 blocks",
        "without weights",
        "add to the loss",
        "bfloat16",
        "including a mask",
    ]
    for said, why in zip(found, wanted, strict=True):
        assert why in said


def test_each_member_is_a_rank() -> None:
    apart = Downpour(servers=2, stages=2)
    assert apart.hosts(3) == [0, 1, 2, 3, 4, 5, 6, 7]
    beside = Downpour(servers=2, stages=2, colocated=True)
    assert beside.hosts(3) == [0, 1, 2, 0, 1, 3, 4, 5]
    assert [beside.places(worker, 3) for worker in range(3)] == [[3, 0], [4, 1], [5, 2]]
    over_grid = Downpour(servers=2, grid=(2, 2))
    assert over_grid.places(1, 3) == [8, 9, 10, 1]
    strategies = (apart, beside, over_grid)
    ranks = [Experiment(dataset="digits", workers=3, strategy=s).ranks for s in strategies]
    assert ranks == [8, 6, 14]
