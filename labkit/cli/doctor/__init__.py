"""Checks of this machine: each finding is one line, ok or the fix to paste."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from labkit.cli.doctor import clusters, jupyter, machine, programs, ranks
from labkit.cli.doctor.examination import Finding

CHECKS: list[Callable[[], Iterator[Finding]]] = [
    ranks.mpiexec,
    ranks.ranks,
    machine.cores,
    machine.root,
    machine.memory,
    machine.disk,
    clusters.clusters,
    machine.data,
    jupyter.plotly,
    jupyter.widgets,
    jupyter.kernel,
    programs.chromium,
    programs.slurm,
    programs.tensorflow,
]


def examine() -> Iterator[Finding]:
    """Examine this machine; findings come as they are made. Starts two ranks for some seconds.

    All checks begin together: it takes as long as the longest, the import of TensorFlow.
    """
    # One thread a check: they wait for other processes most of the time.
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        # In the order of CHECKS, which is the order in which a person would look.
        for findings in [pool.submit(_findings, check) for check in CHECKS]:
            yield from findings.result()


def _findings(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """What a check finds; that it cannot be made is a finding, whatever the reason."""
    try:
        return list(check())
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return [Finding("broken", f"{check.__name__}: {reason}")]


__all__ = ["CHECKS", "Finding", "examine"]
