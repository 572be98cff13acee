"""Functions shared by strategies that train the model in processes of another framework."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pydantic import Field

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator import Communicator
from labkit.frameworks.child import Child
from labkit.frameworks.namespaces import (
    ADDRESSES,
    command_prefix,
    private_network,
    rate_limited_link,
    require_tools,
)
from labkit.frameworks.tcp_counters import ByteCounters
from labkit.network import Network
from labkit.strategies.strategy import ExperimentSpec, Session

if TYPE_CHECKING:
    import keras

# Names of Keras loss reductions that compute a mean over rows.
MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
DETECTION_SECONDS = 1.0  # seconds until the end of another process is detected
# Records of experiments omit the default value, so that the hashes of earlier experiments do not
# change.
TRUSTED_NETWORK: bool = Field(False, exclude_if=operator.not_)
MAX_LATENCY = 1e-3  # in seconds; the largest latency of a link inside one machine


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
    """Create a real link with the bandwidth of the experiment's network; all ranks call together.

    Args:
        session: The training session of this rank.
        stack: The exit stack that removes the link when it closes.

    Returns: A mapping from the IP address of each end of the link to the command prefix that starts
        processes at that end; empty without a network.
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
    """Create a private network namespace for the processes of a run; all ranks call together.

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

    The external process answers "step" with a loss, or with a loss and the seconds that the step
    took there. The time for requests and for counting bytes is not part of the step time.

    Args:
        session: The training session of this rank.
        child: The external process of this rank. The process answers the request "step", and it
            answers the request "weights" with the model's weights.
        other_counters: Function that returns the process ids of other processes of this rank, by
            task name.
        restart: Function that restarts processes that have ended; it is called repeatedly.
        networks: For each network namespace of the external processes, the command prefix; if
            empty, the processes run in the network of this rank.

    Returns:
        Values for the run's record: process ids (`processes`) by task, and `sent_bytes` from task
        to task, as totals over `counted_steps`. The bytes of the first step are not counted,
        because it also sends connection data, graphs and initial weights.
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
            # The end of another process may be the cause of a failed request. After a wait,
            # `restart` finds that the other process has ended, and raises a more informative error.
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
        wires.read(local_tasks)  # the kernel updates its byte counters after a step ends
        session.model.set_weights(request("weights"))
        wires.read(local_tasks, counts=False)

    session.loop(step, collect)
    sent_bytes: dict[str, JSON] = {}
    for rows in communicator.allgather(
        wires.matrix(local_tasks), "the bytes that other frameworks sent"
    ):
        sent_bytes |= rows
    return {"processes": dict(wires.tasks), "sent_bytes": sent_bytes, "counted_steps": steps - 1}
