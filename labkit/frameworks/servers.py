"""Processes with TensorFlow's own servers: those that a rank starts, and what runs in each."""

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

MOST_ANEW = 5  # that a worker ends so often is no accident


class Servers:
    """The processes of the workers and the servers to which a coordinator gives work.

    Args:
        spec: all tasks; that of the chief is not started here.
        communicator: the ranks of the run.
        threads: of each process.
        inside: words before the command of a process, by the host of its address.

    Attributes:
        anew: the tasks of processes that have ended before, and were started anew.
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
        self.anew: list[JSON] = []

    def start(self) -> None:
        """Start all of them."""
        for tasks in self._spec.processes():
            if tasks[0][0] != "chief":
                self._start(tasks)

    def tasks(self) -> dict[str, int]:
        """The process of each task."""
        return {
            f"{job} {index}": child.pid
            for name, child in self._children.items()
            for job, index in self._named(name)
        }

    def mend(self) -> None:
        """Start a worker anew that has ended, as a manager of clusters would.

        Raises:
            LabkitError: a server has ended, and weights with it; or the same worker too often.
        """
        for name, child in list(self._children.items()):
            if not child.ended:
                continue
            tasks = self._named(name)
            lost = [f"{job} {index}" for job, index in tasks if job == "ps"]
            if lost or self.anew.count(name) == MOST_ANEW:
                what = f", and the weights of {lost[0]} with it" if lost else " again and again"
                raise LabkitError(f"{name} ended early{what}: {child.last_words()}")
            child.close()
            self.anew.append(name)
            self._start(tasks)

    def close(self) -> None:
        """End all of them."""
        while self._children:
            self._children.popitem()[1].close()

    def _start(self, tasks: list[tuple[str, int]]) -> None:
        name = "{} {}".format(*tasks[0])
        configs = [self._spec.of(job, index) for job, index in tasks]
        words = self._inside.get(self._spec.host(*tasks[0]), ())
        self._children[name] = Child(__name__, name, configs, *self._given, inside=words)

    def _named(self, name: str) -> list[tuple[str, int]]:
        """The tasks of a process."""
        each = {"{} {}".format(*tasks[0]): tasks for tasks in self._spec.processes()}
        return each[name]


def start(configs: list[dict[str, JSON]]) -> Mapping[str, Callable[..., object]]:
    """In such a process: start a server for each task; they live as long as the process does."""
    import tensorflow as tf

    servers = []
    for config in configs:
        os.environ["TF_CONFIG"] = json.dumps(config)
        found = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        who = (found.cluster_spec(), found.task_type, found.task_id)
        servers.append(tf.distribute.Server(*who, protocol="grpc"))
    return {"targets": lambda: [server.target for server in servers]}  # which holds them


if __name__ == "__main__":
    serve(start)
