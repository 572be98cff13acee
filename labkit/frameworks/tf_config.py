"""The tasks of a TensorFlow cluster: their addresses in TF_CONFIG, and the server processes.

A rank starts each TensorFlow server as a process that runs this module.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from socket import socket
from types import MappingProxyType
from typing import TYPE_CHECKING

from labkit.common import names
from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.frameworks.child import Child, serve

if TYPE_CHECKING:
    from labkit.communicator import Communicator

LOOPBACK_ADDRESS = "127.0.0.1"
PORT = 2222  # Port 2222 is the default port in TensorFlow's documentation.
MOST_RESTARTS = 5  # The maximum number of restarts applies to each worker separately.


@dataclass
class ClusterSpec:
    """The tasks of a TensorFlow cluster, by job.

    Attributes:
        jobs: Addresses (host:port) of the tasks of each job: "chief", "worker", "ps", "evaluator".
        inside: True if parameter servers run in the processes of workers. The servers of a host are
            distributed over its workers in turn.
    """

    jobs: dict[str, list[str]] = field(default_factory=dict)
    inside: bool = False

    def add(self, job: str, address: str) -> None:
        """Add a task with the address `address` to a job."""
        self.jobs.setdefault(job, []).append(address)

    def host(self, job: str, index: int) -> str:
        """Return the host name or address of a task."""
        return self.jobs[job][index].rpartition(":")[0]

    def task_config(self, job: str, index: int) -> dict[str, JSON]:
        """Return the content of TF_CONFIG for a task."""
        cluster: dict[str, JSON] = {job: list(addresses) for job, addresses in self.jobs.items()}
        return {"cluster": cluster, "task": {"type": job, "index": index}}

    def processes(self) -> list[list[tuple[str, int]]]:
        """Return the tasks of each process, as (job, index)."""
        processes = [
            [(job, index)]
            for job, addresses in self.jobs.items()
            for index in range(len(addresses))
            if not (self.inside and job == "ps")
        ]
        for tasks in processes if self.inside else ():
            job, index = tasks[0]
            if job == "worker":
                host = self.host(job, index)
                local_servers, local_workers = self._on(host, "ps"), self._on(host, "worker")
                tasks += [
                    ("ps", server)
                    for server in local_servers[local_workers.index(index) :: len(local_workers)]
                ]
        return processes

    def _on(self, host: str, job: str) -> list[int]:
        """Return the indices of a job's tasks whose address is on a host."""
        return [k for k in range(len(self.jobs.get(job, ()))) if self.host(job, k) == host]


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback address that no process uses now."""
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket()) for _ in range(count)]
        for bound_socket in sockets:
            bound_socket.bind(("127.0.0.1", 0))
        # All sockets stay open until all ports are chosen, so that no port is returned twice.
        return [bound_socket.getsockname()[1] for bound_socket in sockets]


def on_this_host(jobs: Mapping[str, int], inside: bool = False) -> ClusterSpec:
    """Return a cluster with the given numbers of tasks per job, at free ports of this host."""
    return at_addresses({job: [LOOPBACK_ADDRESS] * count for job, count in jobs.items()}, inside)


def at_addresses(jobs: Mapping[str, Sequence[str]], inside: bool = False) -> ClusterSpec:
    """Return a cluster with one task per given address of this machine, each at a free port."""
    ports = iter(free_ports(sum(map(len, jobs.values()))))
    placed = {job: [f"{host}:{next(ports)}" for host in hosts] for job, hosts in jobs.items()}
    return ClusterSpec({job: addresses for job, addresses in placed.items() if addresses}, inside)


def on_hosts(
    hosts: Sequence[str],
    workers: int = 1,
    servers: int = 0,
    inside: bool = False,
    evaluator: bool = False,
    port: int = PORT,
) -> ClusterSpec:
    """Return a cluster with tasks on each node; with servers, the first node also has the chief.

    Args:
        hosts: Names or addresses of the nodes.
        workers, servers: Numbers of workers and of parameter servers per node; default: 1 and 0.
        inside: True if parameter servers run in the processes of workers; default: False.
        evaluator: True if the last node also runs an evaluator; default: False.
        port: Port of the first task on each node, followed by the ports of the node's other tasks;
            default: 2222.

    Raises:
        InvalidInput: A host name is invalid or repeated, or with `inside`, a node has more servers
            than workers.
    """
    hosts = [names.HOST.validate(host, "hosts") for host in hosts]
    if repeated := {host for host in hosts if hosts.count(host) > 1}:
        raise InvalidInput(
            f"hosts {', '.join(sorted(repeated))} are given twice; give each host once"
        )
    if inside and servers > workers:
        raise InvalidInput(
            f"servers={servers} exceed workers={workers} of a node, on which they run; give "
            "at most as many servers as workers"
        )
    spec = ClusterSpec(inside=inside)
    for number, host in enumerate(hosts):
        jobs = ["chief"] * (number == 0 and servers > 0) + ["worker"] * workers + ["ps"] * servers
        jobs += ["evaluator"] * (evaluator and number == len(hosts) - 1)
        for offset, job in enumerate(jobs):
            spec.add(job, f"{host}:{port + offset}")
    return spec


def slurm_hosts() -> list[str]:
    """Return the host names of the Slurm step or job in which this process runs.

    Raises:
        InvalidInput: This process does not run in a Slurm job.
        LabkitError: The command scontrol, which expands host lists, is missing or fails.
    """
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise InvalidInput(
            "--slurm works only in a Slurm job, but SLURM_JOB_NODELIST is not set; run the command "
            "in a batch script, or give the hosts"
        )
    try:
        completed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabkitError(f"scontrol cannot expand {nodes}: {error}") from error
    if completed.returncode or not completed.stdout.split():
        raise LabkitError(f"scontrol cannot expand {nodes}: {completed.stderr.strip()}")
    return completed.stdout.split()


def processes_of_this_task(spec: ClusterSpec) -> list[list[tuple[str, int]]]:
    """Return the TensorFlow tasks of this process in a Slurm step, else those of all processes.

    Raises:
        InvalidInput: The Slurm step does not have one Slurm task per process on each host.
    """
    processes, variables = spec.processes(), os.environ
    # The function tests SLURM_STEP_NODELIST, which `srun` sets, because batch scripts also have a
    # task number.
    if "SLURM_STEP_NODELIST" not in variables:
        return processes
    host, local_index = variables["SLURMD_NODENAME"], int(variables["SLURM_LOCALID"])
    local_processes = [tasks for tasks in processes if spec.host(*tasks[0]) == host]
    if local_index >= len(local_processes) or int(variables["SLURM_STEP_NUM_TASKS"]) != len(
        processes
    ):
        raise InvalidInput(
            f"srun started {variables['SLURM_STEP_NUM_TASKS']} tasks, but TF_CONFIG has "
            f"{len(processes)} processes, {len(local_processes)} of them on {host}; change "
            "srun --ntasks-per-node or --workers, so that these numbers are equal"
        )
    return [local_processes[local_index]]


def export_commands(
    processes: list[list[tuple[str, int]]], spec: ClusterSpec
) -> list[tuple[str, str]]:
    """Return one pair per process: a title (host, tasks), and the shell command for TF_CONFIG."""
    commands = []
    for tasks in processes:
        job, index = tasks[0]
        task_names = " and ".join(f"{job} {index}" for job, index in tasks)
        commands.append(
            (
                f"{spec.host(job, index)}: {task_names}",
                f"export TF_CONFIG={shlex.quote(json.dumps(spec.task_config(job, index)))}",
            )
        )
    return commands


class ServerProcesses:
    """The processes of the workers and parameter servers that TensorFlow's coordinator uses.

    Args:
        spec: All tasks of the cluster; the chief's task gets no process.
        communicator: Communicator of the run's ranks.
        threads: Number of compute threads of each process.
        inside: Command prefix for the processes on each host, as a mapping from host to prefix;
            default: none.

    Attributes:
        restarted: Names of processes that were restarted after an early end. The name of a process
            is the name of its first task.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        communicator: Communicator,
        threads: int,
        inside: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self._spec, self._given, self._inside = spec, (communicator, threads), inside
        self._children: dict[str, Child] = {}
        self.restarted: list[JSON] = []

    def start(self) -> None:
        """Start the processes of all tasks except the chief."""
        for tasks in self._spec.processes():
            if tasks[0][0] != "chief":
                self._start(tasks)

    def tasks(self) -> dict[str, int]:
        """Return the process number (PID) of each task by the task's name, such as "worker 1"."""
        return {
            f"{job} {index}": child.pid
            for name, child in self._children.items()
            for job, index in self._named(name)
        }

    def restart_ended(self) -> None:
        """Restart worker processes that have ended, as a cluster manager would.

        Raises:
            LabkitError: A parameter server has ended, which loses its weights, or a worker has
                ended too often.
        """
        for name, child in list(self._children.items()):
            if not child.ended:
                continue
            tasks = self._named(name)
            lost_servers = [f"{job} {index}" for job, index in tasks if job == "ps"]
            if lost_servers or self.restarted.count(name) == MOST_RESTARTS:
                what = (
                    f", so the weights of {lost_servers[0]} are lost"
                    if lost_servers
                    else " too often"
                )
                raise LabkitError(f"{name} ended early{what}: {child.last_output()}")
            child.close()
            self.restarted.append(name)
            self._start(tasks)

    def close(self) -> None:
        """End all processes."""
        while self._children:
            self._children.popitem()[1].close()

    def _start(self, tasks: list[tuple[str, int]]) -> None:
        name = "{} {}".format(*tasks[0])
        configs = [self._spec.task_config(job, index) for job, index in tasks]
        prefix = self._inside.get(self._spec.host(*tasks[0]), ())
        self._children[name] = Child(__name__, name, configs, *self._given, inside=prefix)

    def _named(self, name: str) -> list[tuple[str, int]]:
        """Return all tasks of the process `name`; a process has the name of its first task."""
        processes = {"{} {}".format(*tasks[0]): tasks for tasks in self._spec.processes()}
        return processes[name]


def start(configs: list[dict[str, JSON]]) -> Mapping[str, Callable[..., object]]:
    """Start one TensorFlow server per task of this process; the servers end with the process."""
    import tensorflow as tf

    servers = []
    for config in configs:
        os.environ["TF_CONFIG"] = json.dumps(config)
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        server_options = (resolver.cluster_spec(), resolver.task_type, resolver.task_id)
        servers.append(tf.distribute.Server(*server_options, protocol="grpc"))
    # The returned function keeps references to the servers, so that Python does not delete the
    # servers.
    return {"targets": lambda: [server.target for server in servers]}


if __name__ == "__main__":
    serve(start)
