"""TensorFlow's own strategies, in processes of their own, on the same experiment."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveInt

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.frameworks.servers import Servers
from labkit.frameworks.tf_config import HERE, ClusterSpec, at
from labkit.network import Network
from labkit.strategies.external_process import (
    TRUSTED,
    enclosed,
    linked,
    refuse_elsewhere,
    refuse_hosts,
    refuse_unlinked,
    refuse_unweighted,
    train_elsewhere,
)
from labkit.strategies.strategy import ExperimentSpec, Session, Strategy
from labkit.strategies.taxonomy import Cell
from labkit.strategies.validation import refuse_around, refuse_given

CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")
LOCAL = ("mirrored", "central_storage")


class Kind(NamedTuple):
    """Where a strategy of TensorFlow's stands among labkit's.

    Attributes:
        architecture, synchronization: as of every strategy.
        algorithm: by which gradients meet where all devices are processors.
        ours: the strategy of labkit's that does the same.
        legacy: whether Keras 3's `fit` does not carry it, and a loop of one's own is needed.
    """

    architecture: str
    synchronization: str
    algorithm: str
    ours: dict[str, JSON]
    legacy: bool = False

    def by(self, algorithm: str, ours: str) -> Kind:
        """The same, whose gradients meet by another algorithm, and by one of `AllReduce`'s."""
        return self._replace(algorithm=algorithm, ours=self.ours | {"algorithm": ours})


RING = Kind("collective", "synchronous", "ring", {"name": "AllReduce", "algorithm": "ring"})
AUTO = RING.by("auto (ring on processors)", "ring")
# By `cross_device_ops` of "mirrored".
WAYS = {
    "auto": AUTO,
    "reduction_to_one_device": RING.by("sum on one device, copied back", "master_worker"),
    "hierarchical_copy": RING.by("hierarchical copy (two halves, then across)", "tree"),
}
KINDS = {
    "mirrored": AUTO,
    "central_storage": Kind(
        "parameter servers",
        "synchronous",
        "sum at the weights",
        {"name": "ParameterServer", "synchronous": True},
    ),
    "multi_worker_mirrored": RING._replace(legacy=True),
    "parameter_server": Kind(
        "parameter servers",
        "asynchronous",
        "push and fetch by variable",
        {"name": "ParameterServer", "synchronous": False},
        legacy=True,
    ),
}


class TFDistribute(Strategy):
    r"""A strategy of `tf.distribute` trains the model; labkit asks it for steps, and measures them.

    Each replica's loss is weighted by its rows, and TensorFlow sums gradients over replicas:

    \[g = \sum_r \nabla \frac{n_r}{n} \ell_r.\]

    With servers a coordinator hands steps to whichever worker is free, and servers apply each
    gradient when it comes, to weights that may be younger than those that it is of; one worker
    alone trains as without a server. A worker that is killed is started anew, as a manager of
    clusters would; TensorFlow gives its step to another one.

    Args:
        kind: "mirrored": replicas on logical devices of one process, all with all weights;
            "central_storage": likewise, with the weights at the first device;
            "multi_worker_mirrored": a process a worker, joined by TensorFlow's collectives (gRPC);
            "parameter_server": a process a worker, a server, and one for the coordinator (chief).
        cross_device_ops: how "mirrored" sums: "auto" leaves it to TensorFlow,
            "reduction_to_one_device", "hierarchical_copy" (over an even number of devices).
        communication: of "multi_worker_mirrored": "ring", or "auto".
        servers: of "parameter_server"; variables go round among them.
        synchronous: all but "parameter_server", which has no synchronous form in TensorFlow 2;
            None: as the kind is.
        colocated: servers live in the processes of the first workers.
        trusted_network: TensorFlow's servers may listen on every interface of this machine,
            unencrypted and without a key, so that whoever reaches it may read and change what is
            trained. Otherwise they have a network namespace to themselves, or training is refused.

    With a network the processes talk over a real link of its bandwidth, between two namespaces that
    are made for the run (Linux, as root): a worker at each end, or servers and the coordinator at
    one and all workers at the other. Its latency is the kernel's own, not the network's.

    An update of TensorFlow's servers is not one operation: Adam's are several, which of two workers
    can mix. In one of a few short runs with Adam the loss has jumped, perhaps for that reason; SGD
    only adds.

    Training is a custom loop, a `tf.function` of `strategy.run`, as Keras 3's `fit` does not carry
    "multi_worker_mirrored" and "parameter_server". Processes are fresh, as TensorFlow wants to know
    its cluster before it starts. The rank is the evaluator: after each epoch it takes the weights,
    and validates outside of the cluster, where a process of the task "evaluator" would stand, which
    reads checkpoints beside the training (`labkit tf-config --evaluator` gives a script one).

    Keras clips a replica's gradient before TensorFlow adds them up, and losses of replicas are
    weighted by rows: `clipnorm` and its kin, losses that are sums, and outputs with masks are
    refused, but of one worker and of servers, which take each gradient alone.

    Source: M. Abadi et al., TensorFlow, 2016, arXiv 1605.08695; www.tensorflow.org, Distributed
    training with TensorFlow.
    """

    architecture: ClassVar[tuple[str, ...]] = ("collective", "parameter servers")
    synchronization: ClassVar[tuple[str, ...]] = ("synchronous", "asynchronous")
    paper: ClassVar[str] = "Abadi 2016, arXiv 1605.08695"
    no_forecast_reason: ClassVar[str] = (
        "leaves its steps to TensorFlow, which shows no part of them"
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
    trusted_network: bool = TRUSTED

    @property
    def stands(self) -> Kind:
        """Its place among labkit's, by its options, too."""
        found = WAYS[self.cross_device_ops] if self.kind == "mirrored" else KINDS[self.kind]
        if self.communication == "auto":
            found = found._replace(algorithm=AUTO.algorithm)
        if found.ours["name"] == "ParameterServer":
            found = found._replace(ours=found.ours | {"servers": self.servers})
        return found

    @classmethod
    def combines(cls, cell: Cell) -> bool:
        """What its kinds are."""
        kinds = {(each.architecture, each.synchronization) for each in KINDS.values()}
        return (cell.architecture, cell.synchronization) in kinds

    def cell(self, workers: int) -> Cell:
        """As its kind is."""
        own = self.stands
        places = {"architecture": own.architecture, "synchronization": own.synchronization}
        return super().cell(workers)._replace(**places)

    @property
    def exact(self) -> bool:
        """Gradients are summed in full; those of servers come when they come."""
        return self.kind != "parameter_server"

    def exact_of(self, experiment: ExperimentSpec) -> bool:
        """One worker finds the weights that it has made."""
        return self.exact or experiment.workers == 1

    def extra_ranks(self, workers: int) -> int:
        """One rank is enough where one process leads all the others."""
        return 0 if self.kind == "multi_worker_mirrored" else 1 - workers

    def processes(self, workers: int) -> int:
        """Of all replicas; with servers, also those, and the coordinator."""
        if self.kind != "parameter_server":
            return workers
        return workers + 1 + (0 if self.colocated else self.servers)

    def rows(self, batch_size: int, workers: int) -> int:
        """Rows of a replica."""
        return -(-batch_size // workers)

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what TensorFlow's strategies do not do here, before any rank starts."""
        self._check_fields()
        refuse_around(experiment.optimizer_options)
        self._check_clipping(experiment.workers, experiment.optimizer_options)
        if experiment.precision == "mixed_float16":
            raise InvalidInput(
                "precision='mixed_float16' needs a scaled loss, which TFDistribute's loop has not; "
                "use precision='mixed_bfloat16', 'float32' or 'float64'"
            )
        refuse_elsewhere("TFDistribute", experiment, linked=self.kind not in LOCAL)
        if (network := Network.parse(experiment.network)) is not None:
            self._check_link(experiment.workers)
            refuse_unlinked(network)
        if experiment.capacities is not None and self.kind != "multi_worker_mirrored":
            raise InvalidInput(
                f"capacities are of kind='multi_worker_mirrored', not of {self.kind!r}; leave "
                "them out"
            )
        if self.cross_device_ops == "hierarchical_copy" and experiment.workers % 2:
            raise InvalidInput(
                "TensorFlow's hierarchical_copy adds up two halves of the devices, and leaves out "
                f"the last of workers={experiment.workers}; give an even number"
            )

    def _check_clipping(self, workers: int, options: Mapping[str, JSON]) -> None:
        """Refuse what Keras does to a replica's gradient before TensorFlow adds them up."""
        given = [name for name in CLIPPING if options.get(name) is not None]
        if given and self.exact and workers > 1:
            raise InvalidInput(
                f"{given[0]}={options[given[0]]}: within TensorFlow's strategies Keras clips the "
                "gradient of each replica before they are added up, which is not what clips their "
                f"sum; leave {given[0]} out"
            )

    def _check_link(self, workers: int) -> None:
        """Refuse more than stands at the two ends of a link."""
        if self.colocated:
            raise InvalidInput(
                "colocated servers with a network: at one end of the real link stand servers, at "
                "the other workers; leave colocated out"
            )
        if self.kind == "multi_worker_mirrored" and workers != 2:
            raise InvalidInput(
                f"workers={workers} with a network: a real link has two ends; give workers=2"
            )

    def _check_fields(self) -> None:
        of = {
            "cross_device_ops": ("mirrored", self.cross_device_ops != "auto"),
            "communication": ("multi_worker_mirrored", self.communication != "ring"),
            "servers": ("parameter_server", self.servers != 1),
            "colocated": ("parameter_server", self.colocated),
        }
        for field, (kind, given) in of.items():
            if given and self.kind != kind:
                raise InvalidInput(
                    f"{field}={getattr(self, field)!r} is of kind={kind!r}, not of {self.kind!r}; "
                    "leave it out"
                )
        servers = self.kind == "parameter_server"
        if self.synchronous is not None and self.synchronous == servers:
            what, ours = ("asynchronous", "True") if servers else ("synchronous", "False")
            raise InvalidInput(
                f"synchronous={self.synchronous}: TensorFlow 2 has {self.kind} {what} only; leave "
                f"it out, or use labkit's ParameterServer(synchronous={ours})"
            )

    def train(self, session: Session) -> None:
        """Ask TensorFlow's processes for steps."""
        communicator = session.communicator
        refuse_hosts(
            "TFDistribute",
            communicator,
            "start a script of your own there with what `labkit tf-config` prints",
        )
        optimizer = session.optimizer()
        refuse_given(optimizer)
        own = {name: getattr(optimizer, name, None) for name in CLIPPING}  # a compiled model's, too
        self._check_clipping(session.experiment.workers, own)
        session.compile(optimizer)
        if self.exact and session.experiment.workers > 1:
            refuse_unweighted(session.model)
        job, rank = "chief" if self.kind == "parameter_server" else "worker", communicator.rank
        with ExitStack() as ended, tempfile.TemporaryDirectory(prefix="labkit-tf-") as folder:
            within = linked(session, ended)
            if not within and self.kind not in LOCAL:
                words = enclosed(session, ended, "TensorFlow's servers", self.trusted_network)
                within = {HERE: words}
            made = self._spec(session.experiment.workers, *within) if rank == 0 else None
            spec = communicator.share(made, what="the cluster of TensorFlow's processes")
            config = spec.of(job, rank) if spec.jobs else None
            servers = Servers(spec, communicator, session.experiment.threads, within)
            ended.callback(servers.close)
            if job == "chief":
                servers.start()
            words = within[spec.host(job, rank)] if within else ()
            child = session.elsewhere(f"{job} {rank}", config, folder, words)
            ended.callback(child.close)
            child.answer(meanwhile=servers.mend)
            networks = list(within.values())
            told = train_elsewhere(session, child, servers.tasks, servers.mend, networks)
            session.exchanged = {
                "algorithm": child.ask("describe"),
                "tf_config": [spec.of(*task) for tasks in spec.processes() for task in tasks],
                **told,
                "started_anew": servers.anew,
            }

    def _spec(self, workers: int, here: str = HERE, there: str = HERE) -> ClusterSpec:
        """Who there is, at one address or at the two ends of a link."""
        if self.kind == "parameter_server":
            jobs = {"chief": [here], "worker": [there] * workers, "ps": [here] * self.servers}
            return at(jobs, self.colocated)
        ends = [here, there] if here != there else [here] * workers
        return at({} if self.kind in LOCAL else {"worker": ends})
