"""Checks of this machine: each finding is one line, ok or the fix to paste."""

from __future__ import annotations

import email.parser  # noqa: F401  (importlib.metadata imports it where it reads a version)
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from labkit.cli.doctor import (
    clusters,
    fault_tolerance,
    hosts,
    jupyter,
    machine,
    programs,
    ranks,
    slurm,
)
from labkit.cli.doctor.diagnosis import Finding
from labkit.common.errors import InvalidInput
from labkit.hosts.host_list import hosts_of

Check = Callable[[], Iterator[Finding]]
CHECKS: list[Check] = [
    ranks.mpiexec,
    ranks.ranks,
    fault_tolerance.deaths,
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
# These wait for other processes, and import nothing: threads that import at once can deadlock.
WAITING = {
    *(ranks.mpiexec, ranks.ranks, fault_tolerance.deaths, hosts.hosts),
    *(programs.chromium, programs.slurm, programs.tensorflow),
    *(slurm.controller, slurm.nodes, slurm.offers, slurm.worlds),
}


def checks_of(launcher: str, given: str) -> list[Check]:
    """What is examined before ranks are started by this launcher, on these hosts.

    Raises:
        InvalidInput: hosts without their launcher, or it without hosts.
    """
    if (launcher == "hosts") != bool(given):
        raise InvalidInput("--launcher hosts and --hosts a:2,b:2 go together")
    if launcher == "slurm":
        return [ranks.mpiexec, slurm.controller, slurm.nodes, slurm.offers, slurm.worlds]
    if launcher == "hosts":
        return [ranks.mpiexec, partial(hosts.hosts, hosts_of(given))]
    return CHECKS


def examine(checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """Examine this machine; findings come as they are made. Starts two ranks for some seconds.

    Checks that wait begin together, and the others go on meanwhile: it takes as long as the
    longest, the import of TensorFlow.
    """
    with ThreadPoolExecutor(len(checks)) as pool:
        begun = {check: pool.submit(_findings, check) for check in checks if _waits(check)}
        done = {check: _findings(check) for check in checks if check not in begun}
        # In their order, which is the order in which a person would look.
        for check in checks:
            yield from begun[check].result() if check in begun else done[check]


def _waits(check: Check) -> bool:
    return getattr(check, "func", check) in WAITING


def _findings(check: Check) -> list[Finding]:
    """What a check finds; that it cannot be made is a finding, whatever the reason."""
    try:
        return list(check())
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        name = getattr(check, "func", check).__name__
        return [Finding("broken", f"{name}: {reason}")]


__all__ = ["CHECKS", "Finding", "checks_of", "examine"]
