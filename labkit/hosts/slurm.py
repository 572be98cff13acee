"""Slurm on a testbed: configuration file, daemons, and the wait until nodes are ready."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.hosts.host_namespaces import enter_command
from labkit.hosts.requirements import PMIX, find_command, pmix_folders
from labkit.hosts.testbed_plan import CONTROL, TestbedPlan
from labkit.hosts.testbed_state import SLURM_CONF

FOLDER = "/tmp/slurm"  # folder of the Slurm daemons on each host, in the host's own /tmp
LIMIT = 45.0  # maximum seconds until all nodes are ready
POLL_INTERVAL = 0.1  # seconds

# Slurm needs no authentication by munge, because only root of this machine reaches the testbed's
# network. The settings `linuxproc` and `task/none` are necessary, because the daemons have no
# cgroups of their own. With `config_overrides`, a node may have more CPUs than the machine has
# cores.
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


def configuration(plan: TestbedPlan, addresses: Mapping[str, str]) -> str:
    """Return the text of slurm.conf, which all hosts and the login node use."""
    nodes = [
        f"NodeName={name} NodeAddr={addresses[name]} CPUs={plan.cores} State=UNKNOWN"
        for name in plan.hosts
    ]
    return _CONFIGURATION.format(
        control=CONTROL, address=addresses[CONTROL], own=FOLDER, nodes="\n".join(nodes)
    )


def pmix(folder: Path) -> list[tuple[str, str]]:
    """Return the mounts by which Slurm finds Debian's PMIx library.

    Slurm's plugin opens the file `libpmix.so`, which only the library's development package
    contains. The package libpmix2 contains only `libpmix.so.2`, so `srun --mpi=pmix` would fail
    without mounts that contain `libpmix.so`.

    Args:
        folder: New folder, to which the library's folders are copied; each copy also contains
            `libpmix.so`.

    Returns:
        Pairs of a source path and the path at which it is mounted.
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
    """The Slurm daemons of a testbed.

    Args:
        folder: Folder of the testbed, for slurm.conf and the daemons' log.
        plan: Parameters of the testbed.
        addresses: IPv4 addresses of the hosts and of the host `control`, by name.
    """

    def __init__(self, folder: Path, plan: TestbedPlan, addresses: Mapping[str, str]) -> None:
        self.configuration, self.plan = folder / SLURM_CONF, plan
        self.configuration.write_text(configuration(plan, addresses))
        self.log = folder / "slurm.log"
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self, control: int, hosts: Mapping[str, int]) -> None:
        """Start slurmctld on `control`, and slurmd on each host; all end with the testbed.

        Args:
            control: Id of a process in the namespaces of the host `control`.
            hosts: For each host name, the id of a process in the host's namespaces.
        """
        self._start(control, "slurmctld", "-D")
        for name, pid in hosts.items():
            self._start(pid, "slurmd", "-D", "-N", name)

    def _start(self, pid: int, daemon: str, *options: str) -> None:
        words = [find_command(daemon) or daemon, *options, "-f", str(self.configuration)]
        # Slurm's folders are created on the host itself, because each host has its own /tmp.
        script = f'mkdir -p {FOLDER}/state {FOLDER}/spool && exec "$@"'
        with self.log.open("ab") as log:
            self.daemons.append(
                subprocess.Popen(
                    [*enter_command(pid), "sh", "-c", script, "sh", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def wait(self) -> None:
        """Wait until all Slurm nodes are ready for jobs.

        Raises:
            LabkitError: A daemon has ended, or a node is not ready within `LIMIT` seconds; the
                message contains the last error of the log.
        """
        end = time.monotonic() + LIMIT
        while (states := self._states()) != ["idle"] * self.plan.nodes:
            ended = any(daemon.poll() is not None for daemon in self.daemons)
            if ended or time.monotonic() > end:
                raise LabkitError(
                    f"Slurm did not start: {'a daemon has ended' if ended else 'its nodes are'}"
                    f"{'' if ended else f' {states or 0} after {LIMIT:.0f} s'}: "
                    f"{self._last_error()}"
                )
            time.sleep(POLL_INTERVAL)

    def _states(self) -> list[str]:
        result = subprocess.run(
            [find_command("sinfo") or "sinfo", "--noheader", "--Node", "--format=%T"],
            env=os.environ | {"SLURM_CONF": str(self.configuration)},
            capture_output=True,
            text=True,
        )
        return result.stdout.split()

    def _last_error(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "error" in line or "fatal" in line] or lines
        return errors[-1] if errors else "its log file is empty"
