"""Processes that a rank starts for TensorFlow's servers, and the code that these processes run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.frameworks.child import Child, serve

if TYPE_CHECKING:
    from labkit.communicator import Communicator
    from labkit.frameworks.tf_config import ClusterSpec

MOST_RESTARTS = 5  # maximum number of restarts of one worker


class ServerProcesses:
    """The processes of the workers and parameter servers that TensorFlow's coordinator uses.

    Args:
        spec: All tasks of the cluster; the chief's process is not started here.
        communicator: Communicator of the run's ranks.
        threads: Number of compute threads of each process.
        inside: Command prefix of a process, by the host of the process's address; default: none.

    Attributes:
        restarted: Names of processes that were restarted after an early end; a process has the name
            of its first task.
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
    # The returned function refers to the servers, so that Python does not delete them.
    return {"targets": lambda: [server.target for server in servers]}


if __name__ == "__main__":
    serve(start)
