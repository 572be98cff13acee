"""What ran in a training step: as it is, with updates that wait, and split over two devices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from labkit.bench.step_process import KINDS, PROCESS, Setting, Threads
from labkit.bench.steps import Case
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, short
from labkit.communicator import Communicator
from labkit.frameworks.child import Child
from labkit.records.step_graph import StepGraph

DEVICES = 2  # logical ones
DEEPEST = 4  # hidden layers, of which an animation still shows each operation


def measure(
    widths: Sequence[int] = (256, 128),
    batch: int = 256,
    inter: int = 2,
    repeats: int = 5,
) -> dict[str, StepGraph]:
    """Trace the training step of an MLP in a fresh process, in each of three kinds.

    `plain` is the step; `gated` the same with control dependencies, by which no variable changes
    before all gradients are there; `split` has the first half of its layers on one logical device
    and the rest on another. Each operation computes with one thread.

    Args:
        widths: of the hidden layers, 1 to 4 of them.
        batch: samples.
        inter: threads that run operations beside each other.
        repeats: steps that are traced of each kind; the one of median length is kept.

    Raises:
        InvalidInput: an impossible number.
    """
    refuse_impossible(widths, batch, inter, repeats)
    setting = Setting(Threads(1, inter), (Case("traced", tuple(widths), batch),), DEVICES)
    with Cluster(workers=1) as cluster:
        return cluster.call(_trace, setting, repeats)[0]


def refuse_impossible(widths: Sequence[int], batch: int, inter: int, repeats: int) -> None:
    """Raise InvalidInput for what `measure` cannot do, before anything starts."""
    if not 1 <= len(widths) <= DEEPEST or min(widths) < 1:
        raise InvalidInput(
            f"widths={short(list(widths))}: give 1 to {DEEPEST} hidden layers of at least 1 unit"
        )
    for name, value in (("batch", batch), ("inter", inter), ("repeats", repeats)):
        if value < 1:
            raise InvalidInput(f"{name}={short(value)}: give a whole number from 1")


def _trace(communicator: Communicator, setting: Setting, repeats: int) -> dict[str, StepGraph]:
    (case,) = setting.cases
    child = Child(PROCESS, "the traced process", setting, communicator, setting.threads.intra)
    with closing(child):
        child.answer()
        return {kind: child.ask("graph", case.name, kind, repeats) for kind in KINDS}
