"""Validation of the faults, checksums and gradient checks of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from labkit.common.errors import InvalidInput
from labkit.network import Fault
from labkit.schedules import ALLREDUCE
from labkit.strategies import AllReduce, ProgramStrategy, Strategy
from labkit.strategies.staged import Staged
from labkit.strategies.strategy import ExperimentSpec


class FaultOptions(ExperimentSpec, Protocol):
    """The fields of an experiment on which faults, checksums and gradient checks depend."""

    @property
    def strategy(self) -> Strategy: ...
    @property
    def ranks(self) -> int: ...
    @property
    def uses_programs(self) -> bool: ...
    @property
    def epochs(self) -> int: ...
    @property
    def faults(self) -> Sequence[Fault]: ...
    @property
    def checksums(self) -> bool: ...
    @property
    def replica_check_interval(self) -> int: ...
    @property
    def on_nonfinite(self) -> str | None: ...


def sends_every_message(experiment: FaultOptions) -> bool:
    """Return whether labkit itself sends every message of an experiment.

    labkit can change messages only if labkit sends all messages itself. A change drops a message,
    or adds a checksum to each message.
    """
    strategy = experiment.strategy
    algorithm = getattr(strategy, "scheduled", getattr(strategy, "algorithm", None))
    if algorithm is not None:
        # On an emulated network, the algorithm "auto" chooses among labkit's own allreduce
        # algorithms.
        is_auto = algorithm == "auto" and experiment.network is not None
        return experiment.clock == "wall" and (algorithm in ALLREDUCE or is_auto)
    if isinstance(strategy, Staged):
        # If a pipeline stage has several replicas, the replicas average their gradients with the
        # MPI library.
        return strategy.ranks(experiment.workers) == experiment.workers
    if not isinstance(strategy, ProgramStrategy):
        return False
    return experiment.clock == "virtual" or strategy.transport == "two_sided"


def check(experiment: FaultOptions) -> None:
    """Validate the faults, checksums, replica checks and gradient checks of an experiment.

    Raises:
        InvalidInput: The strategy, the clock or the number of steps does not support an option.
    """
    name = type(experiment.strategy).__name__
    for fault in experiment.faults:
        _validate_fault(experiment, fault, name)
    if experiment.checksums and not (
        experiment.clock == "wall" and sends_every_message(experiment)
    ):
        raise InvalidInput(f"checksums=True: {_sender_advice(name)}")
    if experiment.replica_check_interval and (
        not isinstance(experiment.strategy, AllReduce)
        or experiment.clock == "virtual"
        or experiment.strategy.schedule == "priority"
    ):
        raise InvalidInput(
            f"replica_check_interval={experiment.replica_check_interval} needs replicas that "
            f"are equal after each step, but {name} on clock={experiment.clock!r} has no such "
            "replicas with the given options; use AllReduce on clock='wall' without "
            "schedule='priority', or set replica_check_interval=0"
        )
    _validate_skip(experiment, name)


def _validate_skip(experiment: FaultOptions, name: str) -> None:
    strategy = experiment.strategy
    by_priority = isinstance(strategy, AllReduce) and strategy.schedule == "priority"
    is_cut = experiment.uses_programs and strategy.replica_cut != 1
    asynchronous = isinstance(strategy, Staged) and not strategy.exact
    if experiment.on_nonfinite == "skip" and (
        is_cut or (not experiment.uses_programs and (by_priority or asynchronous))
    ):
        raise InvalidInput(
            f"on_nonfinite='skip' is impossible: with these options, {name} updates some layers "
            "before other layers have gradients, so no complete step can be skipped; use "
            "on_nonfinite='stop' or 'clip'"
        )


def _validate_fault(experiment: FaultOptions, fault: Fault, name: str) -> None:
    # If a strategy runs one program per worker, a fault's `rank` is a worker's number.
    ranks = experiment.workers if experiment.uses_programs else experiment.ranks
    if not experiment.strategy.emulated:
        raise InvalidInput(
            f"faults: {name} trains in separate processes, where labkit cannot inject faults; "
            "remove faults, or use another strategy"
        )
    if experiment.uses_programs and experiment.strategy.replica_cut != 1:
        raise InvalidInput(
            f"faults: {name} splits the model of a worker, and labkit cannot inject faults into "
            "split models; use stages=1 and no grid"
        )
    if fault.rank >= ranks:
        raise InvalidInput(
            f"{fault!r}: rank {fault.rank} does not exist; give a rank from 0 to {ranks - 1}"
        )
    steps = experiment.epoch_steps
    if steps is not None and fault.step >= (total := steps * experiment.epochs):
        raise InvalidInput(
            f"{fault!r}: the training has only {total} steps; give a step from 0 to {total - 1}"
        )
    if fault.kind == "drop" and not sends_every_message(experiment):
        raise InvalidInput(f"{fault!r}: {_sender_advice(name)}")


def _sender_advice(name: str) -> str:
    return (
        "message faults and checksums work only if labkit itself sends all messages, which is "
        f"not so with these options of {name}; with clock='wall', use one of the algorithms "
        f"{', '.join(ALLREDUCE)}, servers with transport='two_sided', or a pipeline of one "
        "replica"
    )
