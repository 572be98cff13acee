"""A process with its own threads and devices, that takes training steps and says what ran in them.

TensorFlow fixes threads and logical devices when it first computes: every setting needs a process
of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from labkit.bench.split_step import SplitModel, gated
from labkit.bench.steps import Averaging, Case, Model
from labkit.frameworks.child import serve
from labkit.records.step_graph import StepGraph
from labkit.worker.executed_step import step_graph

if TYPE_CHECKING:
    import tensorflow as tf

PROCESS = "labkit.bench.step_process"
KINDS = ("plain", "gated", "split")  # of steps whose graph can be asked for
WARM = 3  # steps before a turn's timed ones


class Threads(NamedTuple):
    """Of one setting: `intra` work on one operation, `inter` on operations beside each other."""

    intra: int
    inter: int


class Setting(NamedTuple):
    """What a process is told.

    Attributes:
        threads: that it computes with.
        cases: the steps that it will be asked for.
        devices: logical ones, into which its processor is divided.
    """

    threads: Threads
    cases: tuple[Case, ...]
    devices: int = 1


def start(setting: Setting) -> Mapping[str, Callable[..., object]]:
    """Fix threads and devices, and answer."""
    import tensorflow as tf

    # Before anything is computed: a tensor is enough to fix them.
    tf.config.threading.set_intra_op_parallelism_threads(setting.threads.intra)
    tf.config.threading.set_inter_op_parallelism_threads(setting.threads.inter)
    (processor,) = tf.config.list_physical_devices("CPU")
    each = [tf.config.LogicalDeviceConfiguration()] * setting.devices
    tf.config.set_logical_device_configuration(processor, each)
    cases = {case.name: case for case in setting.cases}
    models = {name: Model(case, rank=0) for name, case in cases.items()}
    steps = {name: model.step(_as_they_are) for name, model in models.items()}

    def take(name: str, count: int) -> list[float]:
        """Seconds of so many steps of a case, after a few that nobody counts."""
        for _ in range(WARM):
            steps[name]()
        return [_seconds(steps[name]) for _ in range(count)]

    def graph(name: str, kind: str, repeats: int) -> StepGraph:
        """What ran in a step of a case: `plain`, `gated` or `split` over two devices."""
        model = SplitModel(cases[name], rank=0) if kind == "split" else models[name]
        between = gated if kind == "gated" else _as_they_are
        return step_graph(partial(_train, model, between), model.x, model.y, repeats=repeats)

    return {"take": take, "graph": graph}


def _as_they_are(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    return gradients


def _train(model: Model, between: Averaging, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return model.train(x, y, between)


def _seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


if __name__ == "__main__":
    serve(start)
