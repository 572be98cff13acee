"""Training steps timed at every number of threads within and between operations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import product

import numpy as np

from labkit.bench.step_process import PROCESS, Setting, Threads
from labkit.bench.steps import Case
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, short
from labkit.communicator import Communicator
from labkit.frameworks.child import Child
from labkit.records.thread_counts import ThreadSweep, Timed

MOST = 64  # threads; and processes, one a setting, that are there at a time


def measure(
    intra: Sequence[int] = (1, 2, 8),
    inter: Sequence[int] = (1, 2, 8),
    batches: Sequence[int] = (32, 1024),
    widths: Sequence[int] = (512, 512),
    steps: int = 20,
    repeats: int = 5,
) -> ThreadSweep:
    """Time the training step of an MLP at every pair of thread counts, interleaved.

    Each pair has a process of its own. In every repeat each has a turn for each batch, the order
    backwards every other time; while one computes the others sleep. A process takes about a
    third of a GiB of memory, beside what it shares with the others.

    Args:
        intra: threads that share one operation's work.
        inter: threads that run operations beside each other.
        batches: samples of a step: small steps and large ones want other numbers.
        widths: of the hidden layers.
        steps: of a turn, timed, after a few for warming up.
        repeats: turns of each pair and batch.

    Raises:
        InvalidInput: an impossible number.
        RankError: a process ended early.
    """
    refuse_impossible(intra, inter, batches, steps, repeats)
    settings = [Threads(*pair) for pair in product(dict.fromkeys(intra), dict.fromkeys(inter))]
    cases = tuple(Case(f"batch {batch}", tuple(widths), batch) for batch in dict.fromkeys(batches))
    with Cluster(workers=1) as cluster:
        timed = cluster.call(_sweep, settings, cases, steps, repeats)[0]
    return ThreadSweep(timed, cores=len(os.sched_getaffinity(0)))


def refuse_impossible(
    intra: Sequence[int], inter: Sequence[int], batches: Sequence[int], steps: int, repeats: int
) -> None:
    """Raise InvalidInput for what `measure` cannot do, before anything starts."""
    for name, values in (("intra", intra), ("inter", inter)):
        if not values or not all(1 <= value <= MOST for value in values):
            raise InvalidInput(f"{name}={short(list(values))}: give threads, each from 1 to {MOST}")
    if (pairs := len(set(intra)) * len(set(inter))) > MOST:
        raise InvalidInput(f"{pairs} pairs of intra and inter want a process each: give {MOST}")
    if not batches or min(batches) < 1:
        raise InvalidInput(f"batches={short(list(batches))}: give samples, each at least 1")
    for name, value in (("steps", steps), ("repeats", repeats)):
        if value < 1:
            raise InvalidInput(f"{name}={short(value)}: give a whole number from 1")


def _sweep(
    communicator: Communicator,
    settings: list[Threads],
    cases: tuple[Case, ...],
    steps: int,
    repeats: int,
) -> list[Timed]:
    """Start the processes, and let them take turns."""
    timed = []
    with ExitStack() as opened:
        children = {}
        for threads in settings:
            name = f"the process of {threads.intra} intra-op and {threads.inter} inter-op threads"
            told = Setting(threads, cases)
            child = Child(PROCESS, name, told, communicator, threads.intra)
            children[threads] = opened.enter_context(closing(child))
        for child in children.values():
            child.answer()
        for repeat in range(repeats):
            # Backwards every other time: none always follows the same one.
            for threads in settings[:: -1 if repeat % 2 else 1]:
                for case in cases:
                    seconds = children[threads].ask("take", case.name, steps)
                    ms = 1e3 * float(np.median(seconds))
                    timed.append(Timed(case.batch, threads.intra, threads.inter, repeat, ms))
    return timed
