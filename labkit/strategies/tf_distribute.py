"""Training by TensorFlow's own strategies, in separate processes, on the same experiment."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveInt

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.frameworks.tf_config import LOOPBACK_ADDRESS, ClusterSpec, ServerProcesses, at_addresses
from labkit.network import Network
from labkit.strategies.external_framework import (
    TRUSTED_NETWORK,
    open_link,
    open_private_network,
    refuse_external,
    refuse_hosts,
    refuse_unlinked,
    refuse_unweighted,
    train_external,
)
from labkit.strategies.strategy import ExperimentSpec, Session, Strategy
from labkit.strategies.taxonomy import Cell
from labkit.strategies.validation import refuse_fit_options, refuse_optimizer

CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")
LOCAL = ("mirrored", "central_storage")


class TFKind(NamedTuple):
    """The labkit strategy and properties that correspond to a TensorFlow strategy.

    Attributes:
        architecture, synchronization: The strategy's names on the taxonomy axes `architecture` and
            `synchronization`.
        algorithm: The algorithm by which TensorFlow exchanges gradients when all devices are CPUs.
        ours: Name and fields of the labkit strategy that computes the same result.
        legacy: Whether `fit` of Keras 3 does not work with the TensorFlow strategy. If `legacy` is
            True, a custom loop trains the model.
    """

    architecture: str
    synchronization: str
    algorithm: str
    ours: dict[str, JSON]
    legacy: bool = False

    def by(self, algorithm: str, ours: str) -> TFKind:
        """Return a copy of this kind with other algorithms for TensorFlow and for `AllReduce`."""
        return self._replace(algorithm=algorithm, ours=self.ours | {"algorithm": ours})


RING = TFKind("collective", "synchronous", "ring", {"name": "AllReduce", "algorithm": "ring"})
AUTO = RING.by("auto (ring on processors)", "ring")
# For each value of TensorFlow's `cross_device_ops`, the dict gives labkit's equivalent of the kind
# "mirrored".
CROSS_DEVICE_KINDS = {
    "auto": AUTO,
    "reduction_to_one_device": RING.by("sum on one device, copied back", "master_worker"),
    "hierarchical_copy": RING.by("hierarchical copy (two halves, then across)", "tree"),
}
KINDS = {
    "mirrored": AUTO,
    "central_storage": TFKind(
        "parameter servers",
        "synchronous",
        "sum at the weights",
        {"name": "ParameterServer", "synchronous": True},
    ),
    "multi_worker_mirrored": RING._replace(legacy=True),
    "parameter_server": TFKind(
        "parameter servers",
        "asynchronous",
        "push and fetch by variable",
        {"name": "ParameterServer", "synchronous": False},
        legacy=True,
    ),
}


class TFDistribute(Strategy):
    r"""A `tf.distribute` strategy trains the model; labkit requests and times each step.

    The loss of each replica is multiplied by the replica's share of the rows. TensorFlow sums the
    gradients of all replicas:

    \[g = \sum_r \nabla \frac{n_r}{n} \ell_r.\]

    With parameter servers, a coordinator assigns steps to idle workers. Servers apply each gradient
    as soon as it arrives. When a gradient arrives, the server's weights may be newer than the
    worker's weights. With a single worker, training is the same as without a server. labkit
    restarts a killed worker, as a cluster manager would. TensorFlow gives the step of a killed
    worker to another worker.

    Args:
        kind: "mirrored" has replicas on logical devices of one process, each with all weights.
            "central_storage": like "mirrored", but the first device holds the weights.
            "multi_worker_mirrored": one process per worker, connected by TensorFlow's collectives
            (gRPC). "parameter_server": one process for each worker, one for each server, and one
            for the coordinator (chief).
        cross_device_ops: How "mirrored" reduces gradients. The value "auto" leaves the choice to
            TensorFlow. Further values are "reduction_to_one_device" and "hierarchical_copy" (for an
            even number of devices).
        communication: How "multi_worker_mirrored" implements collectives, which is "ring" or
            "auto".
        servers: The number of servers of "parameter_server"; variables go to the servers in turn.
        synchronous: Whether training is synchronous; the value must agree with `kind`. All
            TensorFlow strategies are synchronous except "parameter_server", which TensorFlow 2
            offers only asynchronously. If `synchronous` is None, `kind` determines the value.
        colocated: Whether servers run in the processes of the first workers.
        trusted_network: Whether TensorFlow's processes may listen on every network interface of
            this machine. The connections have no encryption and no key. If True, anyone on the
            network can read and change the training. If False, the processes run in a private
            network namespace; if that is impossible, training raises an error.

    If a network is emulated, the processes use a real link with this network's bandwidth. The real
    link connects two network namespaces, which are created for the run (on Linux, as root). Without
    servers, each end of the link has one worker. With servers, the servers and the coordinator are
    at one end, and all workers at the other end. Messages have the latency of the operating system,
    not the latency of the emulated network.

    An update by TensorFlow's servers is not atomic. Adam's update consists of several operations,
    so the operations of two workers may alternate. In one of a few short runs with Adam, the loss
    increased suddenly. Perhaps the operations of two updates by Adam alternated. SGD is not
    affected, because its update is one addition.

    Training uses a custom loop, a `tf.function` of `strategy.run`. `fit` of Keras 3 does not
    support "multi_worker_mirrored" and "parameter_server". Each run starts new processes, because
    TensorFlow must know the addresses of the cluster when it starts. The labkit rank acts as
    evaluator. After each epoch, the labkit rank receives the weights, and validates them outside
    the cluster. In TensorFlow itself, a process with the task "evaluator" reads checkpoints during
    training. The command `labkit tf-config --evaluator` configures an evaluator process for a
    script.

    Keras clips each replica's gradient before TensorFlow sums the gradients. The loss of each
    replica is multiplied by its share of rows. With several synchronous replicas, labkit raises an
    error for `clipnorm` and similar options, summed losses, and masked outputs. With a single
    worker, `clipnorm` and similar options, summed losses, and masked outputs are allowed. Parameter
    servers also allow clipping options, summed losses and masked outputs, because servers apply
    gradients one by one.

    Source: M. Abadi et al., TensorFlow, 2016, arXiv 1605.08695; www.tensorflow.org, Distributed
    training with TensorFlow.
    """

    architecture: ClassVar[tuple[str, ...]] = ("collective", "parameter servers")
    synchronization: ClassVar[tuple[str, ...]] = ("synchronous", "asynchronous")
    paper: ClassVar[str] = "Abadi 2016, arXiv 1605.08695"
    no_forecast_reason: ClassVar[str] = (
        "executes its steps in TensorFlow, which reports no times for the parts of a step"
    )
    emulated: ClassVar[bool] = False

    kind: Literal["mirrored", "central_storage", "multi_worker_mirrored", "parameter_server"] = (
        Field("multi_worker_mirrored", kw_only=False)
    )
    cross_device_ops: Literal["auto", "reduction_to_one_device", "hierarchical_copy"] = "auto"
    communication: Literal["ring", "auto"] = "ring"
    servers: PositiveInt = Field(1, le=100)
    synchronous: bool | None = None
    colocated: bool = False
    trusted_network: bool = TRUSTED_NETWORK

    @property
    def equivalent(self) -> TFKind:
        """The labkit equivalent of `kind`, given the values of the other fields."""
        kind = (
            CROSS_DEVICE_KINDS[self.cross_device_ops]
            if self.kind == "mirrored"
            else KINDS[self.kind]
        )
        if self.communication == "auto":
            kind = kind._replace(algorithm=AUTO.algorithm)
        if kind.ours["name"] == "ParameterServer":
            kind = kind._replace(ours=kind.ours | {"servers": self.servers})
        return kind

    @classmethod
    def supports(cls, cell: Cell) -> bool:
        """Return whether a value of `kind` has the architecture and synchronization of `cell`."""
        kinds = {(each.architecture, each.synchronization) for each in KINDS.values()}
        return (cell.architecture, cell.synchronization) in kinds

    def cell(self, workers: int) -> Cell:
        """Return the place in the taxonomy; architecture and synchronization depend on `kind`."""
        kind = self.equivalent
        places = {"architecture": kind.architecture, "synchronization": kind.synchronization}
        return super().cell(workers)._replace(**places)

    @property
    def exact(self) -> bool:
        """Whether updates are synchronous, and therefore exact, because nothing is compressed."""
        return self.kind != "parameter_server"

    def is_exact_in(self, experiment: ExperimentSpec) -> bool:
        """Return whether updates are synchronous, or a single worker trains."""
        return self.exact or experiment.workers == 1

    def extra_ranks(self, workers: int) -> int:
        """Return the number of extra ranks, negative if one rank stands for all workers."""
        return 0 if self.kind == "multi_worker_mirrored" else 1 - workers

    def processes(self, workers: int) -> int:
        """Return the number of replicas, plus the servers and the coordinator if they exist."""
        if self.kind != "parameter_server":
            return workers
        return workers + 1 + (0 if self.colocated else self.servers)

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the largest number of rows of a batch that one replica processes."""
        return -(-batch_size // workers)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for options that are not supported, before any rank starts."""
        self._check_fields()
        refuse_fit_options(experiment.optimizer_options)
        self._check_clipping(experiment.workers, experiment.optimizer_options)
        if experiment.precision == "mixed_float16":
            raise InvalidInput(
                "precision='mixed_float16' needs a scaled loss, which TFDistribute's loop "
                "does not have; use precision='mixed_bfloat16', 'float32' or 'float64'"
            )
        refuse_external("TFDistribute", experiment, linked=self.kind not in LOCAL)
        if (network := Network.parse(experiment.network)) is not None:
            self._check_link(experiment.workers)
            refuse_unlinked(network)
        if experiment.batch_weights is not None and self.kind != "multi_worker_mirrored":
            raise InvalidInput(
                "batch_weights are supported with kind='multi_worker_mirrored', not with "
                f"{self.kind!r}; remove them"
            )
        if self.cross_device_ops == "hierarchical_copy" and experiment.workers % 2:
            raise InvalidInput(
                "TensorFlow's hierarchical_copy sums two halves of the devices, and omits the "
                f"last device of an odd number such as workers={experiment.workers}; give an "
                "even number"
            )

    def _check_clipping(self, workers: int, options: Mapping[str, JSON]) -> None:
        """Raise InvalidInput for options that clip a replica's gradient before the sum."""
        clipping = [name for name in CLIPPING if options.get(name) is not None]
        if clipping and self.exact and workers > 1:
            raise InvalidInput(
                f"{clipping[0]}={options[clipping[0]]}: within TensorFlow's strategies Keras clips "
                "the gradient of each replica before the sum, which differs from clipping the "
                f"sum; remove {clipping[0]}"
            )

    def _check_link(self, workers: int) -> None:
        """Raise InvalidInput if the processes cannot be placed at the two ends of a link."""
        if self.colocated:
            raise InvalidInput(
                "colocated=True does not support a network, because the servers are at one end of "
                "the real link and the workers at the other; remove colocated"
            )
        if self.kind == "multi_worker_mirrored" and workers != 2:
            raise InvalidInput(
                f"workers={workers} with a network is impossible, because a real link has two "
                "ends; give workers=2"
            )

    def _check_fields(self) -> None:
        requirements = {
            "cross_device_ops": ("mirrored", self.cross_device_ops != "auto"),
            "communication": ("multi_worker_mirrored", self.communication != "ring"),
            "servers": ("parameter_server", self.servers != 1),
            "colocated": ("parameter_server", self.colocated),
        }
        for field, (kind, is_set) in requirements.items():
            if is_set and self.kind != kind:
                raise InvalidInput(
                    f"{field}={getattr(self, field)!r} applies to kind={kind!r}, not to "
                    f"{self.kind!r}; remove it"
                )
        servers = self.kind == "parameter_server"
        if self.synchronous is not None and self.synchronous == servers:
            synchronization, value = (
                ("asynchronous", "True") if servers else ("synchronous", "False")
            )
            raise InvalidInput(
                f"synchronous={self.synchronous}: TensorFlow 2 has only {synchronization} "
                f"training with {self.kind}; remove synchronous, or use labkit's "
                f"ParameterServer(synchronous={value})"
            )

    def train(self, session: Session) -> None:
        """Train by asking TensorFlow's processes to execute steps."""
        communicator = session.communicator
        refuse_hosts(
            "TFDistribute",
            communicator,
            "for several hosts, write a script that uses the configuration of `labkit tf-config`",
        )
        optimizer = session.optimizer()
        refuse_optimizer(optimizer)
        # The optimizer may come from a compiled model, and its clipping options may differ from the
        # experiment's options.
        clipping = {name: getattr(optimizer, name, None) for name in CLIPPING}
        self._check_clipping(session.experiment.workers, clipping)
        session.compile(optimizer)
        if self.exact and session.experiment.workers > 1:
            refuse_unweighted(session.model)
        job, rank = "chief" if self.kind == "parameter_server" else "worker", communicator.rank
        with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="labkit-tf-") as folder:
            prefixes = open_link(session, stack)
            if not prefixes and self.kind not in LOCAL:
                prefix = open_private_network(
                    session, stack, "TensorFlow's servers", self.trusted_network
                )
                prefixes = {LOOPBACK_ADDRESS: prefix}
            new_spec = self._spec(session.experiment.workers, *prefixes) if rank == 0 else None
            spec = communicator.broadcast_object(
                new_spec, label="the cluster of TensorFlow's processes"
            )
            config = spec.task_config(job, rank) if spec.jobs else None
            servers = ServerProcesses(spec, communicator, session.experiment.threads, prefixes)
            stack.callback(servers.close)
            if job == "chief":
                servers.start()
            prefix = prefixes[spec.host(job, rank)] if prefixes else ()
            child = session.tensorflow_process(f"{job} {rank}", config, folder, prefix)
            stack.callback(child.close)
            child.answer(while_waiting=servers.restart_ended)
            networks = list(prefixes.values())
            traffic = train_external(session, child, servers.tasks, servers.restart_ended, networks)
            session.exchanged = {
                "algorithm": child.ask("describe"),
                "tf_config": [
                    spec.task_config(*task) for tasks in spec.processes() for task in tasks
                ],
                **traffic,
                "started_anew": servers.restarted,
            }

    def _spec(
        self, workers: int, here: str = LOOPBACK_ADDRESS, there: str = LOOPBACK_ADDRESS
    ) -> ClusterSpec:
        """Return TensorFlow's cluster specification, with the addresses `here` and `there`."""
        if self.kind == "parameter_server":
            jobs = {"chief": [here], "worker": [there] * workers, "ps": [here] * self.servers}
            return at_addresses(jobs, self.colocated)
        ends = [here, there] if here != there else [here] * workers
        return at_addresses({} if self.kind in LOCAL else {"worker": ends})
