"""Slurm on a testbed: its configuration, its daemons, and whether its nodes are ready."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.hosts.host_namespaces import entering
from labkit.hosts.plan import CONTROL, Plan
from labkit.hosts.requirements import PMIX, found, pmix_folders
from labkit.hosts.state import SLURM_CONF

OWN = "/tmp/slurm"  # of each host: each has a /tmp of its own
LIMIT = 45.0  # seconds until all nodes must have come up
LOOK_EVERY = 0.1  # seconds

# No munge: nobody but root of this machine reaches the network of a testbed. `linuxproc` and
# `task/none`: the daemons are in no control groups of their own. `config_overrides`: a node may
# have more CPUs than the machine has cores.
_CONFIGURATION = """\
ClusterName=labkit
SlurmctldHost={control}({address})
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={own}/state
SlurmdSpoolDir={own}/spool
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd.pid
TmpFS=/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def configuration(plan: Plan, addresses: Mapping[str, str]) -> str:
    """The text of slurm.conf, the same for all hosts and for the login."""
    nodes = [
        f"NodeName={name} NodeAddr={addresses[name]} CPUs={plan.cores} State=UNKNOWN"
        for name in plan.hosts
    ]
    return _CONFIGURATION.format(
        control=CONTROL, address=addresses[CONTROL], own=OWN, nodes="\n".join(nodes)
    )


def pmix(folder: Path) -> list[tuple[str, str]]:
    """What has to stand in the place of what, so that Slurm finds Debian's PMIx.

    Its plugin opens `libpmix.so`, which only the package for developers brings: libpmix2 has
    `libpmix.so.2` alone, and without a file of the other name `srun --mpi=pmix` ends.

    Args:
        folder: to be made, with what stands there.
    """
    binds = []
    for number, place in enumerate(pmix_folders()):
        if not (place / "libpmix.so").exists():
            copy = folder / str(number)
            shutil.copytree(place, copy, symlinks=True)
            (copy / "libpmix.so").symlink_to(PMIX)
            binds.append((str(copy), str(place)))
    return binds


class Slurm:
    """Its daemons on a testbed.

    Args:
        folder: the testbed's; slurm.conf is written there, and what the daemons say.
        plan: of the testbed.
        addresses: of hosts and control.
    """

    def __init__(self, folder: Path, plan: Plan, addresses: Mapping[str, str]) -> None:
        self.configuration, self.plan = folder / SLURM_CONF, plan
        self.configuration.write_text(configuration(plan, addresses))
        self.log = folder / "slurm.log"
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self, control: int, hosts: Mapping[str, int]) -> None:
        """Start one slurmctld and a slurmd on each host; they end with the testbed.

        Args: a process in the namespaces of each.
        """
        self._start(control, "slurmctld", "-D")
        for name, pid in hosts.items():
            self._start(pid, "slurmd", "-D", "-N", name)

    def _start(self, pid: int, daemon: str, *options: str) -> None:
        words = [found(daemon) or daemon, *options, "-f", str(self.configuration)]
        # Its folders lie in a /tmp that only this host sees.
        made = f'mkdir -p {OWN}/state {OWN}/spool && exec "$@"'
        with self.log.open("ab") as log:
            self.daemons.append(
                subprocess.Popen(
                    [*entering(pid), "sh", "-c", made, "sh", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def wait(self) -> None:
        """Wait until all nodes are ready for jobs. Raises: LabkitError, with what Slurm said."""
        end = time.monotonic() + LIMIT
        while (states := self._states()) != ["idle"] * self.plan.nodes:
            ended = any(daemon.poll() is not None for daemon in self.daemons)
            if ended or time.monotonic() > end:
                raise LabkitError(
                    f"Slurm did not start: {'a daemon has ended' if ended else 'its nodes are'}"
                    f"{'' if ended else f' {states or 0} after {LIMIT:.0f} s'}: {self._said()}"
                )
            time.sleep(LOOK_EVERY)

    def _states(self) -> list[str]:
        done = subprocess.run(
            [found("sinfo") or "sinfo", "--noheader", "--Node", "--format=%T"],
            env=os.environ | {"SLURM_CONF": str(self.configuration)},
            capture_output=True,
            text=True,
        )
        return done.stdout.split()

    def _said(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        told = [line for line in lines if "error" in line or "fatal" in line] or lines
        return told[-1] if told else "it said nothing"
