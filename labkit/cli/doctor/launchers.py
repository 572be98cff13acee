"""Checks of Slurm (controller, nodes, PMI types), and of the MPI worlds that ranks form."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence

from labkit.cli.doctor.diagnosis import Diagnosis, last_line, output
from labkit.cli.doctor.ranks import RANK, RANKS, rank_reports, trouble
from labkit.common.errors import LabkitError
from labkit.common.units import plural
from labkit.communicator import launcher
from labkit.hosts import host_list as connection
from labkit.hosts.host_list import Host, login
from labkit.hosts.host_probe import probe
from labkit.hosts.queue import Queue
from labkit.hosts.scripts import AGENT_VARIABLE

COMMANDS = ("sinfo", "squeue", "scontrol", "scancel", "sbatch", "salloc", "srun")
PMI = "pmix"
# The constant ROOM is the time in seconds that Slurm may take to grant the check an allocation.
ROOM = 30
# The environment variable LABKIT_SLURM contains options for salloc and srun.
OPTIONS = "LABKIT_SLURM"


def controller() -> Iterator[Diagnosis]:
    """Check that Slurm's commands exist and that its controller answers."""
    if absent := [name for name in COMMANDS if shutil.which(name) is None]:
        fix = "run labkit doctor on a login node, or: apt-get install slurm-client"
        yield Diagnosis("broken", f"slurm: the commands {', '.join(absent)} are not on PATH", fix)
        return
    done = output([*login(), "scontrol", "ping"])
    reply = " ".join(done.stdout.split()) or last_line(done)
    if done.returncode or "UP" not in reply:
        fix = "systemctl restart munge slurmctld  # on the controller's host; then: scontrol ping"
        yield Diagnosis("broken", f"slurm: {reply}", fix)
    else:
        yield Diagnosis("ok", f"slurm: {reply}")


def nodes() -> Iterator[Diagnosis]:
    """Report how many nodes accept jobs, and Slurm's reason for each node that does not."""
    try:
        all_nodes = Queue(login()).nodes()
    except LabkitError as error:
        yield Diagnosis("broken", f"nodes: {error}", "sinfo")
        return
    failing = [node for node in all_nodes if node.trouble]
    for node in failing:
        fix = f"systemctl restart slurmd on {node.name}, then: scontrol update "
        text = f"nodes: {node.trouble}" + ("" if node.reason else ": Slurm states no reason")
        yield Diagnosis("note", text, f"{fix}nodename={node.name} state=resume")
    if usable := len(all_nodes) - len(failing):
        yield Diagnosis("ok", f"nodes: {usable} of {plural(len(all_nodes), 'node')} can run jobs")
    else:
        yield Diagnosis(
            "broken", f"nodes: none of {plural(len(all_nodes), 'node')} can run jobs", "sinfo"
        )


def offers() -> Iterator[Diagnosis]:
    """Report the process management interfaces (PMI) with which srun connects ranks."""
    done = output([*login(), "srun", "--mpi=list"])
    # Some versions of srun print the list of PMIs on stderr.
    lines = (done.stdout + done.stderr).splitlines()
    pmis = sorted({line.strip() for line in lines if re.fullmatch(r"\s+[a-z][\w]*", line)})
    if PMI in pmis:
        yield Diagnosis("ok", f"pmi: srun offers {', '.join(pmis)}")
        return
    what = f"pmi: srun offers {', '.join(pmis) or last_line(done)}, but not {PMI}"
    yield Diagnosis("note", f"{what}; start ranks with mpiexec instead", "apt-get install libpmix2")


def worlds() -> Iterator[Diagnosis]:
    """Start two ranks with srun, and afterwards two ranks with mpiexec in an allocation."""
    room = ["--nodes=1-2", "--spread-job", f"--ntasks={RANKS}", f"--immediate={ROOM}", "--time=2"]
    room += shlex.split(os.environ.get(OPTIONS, ""))
    rank = [sys.executable, "-P", "-c", RANK]
    launches = {
        f"srun --mpi={PMI}": ["srun", f"--mpi={PMI}", *room, *rank],
        "mpiexec in an allocation": [
            "salloc",
            *room,
            *launcher.mpiexec(RANKS, over_hosts=True),
            *rank,
        ],
    }
    # The launches with srun and with mpiexec run one after the other. Concurrent allocations would
    # compete for Slurm nodes.
    for launch, command in launches.items():
        done = output([*login(), *command], launcher.environment(over_hosts=True))
        wrong = trouble(done, RANKS)
        if not wrong:
            hosts = sorted({rank["host"] for rank in rank_reports(done)})
            yield Diagnosis(
                "ok", f"{launch}: {RANKS} ranks formed one MPI_COMM_WORLD on {', '.join(hosts)}"
            )
        elif re.search("Unable to allocate|submit/allocate failed", done.stderr):
            fix = f"export {OPTIONS}='--partition=NAME --account=NAME'"
            yield Diagnosis(
                "note",
                f"{launch}: Slurm granted no allocation within {ROOM} s: {last_line(done)}",
                fix,
            )
        else:
            yield Diagnosis("broken", f"{launch}: {wrong}", "srun --mpi=list  # lists the PMIs")


def hosts(listed: Sequence[Host]) -> Iterator[Diagnosis]:
    """Check all hosts, then start the given number of ranks on each host as one MPI world."""
    agent = connection.agent()
    results = probe([host.name for host in listed], agent)
    for host, wrong in results:
        if wrong:
            command_line = shlex.join([*agent, host, sys.executable, "--version"])
            yield Diagnosis("broken", f"hosts: {wrong}", command_line)
        else:
            yield Diagnosis(
                "ok",
                f"hosts: {host} has the same versions of Python, labkit and MPI as this machine",
            )
    if any(result.trouble for result in results):
        return
    count = sum(host.slots for host in listed)
    host_list = ",".join(map(str, listed))
    command = [
        *connection.login(),
        *launcher.mpiexec(count, over_hosts=True),
        "--prtemca",
        "plm",
        "ssh",
        "--host",
        host_list,
    ]
    done = output(
        [*command, sys.executable, "-P", "-c", RANK],
        launcher.environment(over_hosts=True) | {AGENT_VARIABLE: shlex.join(agent)},
    )
    if wrong := trouble(done, count):
        fix = "name the network that all hosts share: export OMPI_MCA_btl_tcp_if_include=10.0.0.0/8"
        yield Diagnosis("broken", f"world: {wrong}", fix)
        return
    names = sorted({rank["host"] for rank in rank_reports(done)})
    yield Diagnosis(
        "ok", f"world: {plural(count, 'rank')} formed one MPI_COMM_WORLD on {', '.join(names)}"
    )
