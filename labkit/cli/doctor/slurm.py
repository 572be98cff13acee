"""Slurm, as ranks need it: it answers, has nodes, and its steps make one MPI world."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator

from labkit.cli.doctor.examination import Finding, last_line, output
from labkit.cli.doctor.ranks import ACROSS_HOSTS, RANK, RANKS, of_ranks, trouble
from labkit.common.units import plural
from labkit.communicator import launcher
from labkit.hosts.reach import login

COMMANDS = ("sinfo", "squeue", "scontrol", "scancel", "sbatch", "salloc", "srun")
PMI = "pmix"
ROOM = 30  # seconds in which a trial must find a place
# By the first word of the state; a * behind it: the node does not answer.
UNWELL = re.compile(r"(down|drain|drained|draining|fail|failing|unknown|no_respond)|.*\*")
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
    done = output([*login(), "sinfo", "--noheader", "--Node", "--format=%N|%T|%E"])
    # A node stands there once for each of its partitions.
    rows = dict.fromkeys(line.strip() for line in done.stdout.splitlines() if line.strip())
    well = 0
    for name, state, reason in (row.split("|", 2) for row in rows):
        if not UNWELL.fullmatch(state):
            well += 1
            continue
        answers = " and does not answer" if state.endswith("*") else ""
        why = "Slurm gives no reason" if reason == "none" else reason
        fix = f"systemctl restart slurmd on {name}, then: scontrol update nodename={name}"
        yield Finding(
            "note", f"nodes: {name} is {state.rstrip('*')}{answers}: {why}", f"{fix} state=resume"
        )
    if well:
        yield Finding("ok", f"nodes: {plural(well, 'node')} of {len(rows)} take jobs")
    else:
        yield Finding(
            "broken", f"nodes: none of {len(rows)} takes jobs: {last_line(done)}", "sinfo"
        )


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
    rank = [sys.executable, "-c", RANK]
    ways = {
        f"srun --mpi={PMI}": ["srun", f"--mpi={PMI}", *room, *rank],
        "mpiexec in an allocation": ["salloc", *room, *launcher.mpiexec(RANKS), *rank],
    }
    # One after the other: they would take each other's room.
    for way, command in ways.items():
        done = output([*login(), *command], launcher.environment() | ACROSS_HOSTS)
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
