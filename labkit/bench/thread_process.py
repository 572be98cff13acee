"""A process whose TensorFlow has so many threads from its start on, and that times training steps.

TensorFlow fixes its threads when it first computes: every setting needs a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from labkit.bench.steps import Case, Model
from labkit.frameworks.child import serve

WARM = 3  # steps before a turn's timed ones


class Threads(NamedTuple):
    """Of one setting: `intra` work on one operation, `inter` on operations beside each other."""

    intra: int
    inter: int


class Setting(NamedTuple):
    """What a process is told: its threads, and the steps that it will be asked for."""

    threads: Threads
    cases: tuple[Case, ...]


def start(setting: Setting) -> Mapping[str, Callable[..., object]]:
    """Set the threads, build the models, and answer."""
    import tensorflow as tf

    # Before anything is computed: a tensor is enough to fix them.
    tf.config.threading.set_intra_op_parallelism_threads(setting.threads.intra)
    tf.config.threading.set_inter_op_parallelism_threads(setting.threads.inter)
    steps = {
        case.name: Model(case, rank=0).step(lambda gradients: gradients) for case in setting.cases
    }

    def take(name: str, count: int) -> list[float]:
        """Seconds of so many steps of a case, after a few that nobody counts."""
        for _ in range(WARM):
            steps[name]()
        return [_seconds(steps[name]) for _ in range(count)]

    return {"take": take}


def _seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


if __name__ == "__main__":
    serve(start)
