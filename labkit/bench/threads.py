"""A benchmark of training steps with different numbers of intra-op and inter-op threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import product

import numpy as np

from labkit.bench.step_process import PROCESS, Setting, Threads
from labkit.bench.steps import ModelCase
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, short
from labkit.communicator import Communicator
from labkit.frameworks.child import Child
from labkit.records.thread_counts import StepTime, ThreadSweep

MOST = 64  # maximum number of threads, and also of processes


def measure(
    intra: Sequence[int] = (1, 2, 8),
    inter: Sequence[int] = (1, 2, 8),
    batches: Sequence[int] = (32, 1024),
    widths: Sequence[int] = (512, 512),
    steps: int = 20,
    repeats: int = 5,
) -> ThreadSweep:
    """Measure an MLP's training step with every pair of thread counts, in turn in each repeat.

    Each pair of thread counts (intra-op, inter-op) has its own process. In every repeat, the
    processes run one after another at each batch size, and all other processes sleep. Every second
    repeat runs the processes in reverse order. A process takes about a third of a GiB of unshared
    memory.

    Args:
        intra: Numbers of intra-op threads (which share the work of one operation) to measure.
        inter: Numbers of inter-op threads (which run operations concurrently) to measure.
        batches: Batch sizes to measure, because the best thread counts depend on the batch size.
        widths: Number of units of each hidden layer.
        steps: Number of timed steps per process and batch size in a repeat, after some warm-up
            steps.
        repeats: Number of repeats; each repeat measures every pair of thread counts at every batch
            size.

    Raises:
        InvalidInput: An argument is out of range.
        RankError: A process ended early.
    """
    refuse_impossible(intra, inter, batches, steps, repeats)
    settings = [Threads(*pair) for pair in product(dict.fromkeys(intra), dict.fromkeys(inter))]
    cases = tuple(
        ModelCase(f"batch {batch}", tuple(widths), batch) for batch in dict.fromkeys(batches)
    )
    with Cluster(workers=1) as cluster:
        timed = cluster.call(_sweep, settings, cases, steps, repeats)[0]
    return ThreadSweep(timed, cores=len(os.sched_getaffinity(0)))


def refuse_impossible(
    intra: Sequence[int], inter: Sequence[int], batches: Sequence[int], steps: int, repeats: int
) -> None:
    """Raise InvalidInput for arguments that `measure` does not support."""
    for name, values in (("intra", intra), ("inter", inter)):
        if not values or not all(1 <= value <= MOST for value in values):
            raise InvalidInput(
                f"{name}={short(list(values))}: give numbers of threads from 1 to {MOST}"
            )
    if (pairs := len(set(intra)) * len(set(inter))) > MOST:
        raise InvalidInput(
            f"the {pairs} combinations of intra and inter are too many, because each needs a "
            f"process; give at most {MOST} combinations"
        )
    if not batches or min(batches) < 1:
        raise InvalidInput(f"batches={short(list(batches))}: give batch sizes of 1 or more")
    for name, value in (("steps", steps), ("repeats", repeats)):
        if value < 1:
            raise InvalidInput(f"{name}={short(value)}: give a whole number of 1 or more")


def _sweep(
    communicator: Communicator,
    settings: list[Threads],
    cases: tuple[ModelCase, ...],
    steps: int,
    repeats: int,
) -> list[StepTime]:
    """Start one process per pair of thread counts, and measure the processes one at a time."""
    timed = []
    with ExitStack() as opened:
        children = {}
        for threads in settings:
            name = f"the process with {threads.intra} intra-op and {threads.inter} inter-op threads"
            setting = Setting(threads, cases)
            child = Child(PROCESS, name, setting, communicator, threads.intra)
            children[threads] = opened.enter_context(closing(child))
        for child in children.values():
            child.answer()
        for repeat in range(repeats):
            # Every second repeat reverses the order, so that no process always follows the same
            # process.
            for threads in settings[:: -1 if repeat % 2 else 1]:
                for case in cases:
                    seconds = children[threads].ask("take", case.name, steps)
                    ms = 1e3 * float(np.median(seconds))
                    timed.append(StepTime(case.batch, threads.intra, threads.inter, repeat, ms))
    return timed
