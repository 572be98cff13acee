"""What faults, checksums and looks at numbers an experiment can have; the rest is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput
from labkit.schedules import ALLREDUCE
from labkit.strategies import AllReduce, ProgramStrategy
from labkit.strategies.staged import Staged

if TYPE_CHECKING:
    from labkit.experiment.experiment import Experiment
    from labkit.network import Fault


def sends(experiment: Experiment) -> bool:
    """Whether labkit itself sends each of its messages: it can lose one, or check its bits."""
    strategy = experiment.strategy
    algorithm = getattr(strategy, "scheduled", getattr(strategy, "algorithm", None))
    if algorithm is not None:
        chosen = algorithm == "auto" and experiment.network is not None
        return experiment.clock == "wall" and (algorithm in ALLREDUCE or chosen)
    if isinstance(strategy, Staged):  # replicas of stages average by the library
        return strategy.ranks(experiment.workers) == experiment.workers
    if not isinstance(strategy, ProgramStrategy):
        return False
    return experiment.clock == "virtual" or strategy.transport == "two_sided"


def check(experiment: Experiment) -> None:
    """Refuse what cannot be planted or looked at, before any rank starts."""
    name = type(experiment.strategy).__name__
    for fault in experiment.faults:
        _check_fault(experiment, fault, name)
    if experiment.checksums and not (experiment.clock == "wall" and sends(experiment)):
        raise InvalidInput(f"checksums=True: {_library(name)}")
    if experiment.check_every and (
        not isinstance(experiment.strategy, AllReduce)
        or experiment.clock == "virtual"
        or experiment.strategy.schedule == "priority"
    ):
        raise InvalidInput(
            f"check_every={experiment.check_every} compares replicas that are equal after each "
            f"step, which those of {name} on clock={experiment.clock!r} are not; use AllReduce on "
            "clock='wall' with another schedule than 'priority', or check_every=0"
        )
    _check_skip(experiment, name)


def _check_skip(experiment: Experiment, name: str) -> None:
    strategy = experiment.strategy
    early = isinstance(strategy, AllReduce) and strategy.schedule == "priority"
    cut = experiment.plays and strategy.replica_cut != 1
    late = isinstance(strategy, Staged) and not strategy.exact
    if experiment.bad_numbers == "skip" and (cut or (not experiment.plays and (early or late))):
        raise InvalidInput(
            f"bad_numbers='skip': parts of {name} are updated before the others have their "
            "gradients, so that no step can be left out; use bad_numbers='stop' or 'clip'"
        )


def _check_fault(experiment: Experiment, fault: Fault, name: str) -> None:
    who = experiment.workers if experiment.plays else experiment.ranks
    if not experiment.strategy.emulated:
        raise InvalidInput(
            f"faults: {name} trains in processes of its own, where nothing can be planted; take "
            "another strategy"
        )
    if experiment.plays and experiment.strategy.replica_cut != 1:
        raise InvalidInput(
            f"faults: workers of {name} are cut over several places, where nothing can be planted; "
            "give stages=1"
        )
    if fault.rank >= who:
        raise InvalidInput(f"{fault!r} with ranks 0 to {who - 1}; give one of these")
    steps = experiment.epoch_steps
    if steps is not None and fault.step >= (most := steps * experiment.epochs):
        raise InvalidInput(f"{fault!r} in a training of {most} steps; they count from 0")
    if fault.kind == "drop" and not sends(experiment):
        raise InvalidInput(f"{fault!r}: {_library(name)}")


def _library(name: str) -> str:
    return (
        f"not all messages of {name} as it is here are sent by labkit itself, whose they must be; "
        f"choose an algorithm of {', '.join(ALLREDUCE)}, servers with transport='two_sided', or a "
        "pipeline of one replica"
    )
