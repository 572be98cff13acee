"""Training of the same experiment in processes of frameworks other than TensorFlow."""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator import Communicator
from labkit.frameworks.child import Child
from labkit.frameworks.environments import Installation, find
from labkit.frameworks.namespaces import (
    ADDRESSES,
    command_prefix,
    private_network,
    rate_limited_link,
    require_tools,
)
from labkit.frameworks.tcp_counters import ByteCounters
from labkit.network import Network
from labkit.strategies.strategy import ExperimentSpec, Session, Strategy
from labkit.strategies.taxonomy import Cell

if TYPE_CHECKING:
    import keras


# Keras losses with a reduction in `MEANS` compute a mean over rows.
MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
# labkit detects the end of another process within `DETECTION_SECONDS` seconds.
DETECTION_SECONDS = 1.0
# Records of experiments omit the field's default value, so that the hashes of earlier experiments
# do not change.
TRUSTED_NETWORK: bool = Field(False, exclude_if=operator.not_)
MAX_LATENCY = 1e-3  # The latency of a link inside one machine is at most `MAX_LATENCY` seconds.


def refuse_external(name: str, experiment: ExperimentSpec, linked: bool = False) -> None:
    """Raise InvalidInput for options that external processes do not support.

    Args:
        name: The name of the strategy.
        experiment: The experiment to check.
        linked: Whether a real link with the network's bandwidth can connect the processes.
    """
    options = {
        "network": (
            None if linked else experiment.network,
            "its processes use the network of this machine",
        ),
        "stragglers": (experiment.slowdowns, "only labkit's ranks can be slowed down"),
        "callbacks": (experiment.callbacks, "the model is trained in another process"),
    }
    for field, (value, reason) in options.items():
        if value:
            raise InvalidInput(f"{name} does not support {field}: {reason}; remove it")
    if experiment.input_mode == "scatter":
        raise InvalidInput(
            "input_mode='scatter' sends rows between labkit's ranks, but external processes read "
            "their "
            "rows themselves; use input_mode='shard'"
        )
    if experiment.rows is None:
        raise InvalidInput(
            f"{name}'s processes read rows by index, which a callable data set does not "
            "support; give arrays (x, y) or a named data set"
        )
    rest = experiment.rows % experiment.batch_size or experiment.batch_size
    if rest < experiment.workers:
        raise InvalidInput(
            f"with batch_size={experiment.batch_size} the last batch of {experiment.rows} rows "
            f"has {rest} rows, fewer than workers={experiment.workers}; give another batch_size"
        )


def refuse_unweighted(model: keras.Model) -> None:
    """Raise InvalidInput if the loss of a Keras model is not a mean over rows."""
    import keras

    from labkit.model_parallel.functional import is_masked

    for loss in keras.tree.flatten(model.loss):
        if (reduction := getattr(loss, "reduction", MEANS[0])) not in MEANS:
            raise InvalidInput(
                f"loss {loss.name!r} has reduction={reduction!r}, but the losses of replicas must "
                "be means over rows, because they are weighted by rows; use "
                "reduction='sum_over_batch_size'"
            )
    if any(map(is_masked, getattr(model, "outputs", None) or ())):
        raise InvalidInput(
            "the model's outputs carry a mask, so that the loss is a mean over unmasked "
            "elements, but the losses of replicas are weighted by rows; use labkit's "
            "AllReduce, which weights them by unmasked elements"
        )


def refuse_unlinked(network: Network) -> None:
    """Raise InvalidInput if a real link on this machine cannot emulate the network."""
    fields = ("jitter", "hosts", "links", "stragglers")
    unsupported = [name for name in fields if getattr(network, name)]
    unsupported += [f"latency={network.latency:g} s"] if network.latency > MAX_LATENCY else []
    if unsupported:
        raise InvalidInput(
            f"network with {' and '.join(unsupported)} is not supported: processes of other "
            "frameworks use a real link, which has only a bandwidth; give Network(latency=0, "
            f"bandwidth=<bytes/s>), or a preset with a latency up to {MAX_LATENCY:g} s"
        )
    require_tools()


def open_link(session: Session, stack: ExitStack) -> dict[str, Sequence[str]]:
    """Create a network link with the experiment's bandwidth (collective).

    Args:
        session: The training session of this rank.
        stack: The exit stack that removes the link when it closes.

    Returns: A mapping from IP addresses to command prefixes. Each end of the link has an IP
        address. A command prefix starts processes at one end of the link. The mapping is empty if
        the experiment has no network.
    """
    network, communicator = Network.parse(session.experiment.network), session.communicator
    if network is None:
        return {}
    link = None
    if communicator.rank == 0:
        link = stack.enter_context(rate_limited_link(round(8 * network.bandwidth)))
    names = communicator.broadcast_object(link, label="the ends of the real link")
    return {address: command_prefix(name) for address, name in zip(ADDRESSES, names, strict=True)}


def open_private_network(
    session: Session, stack: ExitStack, label: str, trusted: bool
) -> Sequence[str]:
    """Create a private network namespace for the processes of a run, as a collective call.

    Args:
        session: The training session of this rank.
        stack: The exit stack that removes the namespace when it closes.
        label: Names of the listening component and of its framework, which the error message shows.
        trusted: Whether the processes may listen on the network interfaces of this machine.

    Returns:
        The command prefix that starts a process in the private network namespace.

    Raises:
        LabkitError: If the network is not trusted, and this system cannot create a private
            namespace.
    """
    prefix = None
    if session.communicator.rank == 0:
        prefix = stack.enter_context(private_network(label, trusted))
    shared_prefix = session.communicator.broadcast_object(
        prefix, label="the network of the framework's processes"
    )
    return shared_prefix or ()


def refuse_hosts(name: str, communicator: Communicator, instead: str) -> None:
    """Raise InvalidInput if the ranks are on several hosts."""
    if not communicator.wait_policy.on_one_host:
        raise InvalidInput(
            f"{name} starts its processes on one host, but the ranks are on several hosts; "
            f"{instead}"
        )


def train_external(
    session: Session,
    child: Child,
    other_counters: Callable[[], Mapping[str, int]] = dict,
    restart: Callable[[], None] = lambda: None,
    networks: Sequence[Sequence[str]] = (),
) -> dict[str, JSON]:
    """Train by sending requests to external processes, and count the bytes that they exchange.

    The external process answers "step" with a loss. The answer may contain the step time in s,
    measured in the external process. The time for requests and for counting bytes is not part of
    the step time.

    Args:
        session: The training session of this rank.
        child: The external process of this rank. The process answers the request "step", and it
            answers the request "weights" with the model's weights.
        other_counters: Function that returns the ids of further processes of a rank.
        restart: Function that restarts processes that have ended; it is called repeatedly.
        networks: The command prefix of each network namespace of the external processes. If empty,
            the processes use the network of this rank.

    Returns: Values for the run's record. The entry `processes` gives the process id of each task.
        The entry `sent_bytes` gives the bytes between tasks in all `counted_steps`. The bytes of
        the first step are not counted. The first step also sends connection data, graphs and
        initial weights.
    """
    communicator = session.communicator
    local_tasks = {child.name: child.pid} | dict(other_counters())
    all_tasks: dict[str, int] = {}
    for tasks in communicator.allgather(local_tasks, "the processes of other frameworks"):
        all_tasks |= tasks
    wires = ByteCounters(all_tasks, networks)
    steps, counter, traffic, clock = 0, 0, communicator.traffic, communicator.clock
    wires.read(local_tasks, counts=False)

    def restart_tasks() -> None:
        restart()
        wires.tasks |= other_counters()

    def request(command: str) -> Any:
        try:
            return child.ask(command, while_waiting=restart_tasks)
        except LabkitError:
            # A request may fail because another process has ended. After a wait, the function
            # `restart` reports the ended process.
            clock.sleep(DETECTION_SECONDS)
            restart()
            raise

    def step(x: object, y: object, weight: object) -> float:
        nonlocal steps, counter
        start = clock.now()
        restart_tasks()
        sent_at = clock.now()
        answer = request("step")
        timing = answer if isinstance(answer, tuple) else (answer, clock.now() - sent_at)
        counter, previous = wires.read(local_tasks), counter
        traffic.wire_bytes += counter - previous
        if steps == 0:
            wires.reset()
            counter = 0
        steps += 1
        traffic.aside_seconds += clock.now() - start - timing[1]
        return float(timing[0])

    def collect() -> None:
        # The operating system updates its byte counters only after a step ends.
        wires.read(local_tasks)
        session.model.set_weights(request("weights"))
        wires.read(local_tasks, counts=False)

    session.loop(step, collect)
    sent_bytes: dict[str, JSON] = {}
    for rows in communicator.allgather(
        wires.matrix(local_tasks), "the bytes that other frameworks sent"
    ):
        sent_bytes |= rows
    return {"processes": dict(wires.tasks), "sent_bytes": sent_bytes, "counted_steps": steps - 1}


OPTIONS = ("momentum", "nesterov")
PRECISIONS = ("float32", "float64")


class ExternalFramework(Strategy):
    r"""PyTorch's DDP or FSDP, Horovod, or Keras on JAX trains the same model on the same batches.

    labkit starts a new process for each worker. Each new process receives the layers, the initial
    weights and the batch rows. The new process of a worker runs in a separate Python installation.
    `labkit frameworks setup NAME` creates the installation. Alternatively, `LABKIT_TORCH_PYTHON`,
    `LABKIT_HOROVOD_PYTHON` or `LABKIT_JAX_PYTHON` names an existing Python installation. Worker r
    of k has \(n_r\) of the n rows of a batch. The loss of each worker is weighted by the worker's
    number of rows. The framework averages the gradients of all workers:

    \[g = \frac{1}{k} \sum_r k \frac{n_r}{n} \nabla \ell_r.\]

    Supported models are sequential models of Dense, Conv2D, MaxPooling2D and Flatten. The supported
    losses are cross-entropy of scores and mean squared error. The optimizer is SGD with or without
    momentum. All frameworks compute the same function for supported models, losses and optimizers.
    `verify` compares a framework's weights with those of one labkit process. labkit raises an error
    for unsupported models, losses and optimizers.

    Args:
        framework: "ddp": PyTorch's DistributedDataParallel over gloo. "fsdp": PyTorch's
            fully_shard, layer by layer, over gloo. "horovod": Horovod with TensorFlow's Keras.
            "jax": Keras on JAX, one process per device, with `keras.distribution.DataParallel`.
        trusted_network: Whether the processes may listen on every network interface of this
            machine. The connections have no encryption and no key. If True, anyone on the network
            can read and change the training. If False, training requires a private network
            namespace for the processes.

    Raises:
        InvalidInput: The framework is not installed; the message has the command that installs it.

    Source: S. Li et al., PyTorch distributed: experiences on accelerating data parallel training,
    2020, arXiv 2006.15704; Y. Zhao et al., PyTorch FSDP: experiences on scaling fully sharded data
    parallel, 2023, arXiv 2304.11277; A. Sergeev and M. Del Balso, Horovod, 2018, arXiv 1802.05799.
    Difference from the paper: on JAX, workers with fewer rows repeat some rows with weight zero.
    The ranks of labkit start the Horovod processes, which therefore communicate by Gloo instead of
    MPI. MPI is faster (`labkit bench exchange --peer horovod` starts Horovod with mpirun).
    """

    scheduling: ClassVar[tuple[str, ...]] = ("overlap", "sequential")
    paper: ClassVar[str] = "Li 2020, arXiv 2006.15704"
    no_forecast_reason: ClassVar[str] = (
        "executes its steps in another framework, which reports no times for the parts of a step"
    )

    framework: Literal["ddp", "fsdp", "horovod", "jax"] = Field("ddp", kw_only=False)
    trusted_network: bool = TRUSTED_NETWORK

    def cell(self, workers: int) -> Cell:
        """Return the place in the taxonomy; JAX is sequential, because XLA orders the work."""
        cell = super().cell(workers)
        return cell._replace(scheduling="sequential") if self.framework == "jax" else cell

    @property
    def exact(self) -> bool:
        """True: gradients are averaged without compression."""
        return True

    @property
    def environment_key(self) -> str:
        """The framework's version and the path of its Python installation, as text."""
        environment = find(self.framework)
        return (
            environment
            if isinstance(environment, str)
            else f"{environment.version} {environment.python}"
        )

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the largest number of rows of a batch that one worker processes."""
        return -(-batch_size // workers)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for a missing framework or an option that differs by framework."""
        self._environment()
        refuse_external("ExternalFramework", experiment)
        if experiment.precision not in PRECISIONS:
            raise InvalidInput(
                f"precision={experiment.precision!r} differs between frameworks; "
                "ExternalFramework supports "
                f"{', '.join(PRECISIONS)}"
            )
        unsupported = [name for name in experiment.optimizer_options if name not in OPTIONS]
        if experiment.optimizer != "sgd" or unsupported:
            option = (
                f"its {unsupported[0]}" if unsupported else f"optimizer={experiment.optimizer!r}"
            )
            raise InvalidInput(
                f"{option} differs between frameworks; ExternalFramework supports optimizer='sgd' "
                "with its "
                f"{' and '.join(OPTIONS)}"
            )

    def train(self, session: Session) -> None:
        """Train by asking the processes of the framework to execute steps."""
        communicator = session.communicator
        refuse_hosts("ExternalFramework", communicator, "start all ranks on one host")
        session.compile(session.optimizer())
        with ExitStack() as stack:
            folder = ""
            if communicator.rank == 0:
                directory = tempfile.TemporaryDirectory(prefix="labkit-peer-")
                folder = stack.enter_context(directory)
            folder = communicator.broadcast_object(folder, label="the folder of exported arrays")
            endpoint = f"the rendezvous of {self.framework}"
            prefix = open_private_network(session, stack, endpoint, self.trusted_network)
            name = f"worker {communicator.rank}"
            child = session.exported(name, self._environment(), folder, prefix)
            stack.callback(child.close)
            child.answer()
            port = child.ask("open") if communicator.rank == 0 else None
            child.ask(
                "join",
                communicator.broadcast_object(
                    port, label="the rendezvous address of the framework's processes"
                ),
            )
            algorithm, version = child.ask("describe")
            traffic = train_external(session, child, networks=[prefix])
        session.exchanged = {"algorithm": algorithm, "version": version} | traffic

    def _environment(self) -> Installation:
        environment = find(self.framework)
        if isinstance(environment, str):
            raise InvalidInput(environment)
        return environment
