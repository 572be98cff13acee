"""One script of faults, run with every strategy that takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, LabkitError
from labkit.experiment import Experiment
from labkit.network import Fault
from labkit.records.run import Run
from labkit.strategies import STRATEGIES, ParameterServer, Strategy


class Calm(NamedTuple):
    """A run without faults, and its experiment."""

    asked: Experiment
    run: Run


Pairs = dict[str, tuple[Run, Run | None]]  # undisturbed, and with the script; None: refused


def entrants(base: Experiment) -> dict[str, Strategy]:
    """Return all strategies that an experiment takes, by name, with three kinds of servers."""
    found: dict[str, Strategy] = {name: kind() for name, kind in STRATEGIES.items()}
    found["ParameterServer, backup"] = ParameterServer(backups=1)
    found["ParameterServer, asynchronous"] = ParameterServer(synchronous=False)
    return {name: each for name, each in found.items() if _takes(base, each)}


def undisturbed(
    cluster: Cluster, base: Experiment, strategies: Mapping[str, Strategy]
) -> dict[str, Calm]:
    """Run each strategy without faults; leave out those that refuse the model."""
    found = {}
    for name, strategy in strategies.items():
        asked = base.replace(strategy=strategy)
        try:
            found[name] = Calm(asked, cluster.run(asked, show=False))
        except InvalidInput:
            continue
    return found


def league(cluster: Cluster, calm: Mapping[str, Calm], script: Sequence[Fault]) -> Pairs:
    """Run each of these again with faults; a strategy that would wait for ever refuses them."""
    return {name: (run, _hit(cluster, asked, tuple(script))) for name, (asked, run) in calm.items()}


def _hit(cluster: Cluster, calm: Experiment, faults: tuple[Fault, ...]) -> Run | None:
    """Return the run with faults, also where it fails; None where the strategy refuses them."""
    try:
        asked = calm.replace(faults=faults)
    except InvalidInput:
        return None
    live = cluster.submit(asked)
    try:
        return live.result()
    except LabkitError:
        assert live.run is not None  # for the type checker: it has ended
        return live.run


def _takes(base: Experiment, strategy: Strategy) -> bool:
    try:
        base.replace(strategy=strategy, faults=(Fault(kind="slow", rank=0, step=0),))
    except InvalidInput:
        return False
    return True
