"""Checks of this machine, which `labkit doctor` runs. Each finding is one line; a problem's line
contains a command that fixes the problem."""

from __future__ import annotations

import email.parser  # noqa: F401  (importlib.metadata imports it where it reads a version)
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from labkit.cli.doctor import launchers, machine, programs, ranks
from labkit.cli.doctor.diagnosis import Diagnosis
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.imports import installed, missing
from labkit.hosts.host_list import hosts_of

Check = Callable[[], Iterator[Diagnosis]]
CHECKS: list[Check] = [
    ranks.mpiexec,
    ranks.ranks,
    ranks.deaths,
    machine.cores,
    machine.root,
    machine.loopback,
    machine.memory,
    machine.disk,
    machine.clusters,
    machine.data,
    programs.plotly,
    programs.widgets,
    programs.kernel,
    programs.chromium,
    programs.slurm,
    programs.tensorflow,
    programs.keras,
]
# The checks in the set WAITING run in threads, because they wait for other processes. The checks
# that run in threads import no modules, because concurrent imports can deadlock.
WAITING = {
    *(ranks.mpiexec, ranks.ranks, ranks.deaths, launchers.hosts),
    *(programs.chromium, programs.slurm, programs.tensorflow),
    *(launchers.controller, launchers.nodes, launchers.offers, launchers.worlds),
}


def checks_of(launcher: str, hosts_text: str) -> list[Check]:
    """Return the checks that test the requirements of a launcher.

    Args:
        launcher: The launcher of ranks: "local", "hosts" or "slurm".
        hosts_text: Hosts with their numbers of ranks, such as "a:2,b:2", or the path of a host
            file. The text is empty if the launcher is not "hosts".

    Raises:
        InvalidInput: The launcher is "hosts" without `hosts_text`, or `hosts_text` names hosts for
            another launcher.
    """
    if (launcher == "hosts") != bool(hosts_text):
        raise InvalidInput(
            "--launcher hosts and --hosts must be given together: --launcher hosts --hosts a:2,b:2"
        )
    if launcher == "slurm":
        return [
            ranks.mpiexec,
            launchers.controller,
            launchers.nodes,
            launchers.offers,
            launchers.worlds,
        ]
    if launcher == "hosts":
        return [ranks.mpiexec, partial(launchers.hosts, hosts_of(hosts_text))]
    return CHECKS


def examine(checks: Sequence[Check] = CHECKS) -> Iterator[Diagnosis]:
    """Run the checks of this machine, and yield their findings in the order of the checks.

    Some checks start two or three ranks for some seconds. Checks that wait for other processes run
    concurrently, in threads. The other checks, some of which import modules, run before the first
    thread starts: a thread and the main thread that import at the same time can deadlock.
    """
    for module in ("mpi4py", "tensorflow"):
        with suppress(LabkitError):  # The check that needs the module reports that it is missing.
            installed(module)
    done = {check: _findings(check) for check in checks if not _waits(check)}
    with ThreadPoolExecutor(len(checks)) as pool:
        futures = {check: pool.submit(_findings, check) for check in checks if _waits(check)}
        for check in checks:
            yield from futures[check].result() if check in futures else done[check]


def _waits(check: Check) -> bool:
    return getattr(check, "func", check) in WAITING


def _findings(check: Check) -> list[Diagnosis]:
    """Return the findings of a check; an exception of the check is also reported as a finding."""
    try:
        return list(check())
    except Exception as error:
        known = missing(error) if isinstance(error, ModuleNotFoundError) else None
        reason = " ".join(str(known or error).split()) or type(error).__name__
        name = getattr(check, "func", check).__name__
        return [Diagnosis("broken", f"{name}: {reason}")]


__all__ = ["CHECKS", "Diagnosis", "checks_of", "examine"]
