"""What strategies that are programs take: the very programs, played without values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.forecast.calibration import Source
from labkit.forecast.meta_backend import HollowStage
from labkit.forecast.meta_environment import HollowWorld, Tally
from labkit.forecast.neighbours import typical
from labkit.forecast.order_statistics import of_run
from labkit.forecast.pace import Pace, drawn_law
from labkit.forecast.query import Query, StepForecast, trust
from labkit.forecast.steady_state import Steady
from labkit.forecast.time_distributions import NOTHING, both, nine_tenths
from labkit.forecast.worker_sampling import (
    PLAYED,
    Crowd,
    ProgramWorkers,
    crowded_network,
    roles_of,
    shapes_of,
    slowed_of,
)
from labkit.network import ComputeTime
from labkit.programs import EventLog, Roles
from labkit.programs.event_log import Row
from labkit.programs.timing import TimingModel
from labkit.programs.virtual_runtime import VirtualRuntime

WARM, STEPS = 10, 30  # of each worker, before and while it is looked at


class _Enough(Exception):
    """All steps that are looked at are over."""


@dataclass(frozen=True)
class Play:
    """A program that was played until its pace is steady.

    Attributes:
        rows: of workers' steps, with when each was over, s.
        begin, end: s, between which they are looked at.
        batches: global ones in that time.
        of_batches: s that each of these took.
        tally, diary: of all that was played.
        roles: who has played.
        overheads: whether messages took what labkit adds to them here.
    """

    rows: Sequence[tuple[float, Row]]
    begin: float
    end: float
    batches: int
    of_batches: np.ndarray
    tally: Tally
    diary: EventLog
    roles: Roles
    overheads: bool

    @property
    def seconds(self) -> float:
        """Of a global batch."""
        return (self.end - self.begin) / self.batches


def of_program(
    asked: Query, strategy: ProgramWorkers, cycle: int = 1, crowd: Crowd | None = None
) -> StepForecast:
    """What a strategy takes that is a program, by playing it.

    Args:
        asked: what is asked.
        strategy: the program.
        cycle: steps of a worker after which what it exchanges begins anew.
        crowd: who is played where workers are more, and the network is one switch; None: all.
    """
    plain = asked.network is None or (asked.network.hosts, asked.network.links) == (None, None)
    if crowd is None or not plain:
        crowd = Crowd(strategy, asked.workers)
    found = play(asked, cycle, crowd)
    step = asked.computed(asked.experiment.batch_size / asked.workers)
    looked = [row for now, row in found.rows if found.begin < now <= found.end]
    spent = found.tally.between(found.begin, found.end)
    sums = {
        name: sum(row[f"{name}_seconds"] for row in looked)
        for name in ("compute", "codec", "communicate", "wait")
    }
    own = {name: getattr(step, name).median for name in ("forward", "backward", "other")}
    whole = sum(own.values())
    shares = {n: each / whole for n, each in own.items()} if whole else {"backward": 1.0}
    parts = {name: share * sums["compute"] for name, share in shares.items()}
    update, coded = (spent.get(name, 0.0) for name in ("update", "codec"))
    parts |= {"update": update, "codec": sums["codec"] + coded, "wait": sums["wait"]}
    parts["wire"] = max(0.0, sums["communicate"] - update - coded)
    scale = found.seconds / (sum(parts.values()) or 1.0)
    parts = {name: scale * part for name, part in parts.items()}
    periods = found.of_batches.reshape(-1, cycle).mean(1)
    low, high = nine_tenths(periods)
    message = asked.once("message") if found.overheads else NOTHING
    links = found.tally.between(found.begin, found.end, "link ")
    return StepForecast(
        parts=parts,
        rows=max(asked.rows),
        spread=typical(asked, step, parts, message, math.sqrt(cycle) * of_run(periods)),
        nbytes={name: link / found.batches for name, link in links.items()},
        memory=_memory(asked, strategy),
        sources=_sources(asked, crowd, found),
        more={**_more(found, spent, asked.workers), "step_low": low, "step_high": high},
    )


def play(asked: Query, cycle: int, crowd: Crowd) -> Play:
    """Play a program for as many steps as show its pace: two cycles, where all go on alike."""
    strategy, workers = crowd.strategy, crowd.workers
    if strategy.replica_cut != 1:
        raise InvalidInput(
            f"workers that are cut (stages or grid = {strategy.replica_cut}) have no forecast; "
            "give stages=1 and no grid, or ask Pipeline or LocallyConnected"
        )
    roles = roles_of(asked, strategy, workers)
    rows = asked.rows[:workers]
    outputs = asked.model.layers[-1].out / asked.dtype.itemsize if asked.model.layers else 1.0
    stage = HollowStage(
        rows, roles.weights.size, str(roles.weights.dtype), asked.model.slots, outputs
    )
    diary, tally = EventLog(stage, roles.steps, writers=range(workers)), Tally()
    network, crowded = crowded_network(asked, roles, crowd)
    pace = _pace(asked, roles, rows, crowd)
    world = HollowWorld(
        {number: strategy.program(roles, number) for number in range(len(roles.hosts))},
        *(roles.hosts, stage, diary, pace, tally),
        network=network,
        shapes=shapes_of(asked),
        crowded=crowded,
        many=asked.workers / workers,
    )
    stage.now = lambda: world.now
    warm, steps = (WARM, STEPS) if workers <= 4 * PLAYED else (1, 1)
    warm, steps = (cycle * math.ceil(each / cycle) for each in (warm, steps))
    last = (warm + steps) * workers

    # What is steady only later would not be so in all steps that are looked at otherwise.
    watched = Steady(workers, cycle, 1 + warm // cycle)
    steady = watched if _repeats(asked, strategy, pace) else None

    def enough(world: VirtualRuntime) -> None:
        nonlocal warm, steps, last
        if steady is not None and steady.reached(stage.rows):
            warm, steps = (steady.cycles - 1) * cycle, cycle
            last = (warm + steps) * workers
        if len(stage.rows) >= last:
            raise _Enough

    with suppress(_Enough):
        world.play(enough)
    ends = np.sort([now for now, _ in stage.rows])[workers - 1 : last : workers]
    ends = ends[warm - 1 :]
    begin, end, batches = float(ends[0]), float(ends[-1]), len(ends) - 1
    of_batches, overheads = np.diff(ends), pace.overheads
    return Play(stage.rows, begin, end, batches, of_batches, tally, diary, roles, overheads)


def _repeats(asked: Query, strategy: ProgramWorkers, pace: Pace) -> bool:
    """Whether nothing is by chance, and no step otherwise than those before."""
    network, even = asked.network, all(law.even for law in pace.laws)
    # Which of two messages of one moment a link serves first, only rounding decides.
    prompt = network is None or (not network.jitter and network.sharing == "fair")
    return prompt and even and strategy.recurs(asked.experiment)


def _pace(asked: Query, roles: Roles, rows: Sequence[int], crowd: Crowd) -> Pace:
    """What everybody takes, by what was measured."""
    experiment = asked.experiment
    given = experiment.compute or ComputeTime()
    measures = given.seconds is None and given.values is None
    known: dict[int, TimingModel] = {}
    slow = slowed_of(asked, crowd.workers)
    later = {(worker, step): seconds for worker, step, seconds in experiment.later}
    for row in set(rows):
        law, seconds, update = given, 0.0, given.update or 0.0
        if measures:
            step = asked.step(max(1, row))
            spread = reduce(both, (step.forward, step.backward, step.other))
            law, seconds = drawn_law(asked, given, spread), spread.median
            update = step.update.median if given.update is None else given.update
        more = law, slow, experiment.seed, seconds, update, later
        known[row] = TimingModel(*more, experiment.faults)
    sizes = {n: roles.part(n).size / max(1, roles.weights.size) for n in roles.servers}
    if not measures:
        sizes = dict.fromkeys(sizes, 1.0)
    return Pace(
        *(asked, [known[row] for row in rows], sizes, roles.hosts),
        *(crowd.servers, crowd.servers * crowd.workers / asked.workers, crowd.everyone),
        overheads=not asked.virtual and (asked.emulated or asked.network is None),
    )


def _memory(asked: Query, strategy: ProgramWorkers) -> dict[str, float]:
    """Of the fullest rank: a worker with its activations, or a server with its optimizer."""
    worker = asked.memory(asked.experiment.batch_size / asked.workers)
    worker["buffers"] = worker["weights"]
    parts = strategy.parts(shapes_of(asked))
    if not parts:
        return worker
    most = max(part.size for part in parts) / max(1, asked.model.parameters)
    server = {name: most * worker[name] for name in ("weights", "gradients", "optimizer")}
    server["buffers"] = asked.workers * server["weights"]
    worker["optimizer"] = 0.0
    return max((worker, server), key=lambda each: sum(each.values()))


def _more(found: Play, spent: Mapping[str, float], workers: int) -> dict[str, float]:
    events = [e for e in found.diary.events if found.begin < e["applied"] <= found.end]
    more = {
        "played_workers": float(found.roles.workers),
        "sent": spent.get("sent", 0.0) / found.batches,
    }
    late = [event["staleness"] for event in events]
    if late and found.roles.workers == workers:
        more["staleness"] = float(np.mean(late))
        more["dropped"] = sum(event["update"] < 0 for event in events) / len(events)
    return more


def _sources(asked: Query, crowd: Crowd, found: Play) -> tuple[Source, ...]:
    given = asked.experiment.compute
    said = given is not None and (given.seconds is not None or given.values is not None)
    own = asked.computing(asked.experiment.batch_size / asked.workers, "by rows")
    known = [
        Source("compute", "the experiment's own law") if said else own,
        Source("order and waiting", "its program, played without values"),
        Source("messages", "the network, shared" if asked.network else "overheads alone"),
    ]
    if found.overheads:
        known.append(asked.overhead("message"))
    known += trust(asked)
    if crowd.workers < asked.workers:
        few = f"{crowd.workers} workers in the place of {asked.workers}"
        known.append(Source("crowd", f"{few}, with as much traffic at each place as all have"))
    return tuple(known)
