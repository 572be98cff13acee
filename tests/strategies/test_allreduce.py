"""Test that replicas train as one process does, with every schedule for their gradients."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from labkit import AllReduce, Cluster, Experiment
from labkit.programs import Compute, Gradient, Roles, Snapshot, Update
from labkit.programs.actions import AllReduceAction as Meet

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": {"rows": 60, "test_rows": 10},
    "batch_size": 20,
    "precision": "float64",
    "verify": False,
}


def trained(communicator: Any, question: Experiment) -> list[Any]:
    """Return the weights before and after training."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    session = TrainingSession(question, communicator, read(question, communicator))
    begin = [weight.numpy() for weight in session.model.weights]
    question.strategy.train(session)
    return [begin, [weight.numpy() for weight in session.model.weights]]


@pytest.mark.parametrize("schedule", ["sequential", "overlap", "priority"])
def test_two_ranks_end_with_the_weights_of_one_process(cluster: Cluster, schedule: str) -> None:
    strategy = AllReduce(algorithm="ring", schedule=schedule)
    question = Experiment(**SMALL, workers=2, strategy=strategy)
    [(begin, one)] = cluster.call(trained, question.replace(workers=1), ranks=1)
    for _, found in cluster.call(trained, question, ranks=2):
        for own, expected, before in zip(found, one, begin, strict=True):
            np.testing.assert_allclose(own, expected, rtol=0, atol=1e-12)
            assert np.abs(own - before).max() > 1e-6


def test_on_the_virtual_clock_worker_0_keeps_the_weights_of_each_epoch() -> None:
    roles = Roles(2, [], 3, 2, np.zeros(4), [0, 1])

    def kept(number: int) -> list[tuple[int, float]]:
        """Return the epochs, and how many updates had been made by the end of each."""
        program, answer, found = AllReduce("ring").program(roles, number), None, []
        updates = 0
        with suppress(StopIteration):
            while True:
                action = program.send(answer)
                answer = None
                if isinstance(action, Compute):
                    answer = Gradient(np.ones(4), 2, 0.5, updates)
                elif isinstance(action, Meet):
                    answer = action.gradient
                elif isinstance(action, Update):
                    updates += 1
                    answer = np.full(4, updates)
                elif isinstance(action, Snapshot):
                    found.append((action.epoch, float(action.weights[0])))
        assert updates == 6
        return found

    assert kept(0) == [(0, 3), (1, 6)]
    assert kept(1) == []
