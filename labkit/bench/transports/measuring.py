"""The exchange of one array, by every way in turn: seconds, copies, processor time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from labkit.bench.linked_processes import Ranks
from labkit.bench.timing import Row, head, spread
from labkit.bench.transports.starting import hosts_wanted, ranks, tasks
from labkit.bench.transports.trained import Training, grpc, train_here
from labkit.bench.transports.ways import APART, GRPC, LOOPBACK, Way, chosen
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.quantities import bits_of
from labkit.frameworks.namespaces import rate_limited_link, require_means
from labkit.network import Network

Question: TypeAlias = Mapping[str, object]  # which JSON can say
Asking: TypeAlias = Callable[[Way, Question], Any]

SIZES = (8, 512, 2**14, 2**18, 2**20, 2**22, 2**24, 2**26)  # bytes
RATE = "1Gb"


class Plan(NamedTuple):
    """What is measured, and what is not, with the reason of each.

    Attributes:
        ways: in turn.
        left_out: sentences.
        rate: of the link between namespaces, bits/s.
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
    """Which ways this machine can go.

    Args:
        transports, places: as of `ways.chosen`.
        namespaces: whether the link between two of them is wanted; where it cannot be made, that is
            said.
        rate: of that link, such as "1Gb".

    Raises:
        InvalidInput: names or a rate that cannot be; nothing is left.
    """
    bits_of(rate)
    ways, left_out = chosen(transports, places), []
    reasons = {LOOPBACK: hosts_wanted, APART: _unlinked if namespaces else lambda: "not asked for"}
    for place, why_not in reasons.items():
        # On loopback TensorFlow's tasks need no host of their own.
        lost = [
            way for way in ways if way.place == place and (place == APART or way.transport != GRPC)
        ]
        if lost and (reason := why_not()):
            ways = [way for way in ways if way not in lost]
            left_out.append(f"{', '.join(way.transport for way in lost)} by {place}: {reason}")
    if not ways:
        raise InvalidInput(f"no way is left: {'; '.join(left_out)}; ask for others")
    return Plan(ways, left_out, rate)


def measure(wanted: Plan, sizes: Sequence[int] = SIZES, repeats: int = 5) -> list[Row]:
    """Time the exchange of arrays by every way in turn.

    An array of random bytes goes from one process to the other, which sends it back from where it
    lies; a time is half of that, the median over as many exchanges as fit 0.3 s. TensorFlow's
    tasks exchange it 32 times (2 times, where it has more than 1 MiB) in one traced call.

    Args:
        wanted: by `plan`.
        sizes: bytes of the array.
        repeats: rounds over all ways and sizes.

    Returns:
        A row a way and size: the spread over the repeats, `bandwidth` (bytes/s), `copies` and
        why, `processor_ns` a byte of both processes (busy waiting included), `tcp`, the bytes that
        left by TCP as a multiple of the array's, and `correct`: it came back bit by bit.

    Raises:
        InvalidInput: sizes or repeats that cannot be. LabkitError: a process ended early.
    """
    if min(sizes, default=0) < 1 or repeats < 1:
        raise InvalidInput(f"bytes={list(sizes)}, repeats={repeats}: give 1 at least")
    found: dict[tuple[int, Way], list[Mapping[str, Any]]] = {}
    with processes(wanted) as asking:
        for _ in range(repeats):
            for nbytes in sizes:
                for way in wanted.ways:
                    answer = asking(way, {"transport": way.transport, "bytes": nbytes})
                    found.setdefault((nbytes, way), []).append(answer)
    return [_row(way, nbytes, answers, wanted) for (nbytes, way), answers in found.items()]


def train(
    wanted: Plan,
    target: float = 0.9,
    epochs: int = 6,
    widths: Sequence[int] = (256, 256),
    batch_size: int = 64,
    repeats: int = 3,
) -> list[Row]:
    """Train the same by every way in turn: one worker, and one server that has the weights.

    Args:
        wanted: by `plan`.
        target: accuracy of held-out rows whose time is told.
        epochs, widths, batch_size: of the training, of an MLP on the digits.
        repeats: rounds over all ways.

    Returns:
        A row a way: the spread of the step (medians of repeats), `bytes` of the weights, which
        are fetched in each step as the gradient is pushed, `seconds_to_target` (the median; None
        where a repeat did not reach it), and the `accuracy` that the worst repeat reached.
    """
    training = Training(epochs, widths, batch_size, target)
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
                asked = training.by(grpc(), network)
                answers += theirs.call(train_here, asked, target, ranks=1)
    return [_trained(way, answers, wanted, training.nbytes) for way, answers in found.items()]


@contextmanager
def processes(wanted: Plan) -> Iterator[Asking]:
    """The processes of all ways; what asks those of a way a question, and has the answer."""
    with ExitStack() as opened:
        link = None
        if any(way.place == APART for way in wanted.ways):
            link = opened.enter_context(rate_limited_link(bits_of(wanted.rate)))
        each: dict[tuple[bool, str], Ranks] = {}
        for way in wanted.ways:
            ends = link if way.place == APART else None
            if (key := _key(way)) not in each:
                start = tasks(ends) if way.transport == GRPC else ranks(way.place, ends)
                each[key] = opened.enter_context(start)

        def ask(way: Way, question: Question) -> Any:
            found = each[_key(way)]
            # Of a task of TensorFlow's the other one counts the processor time.
            other = {"other": int(found.ready[1])} if way.transport == GRPC else {}
            found.ask({**question, **other})
            return json.loads(found.answer())

        yield ask


def _key(way: Way) -> tuple[bool, str]:
    return way.transport == GRPC, way.place


def _unlinked() -> str:
    """Why there can be no link between namespaces; empty where there can."""
    try:
        require_means()
    except LabkitError as error:
        return str(error)
    return ""


def _real(rate: str) -> Network:
    """What names a real link of this rate to `TFDistribute`."""
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
