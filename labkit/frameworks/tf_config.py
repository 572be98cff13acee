"""TF_CONFIG: how TensorFlow's processes are told who else there is."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from socket import socket

from labkit.common import names
from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError

HERE = "127.0.0.1"
PORT = 2222  # as TensorFlow's documentation has it


@dataclass
class ClusterSpec:
    """Who takes part, by their jobs.

    Attributes:
        jobs: the addresses of the tasks of "chief", "worker", "ps" and "evaluator".
        inside: servers live in the processes of the workers of their host, in turn.
    """

    jobs: dict[str, list[str]] = field(default_factory=dict)
    inside: bool = False

    def add(self, job: str, address: str) -> None:
        """One more task of a job."""
        self.jobs.setdefault(job, []).append(address)

    def host(self, job: str, index: int) -> str:
        """The name or address of the host of a task."""
        return self.jobs[job][index].rpartition(":")[0]

    def of(self, job: str, index: int) -> dict[str, JSON]:
        """TF_CONFIG of one task."""
        cluster: dict[str, JSON] = {job: list(each) for job, each in self.jobs.items()}
        return {"cluster": cluster, "task": {"type": job, "index": index}}

    def processes(self) -> list[list[tuple[str, int]]]:
        """The tasks of each process."""
        found = [
            [(job, index)]
            for job, addresses in self.jobs.items()
            for index in range(len(addresses))
            if not (self.inside and job == "ps")
        ]
        for tasks in found if self.inside else ():
            job, index = tasks[0]
            if job == "worker":
                host = self.host(job, index)
                own, others = self._on(host, "ps"), self._on(host, "worker")
                tasks += [("ps", server) for server in own[others.index(index) :: len(others)]]
        return found

    def _on(self, host: str, job: str) -> list[int]:
        """The tasks of a job on a host."""
        return [k for k in range(len(self.jobs.get(job, ()))) if self.host(job, k) == host]


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody uses now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        # All are held until the last is found, or one port would be found twice.
        return [each.getsockname()[1] for each in sockets]


def on_this_host(jobs: Mapping[str, int], inside: bool = False) -> ClusterSpec:
    """So many tasks of each job, at free ports of the loopback address."""
    return at({job: [HERE] * count for job, count in jobs.items()}, inside)


def at(jobs: Mapping[str, Sequence[str]], inside: bool = False) -> ClusterSpec:
    """Tasks of each job at these addresses of this machine, at ports that are free."""
    ports = iter(free_ports(sum(map(len, jobs.values()))))
    placed = {job: [f"{host}:{next(ports)}" for host in hosts] for job, hosts in jobs.items()}
    return ClusterSpec({job: each for job, each in placed.items() if each}, inside)


def on_hosts(
    hosts: Sequence[str],
    workers: int = 1,
    servers: int = 0,
    inside: bool = False,
    evaluator: bool = False,
    port: int = PORT,
) -> ClusterSpec:
    """The tasks of a cluster, node by node; with servers its first host has the chief, too.

    Args:
        hosts: names or addresses of the nodes.
        workers, servers: of each node.
        inside: servers live in the processes of the workers.
        evaluator: the last node has one.
        port: of the first task of a node; others have the next ones.

    Raises:
        InvalidInput: a host has no name, or is named twice, or no worker is left.
    """
    hosts = [names.HOST.check(host, "hosts") for host in hosts]
    if twice := {host for host in hosts if hosts.count(host) > 1}:
        raise InvalidInput(f"hosts {', '.join(sorted(twice))} are named twice; name each once")
    if inside and servers > workers:
        raise InvalidInput(
            f"servers={servers} do not fit inside workers={workers} of a node; give at most as many"
        )
    spec = ClusterSpec(inside=inside)
    for number, host in enumerate(hosts):
        jobs = ["chief"] * (number == 0 and servers > 0) + ["worker"] * workers + ["ps"] * servers
        jobs += ["evaluator"] * (evaluator and number == len(hosts) - 1)
        for place, job in enumerate(jobs):
            spec.add(job, f"{host}:{port + place}")
    return spec


def slurm_hosts() -> list[str]:
    """The names of the hosts of the step, or of the job, of Slurm's in which this process runs.

    Raises:
        InvalidInput: it runs in none.
        LabkitError: Slurm's command that reads such a list is not there, or fails.
    """
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise InvalidInput(
            "--slurm belongs in a job of Slurm's, and this is none (no SLURM_JOB_NODELIST): call "
            "it in a batch script, or name the hosts"
        )
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabkitError(f"scontrol does not read {nodes}: {error}") from error
    if done.returncode or not done.stdout.split():
        raise LabkitError(f"scontrol does not read {nodes}: {done.stderr.strip()}")
    return done.stdout.split()


def of_this_task(spec: ClusterSpec) -> list[list[tuple[str, int]]]:
    """The process that this task of a step of Slurm's is; outside of steps, all of them.

    Raises:
        InvalidInput: the step has not one task for each process, host by host.
    """
    every, known = spec.processes(), os.environ
    if "SLURM_STEP_NODELIST" not in known:  # in a batch script, which is a task 0, too
        return every
    host, place = known["SLURMD_NODENAME"], int(known["SLURM_LOCALID"])
    own = [tasks for tasks in every if spec.host(*tasks[0]) == host]
    if place >= len(own) or int(known["SLURM_STEP_NUM_TASKS"]) != len(every):
        raise InvalidInput(
            f"srun started {known['SLURM_STEP_NUM_TASKS']} tasks, and TF_CONFIG is asked for "
            f"{len(every)}, {len(own)} of them on {host}; give srun --ntasks-per-node, or give "
            "--workers, so that each has its own"
        )
    return [own[place]]


def lines(processes: list[list[tuple[str, int]]], spec: ClusterSpec) -> list[tuple[str, str]]:
    """Of each of these processes: its host and tasks, and what a shell there is to be told."""
    found = []
    for tasks in processes:
        job, index = tasks[0]
        each = " and ".join(f"{job} {index}" for job, index in tasks)
        found.append(
            (
                f"{spec.host(job, index)}: {each}",
                f"export TF_CONFIG={shlex.quote(json.dumps(spec.of(job, index)))}",
            )
        )
    return found
