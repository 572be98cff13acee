"""Functions that run experiments in a temporary folder, also with injected faults."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, LabkitError
from labkit.experiment import Experiment
from labkit.network import Fault
from labkit.records.checkpoints import RESUME_VARIABLE
from labkit.records.run import Run
from labkit.strategies import STRATEGIES, ParameterServer, Strategy


@contextmanager
def temporary_runs() -> Iterator[Path]:
    """Store runs in a temporary folder, which is removed when the context ends.

    Inside the context, a batch job does not see runs of its earlier attempts.
    """
    ours = ("LABKIT_RUNS", "LABKIT_JOB", RESUME_VARIABLE)
    before = {name: os.environ[name] for name in ours if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as folder:
        # In a batch job, the variable LABKIT_JOB stays set, because it tells processes that they
        # have no terminal.
        os.environ |= dict.fromkeys(("LABKIT_RUNS", *before), folder)
        os.environ.pop(RESUME_VARIABLE, None)
        try:
            yield Path(folder)
        finally:
            for name in ours:
                os.environ.pop(name, None)
            os.environ |= before


class FaultFreeRun(NamedTuple):
    """An experiment without injected faults, and the run of this experiment."""

    experiment: Experiment
    run: Run


Pairs = dict[
    str, tuple[Run, Run | None]
]  # by strategy: run without faults, and run with faults (None if the strategy rejects faults)


def supported_strategies(base: Experiment) -> dict[str, Strategy]:
    """Return the strategies and variants of ParameterServer that support injected faults."""
    strategies: dict[str, Strategy] = {name: kind() for name, kind in STRATEGIES.items()}
    strategies["ParameterServer, backup"] = ParameterServer(backup_workers=1)
    strategies["ParameterServer, asynchronous"] = ParameterServer(synchronous=False)
    return {name: each for name, each in strategies.items() if _supports_faults(base, each)}


def run_without_faults(
    cluster: Cluster, base: Experiment, strategies: Mapping[str, Strategy]
) -> dict[str, FaultFreeRun]:
    """Run each strategy without faults; omit strategies that reject the experiment."""
    found = {}
    for name, strategy in strategies.items():
        experiment = base.replace(strategy=strategy)
        try:
            found[name] = FaultFreeRun(experiment, cluster.run(experiment, show=False))
        except InvalidInput:
            continue
    return found


def run_with_faults(
    cluster: Cluster, calm: Mapping[str, FaultFreeRun], script: Sequence[Fault]
) -> Pairs:
    """Run each experiment again with faults; a run is None if the strategy rejects the faults."""
    return {
        name: (run, _hit(cluster, experiment, tuple(script)))
        for name, (experiment, run) in calm.items()
    }


def _hit(cluster: Cluster, calm: Experiment, faults: tuple[Fault, ...]) -> Run | None:
    """Return the run with faults, even if it fails; None if the strategy rejects the faults."""
    try:
        experiment = calm.replace(faults=faults)
    except InvalidInput:
        return None
    handle = cluster.submit(experiment)
    try:
        return handle.result()
    except LabkitError:
        # The attribute `handle.run` is never None after the end of a run.
        assert handle.run is not None
        return handle.run


def _supports_faults(base: Experiment, strategy: Strategy) -> bool:
    try:
        base.replace(strategy=strategy, faults=(Fault(kind="slow", rank=0, step=0),))
    except InvalidInput:
        return False
    return True
