"""What the exchange of gradients adds to a training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.bench import breakdown
from labkit.bench.interleave import STEPS, WARM, Step, take
from labkit.bench.steps import CASES, WORD_CASES, Averaging, Model, WordModel
from labkit.bench.timing import Row, added, head, spread
from labkit.cluster import Cluster
from labkit.common.nearest import refuse_unknown
from labkit.communicator import Communicator
from labkit.network import Network
from labkit.strategies import AllReduce

if TYPE_CHECKING:
    import tensorflow as tf

    from labkit.exchange import Exchange, Timeline

KNOWN = CASES | WORD_CASES
USUAL = AllReduce().schedule  # what the others are held against
CHAIN = 10  # steps in a row where they reach into each other; behind the last one, all is done
DENSE = ", dense"  # a schedule that gets the gradients of a table whole


def measure(
    workers: int = 2,
    cases: Sequence[str] = ("mlp-1024", "mlp-2048", "cnn"),
    schedules: Sequence[str] = ("sequential", "overlap"),
    algorithm: str = "auto",
    network: str | Network | None = None,
    repeats: int = 5,
    bucket_bytes: int = 4 * 2**20,
    others: Callable[[], None] | None = None,
    where: bool = False,
) -> list[Row]:
    """Time local steps, exchanged steps and the bare allreduce of the same bytes, interleaved.

    "local" is the same step on all ranks at once without exchange. How kinds take turns, and what
    is compared with what, says `labkit.bench.interleave`.

    Args:
        workers: ranks of one thread.
        cases: names of `labkit.bench.steps.CASES` and `WORD_CASES`.
        schedules: of the exchange.
        algorithm: see `Exchange`.
        network: a network to emulate; None: this machine's own.
        repeats: rounds over everything.
        bucket_bytes: see `Exchange`.
        others: measures something else for one repeat; called after each of the repeats here.
        where: also say where the time goes that the usual schedule adds, on one host.

    Returns:
        One row a case and kind ("local", "raw allreduce", a schedule): median, least and 90th
        percentile of the repeats' medians (ms); for schedules also what they add to the local
        step, by repeat and as the median, and whether all ranks ended with the same weights.
        Beside the usual schedule, the others say what they save of its step, and what they would
        save if a line without delay served the same buckets, ready when they were, in the best
        order (`labkit.records.overlap.Overlap`). Of words, each schedule stands there twice:
        gradients as rows, and dense.
    """
    refuse_unknown("case", cases, KNOWN)
    network = Network.parse(network)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    turns = repeats if others else 1
    with Cluster(workers=workers) as cluster:
        for _ in range(turns):
            for name in cases:
                each = repeats // turns
                given = (name, list(schedules), algorithm, each, bucket_bytes, where)
                found[name] += cluster.call(_measure, *given, ranks=workers, network=network)[:1]
            if others:
                others()
    told = None if network is None else str(network)
    return [
        head("exchange", name, what, workers, told, repeats=repeats) | row
        for name in cases
        for what, row in _rows(_joined(found[name]))
    ]


def _joined(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all turns: repeats one behind the other; what was chosen is told of the last."""

    def each(what: str, join: Callable[[list[Any]], Any]) -> dict[str, Any]:
        return {kind: join([turn[what][kind] for turn in turns]) for kind in turns[0][what]}

    joined = {what: each(what, lambda some: [*chain(*some)]) for what in ("seconds", "added")}
    joined |= {"same": each("same", all)}
    joined |= {what: each(what, np.median) for what in ("delay", "where")}
    return turns[-1] | joined


def _measure(
    communicator: Communicator,
    name: str,
    schedules: list[str],
    algorithm: str,
    repeats: int,
    bucket_bytes: int,
    where: bool,
) -> dict[str, Any]:
    """On each rank: seconds of steps, a median a repeat, by kind."""
    from labkit.exchange import Exchange

    kind_of_model = WordModel if name in WORD_CASES else Model
    if name in WORD_CASES:
        schedules = [each + more for each in schedules for more in ("", DENSE)]
    local = kind_of_model(KNOWN[name], communicator.rank)
    steps: dict[str, Step] = {"local": local.step(lambda gradients: gradients)}
    exchanges, models, counts = {}, {}, {}
    for kind in schedules:
        schedule = kind.removesuffix(DENSE)
        exchange = exchanges[kind] = Exchange(communicator, algorithm, schedule, bucket_bytes)
        model = models[kind] = kind_of_model(KNOWN[name], communicator.rank)
        if exchange.schedule.into_next:
            counts[kind], steps[kind] = CHAIN, model.step_into_next(exchange, CHAIN)
        else:
            mean = exchange.mean if schedule == kind else _dense(exchange.mean)
            steps[kind] = model.step(mean)
    buffer = communicator.allocate(KNOWN[name].parameters)
    buffer[...] = 0.0  # stays so: sums of sums would overflow

    def sum_raw() -> None:
        communicator.patience.polite = False  # nothing computes meanwhile
        communicator.allreduce(buffer, exchanges[schedules[0]].choice.algorithm)

    steps["raw allreduce"] = sum_raw
    if where:
        handed = kind_of_model(KNOWN[name], communicator.rank)
        steps |= breakdown.kinds(communicator, KNOWN[name].parameters, handed.step)
    taken = take(
        steps,
        lambda: communicator.meet("the next step of a benchmark"),
        lambda own: np.array(communicator.allgather(own)),
        repeats,
        counts,
    )
    same = {
        kind: len(set(communicator.allgather(model.checksum()))) == 1
        for kind, model in models.items()
    }
    usual = exchanges[USUAL].timeline.events if where else ()
    all_events = communicator.allgather([*usual]) if where else []
    return {
        "seconds": taken.seconds,
        "where": breakdown.taken(all_events, repeats * STEPS) if where else {},
        "added": taken.added,
        "same": same,
        "nbytes": 4 * KNOWN[name].parameters,
        "why": {kind: exchange.describe() for kind, exchange in exchanges.items()},
        "events": {
            kind: _events(exchange, counts.get(kind, 1) * (WARM + repeats * STEPS))
            for kind, exchange in exchanges.items()
        },
        "delay": {
            kind: _delay(communicator, exchange.timeline, counts.get(kind, 1) * repeats * STEPS)
            for kind, exchange in exchanges.items()
        },
    }


def _dense(mean: Averaging) -> Averaging:
    """The mean of gradients as tensors, whatever they are."""

    def call(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        import tensorflow as tf

        return mean([tf.convert_to_tensor(gradient) for gradient in gradients])

    return call


def _events(exchange: Exchange, steps: int) -> dict[str, float]:
    """Events that a step has recorded, and what appending one costs, measured here and now."""
    from labkit.communicator import WALL
    from labkit.exchange import Timeline

    timeline, count = Timeline(WALL), 10_000
    start = time.perf_counter()
    for _ in range(count):
        timeline.add("pack", 0, start)
    cost = (time.perf_counter() - start) / count
    recorded = len(exchange.timeline.events) / steps
    return {"events_per_step": recorded, "seconds_per_event": cost}


def _delay(communicator: Communicator, timeline: Timeline, steps: int) -> float:
    """Seconds by which the last steps stood longer than an ideal line would let them: median."""
    import pandas as pd

    from labkit.exchange import timeline_rows
    from labkit.records.overlap import overlaps

    events = pd.DataFrame(timeline_rows(communicator.allgather(list(timeline.events))))
    return float(np.median([one.exposed - one.ideal for one in overlaps(events)[-steps:]]))


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """Each kind of step and what was measured of it."""
    for kind, seconds in found["seconds"].items():
        row: Row = {"bytes": found["nbytes"], **spread(seconds)}
        if kind in found["same"]:
            events = found["events"][kind]
            recording = events["events_per_step"] * events["seconds_per_event"]
            row |= added(found["added"][kind]) | {
                "same_weights": found["same"][kind],
                "recording_share": recording / float(np.median(seconds)),
                **events,
                **found["why"][kind],
            }
            other = kind != USUAL and not kind.endswith(DENSE)
            if other and USUAL in found["same"]:
                row |= _saved(found["added"], kind, found["delay"][kind])
        yield kind, row
    if found["where"]:
        yield from breakdown.rows(found["where"], found["seconds"], found["added"], USUAL)


def _saved(added: dict[str, list[float]], kind: str, delay: float) -> Row:
    """What a schedule saves of the usual one's step, by repeat, and would save without delay."""
    saved = 1e3 * (np.array(added[USUAL]) - np.array(added[kind]))
    return {
        "saved_ms": float(np.median(saved)),
        "saved_min_ms": float(saved.min()),
        "saved_max_ms": float(saved.max()),
        "ideal_saving_ms": float(np.median(saved)) + 1e3 * delay,
    }
