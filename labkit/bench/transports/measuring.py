"""Measurements of array transfers between two processes, over several transports.

Another measurement trains a model over each transport. It shows the effect on the step time, and on
the time to reach an accuracy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from labkit.bench.linked_ranks import LinkedProcesses
from labkit.bench.timing import Row, head, spread
from labkit.bench.transports.starting import (
    APART,
    GRPC,
    LOOPBACK,
    Way,
    chosen,
    hosts_wanted,
    ranks,
    tasks,
)
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.quantities import bits_of
from labkit.communicator import Transport
from labkit.experiment import Experiment
from labkit.frameworks.namespaces import rate_limited_link, require_tools
from labkit.network import Network
from labkit.strategies import ParameterServer, Strategy, TFDistribute

if TYPE_CHECKING:
    from labkit.communicator import Communicator

Question: TypeAlias = Mapping[str, object]  # JSON-serializable
Asking: TypeAlias = Callable[[Way, Question], Any]

SIZES = (8, 512, 2**14, 2**18, 2**20, 2**22, 2**24, 2**26)  # bytes
RATE = "1Gb"
WARM = 10  # The constant WARM is the number of untimed steps at the start.


class Plan(NamedTuple):
    """The transports to measure, and the places where their two processes run.

    Attributes:
        ways: Pairs of a transport and a place, in order of measurement. A place is, for example,
            shared memory or TCP on loopback.
        left_out: Sentences that state which transports are omitted and why.
        rate: Rate of the link between network namespaces in bits/s, such as "1Gb".
    """

    ways: list[Way]
    left_out: list[str]
    rate: str


def plan(
    transports: Sequence[str] = (),
    places: Sequence[str] = (),
    namespaces: bool = True,
    rate: str = RATE,
) -> Plan:
    """Return a plan with the chosen transports and places, if this machine supports them.

    Args:
        transports: Names of transports. By default, all transports are chosen (see `chosen`).
        places: Names of places (kinds of connection). By default, all places are chosen (see
            `chosen`).
        namespaces: Whether to measure a link between two network namespaces. If a link between
            network namespaces is impossible, `left_out` of the plan contains the reason.
        rate: Rate of the link between network namespaces in bits/s, such as "1Gb".

    Raises:
        InvalidInput: A name or the rate is invalid, or no transport can be measured.
    """
    bits_of(rate)
    ways, left_out = chosen(transports, places), []
    reasons = {LOOPBACK: hosts_wanted, APART: _unlinked if namespaces else lambda: "not requested"}
    for place, why_not in reasons.items():
        # On loopback, MPI ranks need separate host names, but TensorFlow's tasks do not.
        lost = [
            way for way in ways if way.place == place and (place == APART or way.transport != GRPC)
        ]
        if lost and (reason := why_not()):
            ways = [way for way in ways if way not in lost]
            left_out.append(f"{', '.join(way.transport for way in lost)} by {place}: {reason}")
    if not ways:
        raise InvalidInput(
            f"this machine can time none of the chosen transports: {'; '.join(left_out)}; "
            "choose other transports"
        )
    return Plan(ways, left_out, rate)


def measure(wanted: Plan, sizes: Sequence[int] = SIZES, repeats: int = 5) -> list[Row]:
    """Measure the transfer of arrays between two processes, with each transport in turn.

    One process sends an array of random bytes to the other process. The other process sends the
    array back without a copy. The time of a transfer is half of the median round-trip time. The
    round trips of one transport and size take about 0.3 s. In one traced call, TensorFlow's tasks
    send an array back and forth 32 times. Arrays larger than 1 MiB go back and forth twice per
    call.

    Args:
        wanted: Plan of the measurement, from `plan`.
        sizes: Array sizes in bytes.
        repeats: Number of rounds over all transports and sizes.

    Returns:
        One row per transport, place and size. A row contains the spread of the repeats' times (ms)
        and `bandwidth` (bytes/s). `copies` is the number of copies of the array, with one
        description per copy. `processor_ns` is the CPU time of both processes in ns per byte,
        including busy waiting. `tcp` is the number of bytes that TCP sends, divided by the array's
        size in bytes. `correct` tells whether the returned array was bit-identical to the sent
        array.

    Raises:
        InvalidInput: `sizes` or `repeats` is out of range.
        LabkitError: A process ended early.
    """
    if min(sizes, default=0) < 1 or repeats < 1:
        raise InvalidInput(
            f"bytes={list(sizes)}, repeats={repeats}: give sizes of at least 1 byte, and at "
            "least 1 repeat"
        )
    results: dict[tuple[int, Way], list[Mapping[str, Any]]] = {}
    with processes(wanted) as asking:
        for _ in range(repeats):
            for nbytes in sizes:
                for way in wanted.ways:
                    answer = asking(way, {"transport": way.transport, "bytes": nbytes})
                    results.setdefault((nbytes, way), []).append(answer)
    return [_row(way, nbytes, answers, wanted) for (nbytes, way), answers in results.items()]


def train(
    wanted: Plan,
    target: float = 0.9,
    epochs: int = 6,
    widths: Sequence[int] = (256, 256),
    batch_size: int = 64,
    repeats: int = 3,
) -> list[Row]:
    """Train with one worker and one parameter server, alternating between transports.

    Args:
        wanted: Plan of the measurement, from `plan`.
        target: Validation accuracy that a run must reach; `seconds_to_target` is the time to reach
            the target.
        epochs: Number of epochs.
        widths: Widths of the hidden layers of an MLP, which is trained on the data set `digits`.
        batch_size: Batch size.
        repeats: Number of rounds over all transports.

    Returns: One row per transport and place. A row contains the spread of the repeats' median step
        times (ms). `bytes` is the size of the weights, which each step fetches. `seconds_to_target`
        is the median over repeats, or None if a repeat missed the target. `accuracy` is the
        accuracy of the worst repeat.
    """
    training = ServerTraining(epochs, widths, batch_size, target)
    found: dict[Way, list[Row]] = {way: [] for way in wanted.ways}
    ours = [way for way in wanted.ways if way.transport != GRPC]
    with ExitStack() as opened:
        asking = opened.enter_context(processes(wanted._replace(ways=ours)))
        theirs = opened.enter_context(Cluster(workers=1)) if len(ours) < len(found) else None
        for _ in range(repeats):
            for way, answers in found.items():
                if way.transport != GRPC or theirs is None:
                    question: Question = {"transport": way.transport, "training": list(training)}
                    answers.append(asking(way, question))
                    continue
                network = _real(wanted.rate) if way.place == APART else None
                experiment = training.by(grpc(), network)
                answers += theirs.call(train_here, experiment, target, ranks=1)
    return [_trained(way, answers, wanted, training.nbytes) for way, answers in found.items()]


@contextmanager
def processes(wanted: Plan) -> Iterator[Asking]:
    """Start the processes of all transports; yield a function that runs a task on two processes."""
    with ExitStack() as opened:
        link = None
        if any(way.place == APART for way in wanted.ways):
            link = opened.enter_context(rate_limited_link(bits_of(wanted.rate)))
        each: dict[tuple[bool, str], LinkedProcesses] = {}
        for way in wanted.ways:
            ends = link if way.place == APART else None
            if (key := _key(way)) not in each:
                start = tasks(ends) if way.transport == GRPC else ranks(way.place, ends)
                each[key] = opened.enter_context(start)

        def ask(way: Way, question: Question) -> Any:
            processes = each[_key(way)]
            # TensorFlow's task 0 reads the CPU time of task 1. Task 0 therefore needs the process
            # id of task 1.
            other = {"other": int(processes.ready[1])} if way.transport == GRPC else {}
            processes.ask({**question, **other})
            return json.loads(processes.answer())

        yield ask


def _key(way: Way) -> tuple[bool, str]:
    return way.transport == GRPC, way.place


def _unlinked() -> str:
    """Return why a link between network namespaces is impossible; "" if it is possible."""
    try:
        require_tools()
    except LabkitError as error:
        return str(error)
    return ""


def _real(rate: str) -> Network:
    """Return a `Network` with the given rate, which `TFDistribute` turns into a real link."""
    return Network(latency=0, bandwidth=bits_of(rate) / 8, name=rate)


def _head(way: Way, what: str, wanted: Plan, repeats: int, nbytes: int) -> Row:
    network = f"{wanted.rate} between two namespaces" if way.place == APART else None
    row = head("transport", way.name, what, 2, network, repeats=repeats, bytes=nbytes)
    return row | {"transport": way.transport, "place": way.place}


def _row(way: Way, nbytes: int, answers: Sequence[Mapping[str, Any]], wanted: Plan) -> Row:
    seconds = [float(each["seconds"]) for each in answers]
    processor, tcp = (float(np.median([each[k] for each in answers])) for k in ("processor", "tcp"))
    return {
        **_head(way, "exchange", wanted, len(answers), nbytes),
        **spread(seconds),
        "bandwidth": nbytes / float(np.median(seconds)),
        "copies": len(way.copies),
        "copied": "; ".join(way.copies),
        "processor_ns": 1e9 * processor / nbytes,
        "tcp": tcp / nbytes,
        "correct": all(each["right"] for each in answers),
    }


def _trained(way: Way, answers: Sequence[Row], wanted: Plan, nbytes: int) -> Row:
    medians = [float(each["median_ms"] or 0.0) / 1e3 for each in answers]
    there = [each["seconds_to_target"] for each in answers]
    reached = [float(each) for each in there if each is not None]
    return {
        **_head(way, "training step", wanted, len(answers), nbytes),
        **spread(medians),
        "seconds_to_target": float(np.median(reached)) if len(reached) == len(there) else None,
        "target": answers[0]["target"],
        "accuracy": min(float(each["accuracy"] or 0.0) for each in answers),
    }


class ServerTraining(NamedTuple):
    """Training of an MLP on the data set `digits`, with one worker and one parameter server.

    Attributes:
        epochs: Number of epochs.
        widths: Widths of the hidden layers.
        batch_size: Batch size.
        target: Validation accuracy that the training must reach; the time to reach it is measured.
    """

    epochs: int
    widths: Sequence[int]
    batch_size: int
    target: float

    def by(self, strategy: Strategy, network: Network | None = None) -> Experiment:
        """Return the training as an experiment with the given strategy and network."""
        return Experiment(
            model="mlp",
            model_options={"widths": list(self.widths)},
            dataset="digits",
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=0.1,
            workers=1,
            strategy=strategy,
            network=network,
            verify=False,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all weights of the MLP, whose inputs are 64 pixels and outputs 10 digits."""
        layers = [64, *self.widths, 10]
        return 4 * sum((before + 1) * after for before, after in pairwise(layers))


def served(transport: Transport) -> ParameterServer:
    """Return labkit's asynchronous parameter server strategy, which computes as TensorFlow's."""
    return ParameterServer(servers=1, synchronous=False, transport=transport)


def grpc() -> TFDistribute:
    """Return TensorFlow's parameter server strategy, whose processes use gRPC."""
    return TFDistribute(kind="parameter_server", servers=1)


def train_here(communicator: Communicator, experiment: Experiment, target: float) -> Row:
    """Train, and return this rank's step times and the time to the target accuracy (collective)."""
    from labkit.worker.work import work

    result = work(communicator, experiment)
    whole = communicator.broadcast_object(
        result.whole and result.whole.epochs, label="what epochs reached"
    )
    steps = [float(row["seconds"]) for row in result.rows]
    # A server rank runs no training steps, so it returns an empty summary.
    return summary(steps, whole or [], target) if steps else {}


def summary(steps: Sequence[float], epochs: Sequence[Mapping[str, float]], target: float) -> Row:
    """Return the spread of step times (ms) and the time to reach the target accuracy (s).

    Args:
        steps: Seconds of each step of one worker.
        epochs: Metrics after each epoch, in order.
        target: Validation accuracy to reach.
    """
    later = 1e3 * np.array(steps[WARM:] or steps)
    there = next((e for e in epochs if e.get("val_accuracy", 0.0) >= target), None)
    best = max((float(epoch.get("val_accuracy", 0.0)) for epoch in epochs), default=0.0)
    return {
        "median_ms": float(np.median(later)),
        "min_ms": float(later.min()),
        "p90_ms": float(np.percentile(later, 90)),
        "seconds_to_target": None if there is None else float(there["seconds"]),
        "target": target,
        "accuracy": best,
    }
