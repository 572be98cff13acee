"""Slurm, as ranks need it: it answers, has nodes, and its steps make one MPI world."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator

from labkit.cli.doctor.diagnosis import Finding, last_line, output
from labkit.cli.doctor.ranks import RANK, RANKS, of_ranks, trouble
from labkit.common.errors import LabkitError
from labkit.common.units import plural
from labkit.communicator import launcher
from labkit.hosts.connection import login
from labkit.hosts.queue import Queue

COMMANDS = ("sinfo", "squeue", "scontrol", "scancel", "sbatch", "salloc", "srun")
PMI = "pmix"
ROOM = 30  # seconds in which a trial must find a place
OPTIONS = "LABKIT_SLURM"  # further words for salloc and srun, such as --partition=short


def controller() -> Iterator[Finding]:
    """Slurm's commands, and whether its controller answers."""
    if absent := [name for name in COMMANDS if shutil.which(name) is None]:
        fix = "call it on a login node, or: apt-get install slurm-client"
        yield Finding("broken", f"slurm: no {', '.join(absent)} here", fix)
        return
    done = output([*login(), "scontrol", "ping"])
    said = " ".join(done.stdout.split()) or last_line(done)
    if done.returncode or "UP" not in said:
        fix = "systemctl restart munge slurmctld  # on its own host; then: scontrol ping"
        yield Finding("broken", f"slurm: {said}", fix)
    else:
        yield Finding("ok", f"slurm: {said}")


def nodes() -> Iterator[Finding]:
    """Nodes that take jobs; those that do not, each with the reason that Slurm gives."""
    try:
        found = Queue(login()).nodes()
    except LabkitError as error:
        yield Finding("broken", f"nodes: {error}", "sinfo")
        return
    unwell = [node for node in found if node.trouble]
    for node in unwell:
        fix = f"systemctl restart slurmd on {node.name}, then: scontrol update "
        told = f"nodes: {node.trouble}" + ("" if node.reason else ": Slurm gives no reason")
        yield Finding("note", told, f"{fix}nodename={node.name} state=resume")
    if well := len(found) - len(unwell):
        yield Finding("ok", f"nodes: {plural(well, 'node')} of {len(found)} take jobs")
    else:
        yield Finding("broken", f"nodes: none of {len(found)} takes jobs", "sinfo")


def offers() -> Iterator[Finding]:
    """The PMIs by which srun may tell ranks of each other."""
    done = output([*login(), "srun", "--mpi=list"])
    # Some versions say it on stderr.
    lines = (done.stdout + done.stderr).splitlines()
    found = sorted({line.strip() for line in lines if re.fullmatch(r"\s+[a-z][\w]*", line)})
    if PMI in found:
        yield Finding("ok", f"pmi: srun offers {', '.join(found)}")
        return
    what = f"pmi: srun offers {', '.join(found) or last_line(done)}, and not {PMI}"
    yield Finding("note", f"{what}: start ranks by mpiexec", "apt-get install libpmix2")


def worlds() -> Iterator[Finding]:
    """Two ranks for real, in both ways: a step of srun's, and mpiexec in an allocation."""
    room = ["--nodes=1-2", "--spread-job", f"--ntasks={RANKS}", f"--immediate={ROOM}", "--time=2"]
    room += shlex.split(os.environ.get(OPTIONS, ""))
    rank = [sys.executable, "-P", "-c", RANK]
    ways = {
        f"srun --mpi={PMI}": ["srun", f"--mpi={PMI}", *room, *rank],
        "mpiexec in an allocation": ["salloc", *room, *launcher.mpiexec(RANKS), *rank],
    }
    # One after the other: they would take each other's room.
    for way, command in ways.items():
        done = output([*login(), *command], launcher.environment(over_hosts=True))
        wrong = trouble(done, RANKS)
        if not wrong:
            there = sorted({rank["host"] for rank in of_ranks(done)})
            yield Finding("ok", f"{way}: {RANKS} ranks met on {', '.join(there)}")
        elif re.search("Unable to allocate|submit/allocate failed", done.stderr):
            fix = f"export {OPTIONS}='--partition=NAME --account=NAME'"
            yield Finding(
                "note", f"{way}: was given no room within {ROOM} s: {last_line(done)}", fix
            )
        else:
            yield Finding("broken", f"{way}: {wrong}", "srun --mpi=list  # which PMIs there are")
