"""One script of faults over all strategies that can have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, LabkitError
from labkit.experiment import Experiment
from labkit.network import Fault
from labkit.records.run import Run
from labkit.strategies import STRATEGIES, ParameterServer, Strategy

Pairs = dict[str, tuple[Run, Run]]  # undisturbed, and with the script


def entrants(base: Experiment) -> dict[str, Strategy]:
    """All strategies that an experiment takes, by name, with servers in their three ways."""
    found: dict[str, Strategy] = {name: kind() for name, kind in STRATEGIES.items()}
    found["ParameterServer, backup"] = ParameterServer(backups=1)
    found["ParameterServer, asynchronous"] = ParameterServer(synchronous=False)
    return {name: each for name, each in found.items() if _takes(base, each)}


def league(
    cluster: Cluster, base: Experiment, strategies: Mapping[str, Strategy], script: Sequence[Fault]
) -> Pairs:
    """Each strategy undisturbed and with the faults; who refuses the model is left out."""
    found = {}
    for name, strategy in strategies.items():
        calm = base.replace(strategy=strategy)
        try:
            found[name] = _run(cluster, calm), _run(cluster, calm.replace(faults=tuple(script)))
        except InvalidInput:
            continue
    return found


def _run(cluster: Cluster, asked: Experiment) -> Run:
    """Its record, also where it has failed."""
    live = cluster.submit(asked)
    try:
        return live.result()
    except InvalidInput:
        raise
    except LabkitError:
        assert live.run is not None  # for the type checker: it has ended
        return live.run


def _takes(base: Experiment, strategy: Strategy) -> bool:
    try:
        base.replace(strategy=strategy, faults=(Fault(kind="slow", rank=0, step=0),))
    except InvalidInput:
        return False
    return True
