"""A benchmark of the time that the gradient exchange adds to a training step.

The benchmark can also divide the time of the exchange into phases, each with a lower limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.bench.steps import CASES, WORD_CASES, Averaging, BenchModel, WordModel
from labkit.bench.timing import STEPS, WARM, Row, Step, added, head, spread, time_on_ranks
from labkit.cluster import Cluster
from labkit.common.nearest import refuse_unknown
from labkit.communicator import Communicator
from labkit.network import Network
from labkit.strategies import AllReduce

if TYPE_CHECKING:
    import tensorflow as tf

    from labkit.bench.steps import Averaging
    from labkit.communicator import Communicator
    from labkit.exchange import Exchange, Timeline
    from labkit.exchange.comm_thread import Event

KNOWN = CASES | WORD_CASES
# The constant USUAL is the default schedule of the gradient exchange. The benchmark compares all
# other schedules with the default schedule.
USUAL = AllReduce().schedule
# The constant CHAIN is the number of overlapping steps in a timed chain. The last step of a chain
# completes all updates.
CHAIN = 10
# The constant DENSE ends the names of schedules that average the gradients of an embedding as dense
# tensors.
DENSE = ", dense"
COPY, HANDED = (
    "copy",
    "handed over",
)  # further kinds of steps that are timed besides the steps with exchange
LIMITS = {
    "pack": COPY,
    "sum": "raw allreduce",
}  # maps each phase to the kind of step whose time is the phase's lower limit


def measure(
    workers: int = 2,
    cases: Sequence[str] = ("mlp-1024", "mlp-2048", "cnn"),
    schedules: Sequence[str] = ("sequential", "overlap"),
    algorithm: str = "auto",
    network: str | Network | None = None,
    repeats: int = 5,
    bucket_bytes: int = 4 * 2**20,
    measure_others: Callable[[], None] | None = None,
    with_breakdown: bool = False,
) -> list[Row]:
    """Time three kinds of steps in turn: local, with exchange, and only an allreduce.

    A "local" step is a training step without exchange; all ranks run local steps concurrently.
    `labkit.bench.timing` describes the order in which the kinds of steps run, and how their
    times are compared.

    Args:
        workers: Number of ranks, with one thread each.
        cases: Names of benchmark cases in `labkit.bench.steps.CASES` and `WORD_CASES`.
        schedules: Names of the schedules of the gradient exchange.
        algorithm: Allreduce algorithm for the gradient buckets, see `Exchange`.
        network: Network to emulate; None: no emulation.
        repeats: Number of rounds over all cases and kinds of steps.
        bucket_bytes: Size of a gradient bucket in bytes, see `Exchange`.
        measure_others: Function that measures other frameworks. labkit calls it after each repeat.
        with_breakdown: Whether to divide the time that the schedule "sequential" adds to a step
            into phases. All ranks must be on one host.

    Returns: One row per case and kind of step ("local", "raw allreduce", or a schedule). Each row
        contains median, minimum and 90th percentile of the repeats' medians (ms). The row of a
        schedule contains the additional time that the exchange causes. The row also states whether
        all ranks end with the same weights. The row of any schedule except "sequential" contains
        the time that the schedule saves compared with "sequential". `ideal_saving_ms` is the time
        that an ideal link would save. An ideal link sends the same buckets in the best order
        (`labkit.records.timed_steps.Overlap`). For word models, each schedule has one row with
        sparse gradients (embedding rows). Each schedule of a word model also has a row for
        gradients that are converted to dense tensors.
    """
    refuse_unknown("case", cases, KNOWN)
    network = Network.parse(network)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    turns = repeats if measure_others else 1
    with Cluster(workers=workers) as cluster:
        for _ in range(turns):
            for name in cases:
                turn_repeats = repeats // turns
                options = (
                    name,
                    list(schedules),
                    algorithm,
                    turn_repeats,
                    bucket_bytes,
                    with_breakdown,
                )
                results[name] += cluster.call(_measure, *options, ranks=workers, network=network)[
                    :1
                ]
            if measure_others:
                measure_others()
    network_text = None if network is None else str(network)
    return [
        head("exchange", name, what, workers, network_text, repeats=repeats) | row
        for name in cases
        for what, row in _rows(_joined(results[name]))
    ]


def _joined(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join several measurements: concatenate their repeats, and combine their other values."""

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
    """Return the measurements of one benchmark case, by kind of step (runs on ranks)."""
    from labkit.exchange import Exchange

    kind_of_model = WordModel if name in WORD_CASES else BenchModel
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
    # The buffer contains zeros, because repeated sums of other values would overflow.
    buffer[...] = 0.0

    def sum_raw() -> None:
        # Ranks may poll while they wait, because no computation needs the cores.
        communicator.wait_policy.polite = False
        communicator.allreduce(buffer, exchanges[schedules[0]].choice.algorithm)

    steps["raw allreduce"] = sum_raw
    if where:
        handover_model = kind_of_model(KNOWN[name], communicator.rank)
        steps |= limit_steps(communicator, KNOWN[name].parameters, handover_model.step)
    taken = time_on_ranks(communicator, steps, repeats, counts)
    same = {
        kind: len(set(communicator.allgather(model.checksum()))) == 1
        for kind, model in models.items()
    }
    usual = exchanges[USUAL].timeline.events if where else ()
    all_events = communicator.allgather([*usual]) if where else []
    return {
        "seconds": taken.seconds,
        "where": phase_medians(all_events, repeats * STEPS) if where else {},
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
    """Return an averaging function that first converts all gradients to dense tensors."""

    def call(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        import tensorflow as tf

        return mean([tf.convert_to_tensor(gradient) for gradient in gradients])

    return call


def _events(exchange: Exchange, steps: int) -> dict[str, float]:
    """Return the timeline events per step, and the seconds to record one event."""
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
    """Return the median communication delay per step, compared with an ideal link."""
    import pandas as pd

    from labkit.exchange import timeline_rows
    from labkit.records.timed_steps import overlaps

    events = pd.DataFrame(timeline_rows(communicator.allgather(list(timeline.events))))
    return float(np.median([one.exposed - one.ideal for one in overlaps(events)[-steps:]]))


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """Yield the name and the row of each kind of step, then the rows of the breakdown."""
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
        yield from breakdown_rows(found["where"], found["seconds"], found["added"], USUAL)


def _saved(added: dict[str, list[float]], kind: str, delay: float) -> Row:
    """Return how much time a schedule saves compared with `USUAL`, and the ideal saving (ms)."""
    saved = 1e3 * (np.array(added[USUAL]) - np.array(added[kind]))
    return {
        "saved_ms": float(np.median(saved)),
        "saved_min_ms": float(saved.min()),
        "saved_max_ms": float(saved.max()),
        "ideal_saving_ms": float(np.median(saved)) + 1e3 * delay,
    }


def limit_steps(
    communicator: Communicator, elements: int, step: Callable[[Averaging], Callable[[], object]]
) -> dict[str, Callable[[], object]]:
    """Return steps that each do only a part of the exchange, as lower limits of its phases.

    Args:
        communicator: Communicator of the ranks.
        elements: Total number of elements of all gradients.
        step: Function that builds a training step from a function that averages gradients.

    Returns: Two named functions. The first copies as many bytes as the exchange packs into shared
        memory. The second function is a training step. It passes its gradients to Python, and reads
        values from shared memory as if they were averages.
    """
    shared, own = communicator.allocate(elements), np.zeros(elements, np.float32)
    shared[...] = 0.0
    return {COPY: lambda: np.copyto(shared, own), HANDED: step(lambda g: _handed(g, shared))}


def _handed(gradients: list[tf.Tensor], shared: np.ndarray) -> list[tf.Tensor]:
    import tensorflow as tf

    ends = np.cumsum([gradient.shape.num_elements() for gradient in gradients])
    parts = np.split(shared, ends[:-1])
    means = [part.reshape(g.shape) for part, g in zip(parts, gradients, strict=True)]
    outputs = tf.numpy_function(lambda *_: means, gradients, [g.dtype for g in gradients])
    return [tf.ensure_shape(mean, g.shape) for mean, g in zip(outputs, gradients, strict=True)]


def phase_medians(events: Sequence[Sequence[Event]], steps: int) -> dict[str, float]:
    """Return the median seconds of each phase of the last `steps` steps, from all ranks' timelines.

    The timelines of all ranks use one clock. "pack" is the packing time of the rank that finishes
    packing last. "sum" is the time from the end of the last rank's packing until all ranks have the
    mean. "wait" is the time that a rank waits for the last rank, averaged over the ranks. The
    slowest rank does not wait, so the "wait" time does not lengthen its step.
    """
    packs = np.array(
        [_last("pack", rank_events, steps) for rank_events in events]
    )  # (ranks, steps, 2)
    sums = np.array([_last("communicate", rank_events, steps) for rank_events in events])
    ends = packs[..., 1]
    slowest = np.argmax(ends, 0), np.arange(ends.shape[1])
    lines = {
        "pack": (ends - packs[..., 0])[slowest],
        "sum": sums[..., 1].max(0) - ends.max(0),
        "wait": ends.max(0) - ends.mean(0),
    }
    return {line: float(np.median(seconds)) for line, seconds in lines.items()}


def _last(kind: str, events: Sequence[Event], steps: int) -> list[tuple[float, float]]:
    """Return the start and stop times of the last `steps` events of a kind (one event per step)."""
    return [event[3:] for event in events if event[0] == kind][-steps:]


def breakdown_rows(
    medians: Mapping[str, float],
    seconds: Mapping[str, Sequence[float]],
    added: Mapping[str, Sequence[float]],
    schedule: str,
) -> Iterator[tuple[str, Row]]:
    """Yield each phase of the breakdown: its name, and a row with its time and lower limit (ms).

    The lower limit for packing is the time of a simple copy. The lower limit for the sum is the
    time of a full allreduce. Packing may take less time than its lower limit. A rank does not pack
    the elements that it sums itself.

    Args:
        medians: Seconds of the phases, as `phase_medians` returns them.
        seconds: Seconds per step for each kind of step, one value per repeat.
        added: Seconds that the exchange adds to each kind of step, per repeat.
        schedule: Exchange schedule whose added time is broken down.
    """
    whole = float(np.median(added[schedule]))
    handover = float(np.median(added[HANDED]))
    lines = {
        "pack": medians["pack"],
        "sum": medians["sum"],
        "pass gradients from TensorFlow and back": handover,
    }
    # The phase "other" is mostly the weight update, which reads memory that other ranks have
    # written.
    lines["other"] = whole - sum(lines.values())
    lines |= {"wait for other ranks (contained in the other lines)": medians["wait"], "all": whole}
    for line, line_seconds in lines.items():
        limit = float(np.median(seconds[LIMITS[line]])) if line in LIMITS else None
        row: Row = {
            "median_ms": 1e3 * line_seconds,
            "limit_ms": None if limit is None else 1e3 * limit,
        }
        yield f"where: {line}", row
