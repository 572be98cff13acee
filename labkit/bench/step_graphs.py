"""Traces of a training step: unchanged, with gated gradients, or split over two devices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from labkit.bench.step_process import KINDS, PROCESS, Setting, Threads
from labkit.bench.steps import ModelCase
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, short
from labkit.communicator import Communicator
from labkit.frameworks.child import Child
from labkit.records.step_graph import StepGraph

DEVICES = 2  # number of logical devices
DEEPEST = 4  # maximum number of hidden layers; more do not fit into the animation


def measure(
    widths: Sequence[int] = (256, 128),
    batch: int = 256,
    inter: int = 2,
    repeats: int = 5,
) -> dict[str, StepGraph]:
    """Trace three variants of an MLP's training step in a new process.

    `plain` is the unchanged training step. The variant `gated` adds control dependencies, so that
    no variable changes before all gradients are computed. The variant `split` places the first half
    of the layers on one logical device and the rest on another. Each operation of the graph runs on
    one thread.

    Args:
        widths: Number of units of each hidden layer; there are 1 to 4 hidden layers.
        batch: Batch size in samples.
        inter: Number of threads that run operations concurrently.
        repeats: Number of traced steps of each variant; the trace with the median duration is
            returned.

    Raises:
        InvalidInput: An argument is out of range.
    """
    refuse_impossible(widths, batch, inter, repeats)
    setting = Setting(Threads(1, inter), (ModelCase("traced", tuple(widths), batch),), DEVICES)
    with Cluster(workers=1) as cluster:
        return cluster.call(_trace, setting, repeats)[0]


def refuse_impossible(widths: Sequence[int], batch: int, inter: int, repeats: int) -> None:
    """Raise InvalidInput for arguments that `measure` does not support."""
    if not 1 <= len(widths) <= DEEPEST or min(widths) < 1:
        raise InvalidInput(
            f"widths={short(list(widths))}: give the widths of 1 to {DEEPEST} hidden layers, "
            "each of at least 1 unit"
        )
    for name, value in (("batch", batch), ("inter", inter), ("repeats", repeats)):
        if value < 1:
            raise InvalidInput(f"{name}={short(value)}: give a whole number of at least 1")


def _trace(communicator: Communicator, setting: Setting, repeats: int) -> dict[str, StepGraph]:
    (case,) = setting.cases
    child = Child(PROCESS, "the traced process", setting, communicator, setting.threads.intra)
    with closing(child):
        child.answer()
        return {kind: child.ask("graph", case.name, kind, repeats) for kind in KINDS}
