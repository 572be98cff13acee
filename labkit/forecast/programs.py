"""What strategies that are programs take: the very programs, played without values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Protocol

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.rows import cut
from labkit.forecast.asked import Asked, Taken
from labkit.forecast.calibration import Source
from labkit.forecast.hollow import Hollow
from labkit.forecast.hollow_stage import HollowStage
from labkit.forecast.hollow_world import HollowWorld, Tally
from labkit.forecast.neighbours import typical
from labkit.forecast.pace import Pace, drawn_law
from labkit.forecast.sums import NOTHING, both
from labkit.network import ComputeTime, Network, Slowdown, slower_than_fastest
from labkit.programs import Diary, Parts, Program, Roles
from labkit.programs.diary import Row
from labkit.programs.times import Laws
from labkit.programs.virtual import VirtualWorld

WARM, STEPS = 10, 30  # of each worker, before and while it is looked at
MOST = 16  # workers that are played, where these speak to each other one by one
MEET = 512  # likewise, where all meet


class Plays(Protocol):
    """What is asked of a strategy that is a program; see `labkit.strategies.Played`."""

    @property
    def replica_cut(self) -> int | tuple[int, int]:
        """Into how many stages a worker is cut, or over which grid; 1: it is whole."""

    def copies(self, workers: int) -> Sequence[int]:
        """Who holds weights of its own."""

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[Parts]:
        """What each server holds."""

    def hosts(self, workers: int) -> Sequence[int]:
        """The place of each worker, of each server, then of others."""

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """What this one does."""


class Crowd(NamedTuple):
    """A few workers that are played in the place of many.

    Attributes:
        strategy: as the few have it.
        workers: how many they are.
        servers: how many times as much comes to each server as the few send.
        everyone: likewise to each worker, and what it predicts.
    """

    strategy: Plays
    workers: int
    servers: float = 1.0
    everyone: float = 1.0


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
    diary: Diary
    roles: Roles
    overheads: bool

    @property
    def seconds(self) -> float:
        """Of a global batch."""
        return (self.end - self.begin) / self.batches


def of_program(asked: Asked, strategy: Plays, cycle: int = 1, crowd: Crowd | None = None) -> Taken:
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
    parts = {name: scale * each for name, each in parts.items()}
    periods = found.of_batches.reshape(-1, cycle).mean(1)
    low, high = np.quantile(periods, (0.05, 0.95)).tolist()
    message = asked.once("message") if found.overheads else NOTHING
    links = found.tally.between(found.begin, found.end, "link ")
    return Taken(
        parts=parts,
        spread=typical(step, parts, message),
        nbytes={name: each / found.batches for name, each in links.items()},
        memory=_memory(asked, strategy),
        sources=_sources(asked, crowd),
        more={**_more(found, spent, asked.workers), "step_low": low, "step_high": high},
    )


def play(asked: Asked, cycle: int, crowd: Crowd) -> Play:
    """Play a program for as many steps as show its pace."""
    experiment, strategy, workers = asked.experiment, crowd.strategy, crowd.workers
    if strategy.replica_cut != 1:
        raise InvalidInput(
            f"workers that are cut (stages or grid = {strategy.replica_cut}) have no forecast; "
            "give stages=1 and no grid, or ask Pipeline or LocallyConnected"
        )
    roles = roles_of(asked, strategy, workers)
    shares = experiment.capacities or [1.0] * asked.workers
    rows = np.diff(cut(experiment.batch_size, shares)).tolist()[:workers]
    outputs = asked.model.layers[-1].out / 4 if asked.model.layers else 1.0
    stage = HollowStage(
        rows, roles.weights.size, str(roles.weights.dtype), asked.model.slots, outputs
    )
    diary, tally = Diary(stage, roles.steps, writers=range(workers)), Tally()
    network, crowded = _crowded(asked, roles, crowd)
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
    warm, steps = (WARM, STEPS) if workers <= 4 * MOST else (1, 1)
    warm, steps = (cycle * math.ceil(each / cycle) for each in (warm, steps))
    last = (warm + steps) * workers

    def enough(world: VirtualWorld) -> None:
        if len(stage.rows) >= last:
            raise _Enough

    with suppress(_Enough):
        world.play(enough)
    ends = np.sort([now for now, _ in stage.rows])[workers - 1 : last : workers]
    ends = ends[warm - 1 :]
    begin, end, batches = float(ends[0]), float(ends[-1]), len(ends) - 1
    of_batches, overheads = np.diff(ends), pace.overheads
    return Play(stage.rows, begin, end, batches, of_batches, tally, diary, roles, overheads)


def shapes_of(asked: Asked) -> list[tuple[int, ...]]:
    """Of all weights that are trained, in the order of the model."""
    return [shape for layer in asked.model.layers for shape in layer.weights]


def _slowed(asked: Asked, workers: int) -> dict[int, Slowdown]:
    """Who is slow; where few are played in the place of many, the first ones."""
    slow = {**(asked.network.slow if asked.network else {}), **asked.experiment.slow}
    if workers == asked.workers:
        return slow
    return dict(enumerate(law for _, law in sorted(slow.items())[:workers]))


def roles_of(asked: Asked, strategy: Plays, workers: int) -> Roles:
    """Who is there, with hollow weights."""
    experiment, shapes = asked.experiment, shapes_of(asked)
    dtype = "float64" if experiment.precision == "float64" else "float32"
    weights: Any = Hollow(sum(map(math.prod, shapes)), dtype)
    sizes = [sum(map(math.prod, layer.weights)) for layer in asked.model.layers if layer.weights]
    return Roles(
        workers,
        list(strategy.parts(shapes)),
        experiment.epoch_steps or 10**6,
        10**6,
        weights,
        list(strategy.hosts(workers)),
        experiment.seed,
        slower=slower_than_fastest(_slowed(asked, workers), workers),
        layers=sizes,
        rate=experiment.learning_rate or 0.01,
    )


def _pace(asked: Asked, roles: Roles, rows: Sequence[int], crowd: Crowd) -> Pace:
    """What everybody takes, by what was measured."""
    experiment = asked.experiment
    given = experiment.compute or ComputeTime()
    measures = given.seconds is None and given.values is None
    known: dict[int, Laws] = {}
    slow = _slowed(asked, crowd.workers)
    later = {(worker, step): seconds for worker, step, seconds in experiment.later}
    for each in set(rows):
        law, seconds, update = given, 0.0, given.update or 0.0
        if measures:
            step = asked.step(max(1, each))
            spread = reduce(both, (step.forward, step.backward, step.other))
            law, seconds = drawn_law(asked, given, spread), spread.median
            update = step.update.median if given.update is None else given.update
        more = law, slow, experiment.seed, seconds, update, later
        known[each] = Laws(*more, experiment.faults)
    sizes = {n: roles.part(n).size / max(1, roles.weights.size) for n in roles.servers}
    if not measures:
        sizes = dict.fromkeys(sizes, 1.0)
    return Pace(
        *(asked, [known[each] for each in rows], sizes, roles.hosts),
        *(crowd.servers, crowd.servers * crowd.workers / asked.workers, crowd.everyone),
        overheads=not asked.virtual and (asked.emulated or asked.network is None),
    )


def _crowded(asked: Asked, roles: Roles, crowd: Crowd) -> tuple[Network | None, dict[int, float]]:
    """The network on which few have the traffic of many, and whose it is."""
    network = asked.network
    if network is None:
        return None, {}
    places = range(1 + max(roles.hosts))
    crowded = dict.fromkeys(places, crowd.everyone) if crowd.everyone > 1 else {}
    if crowd.servers != 1:
        crowded |= {roles.hosts[n]: crowd.servers for n in range(roles.workers, len(roles.hosts))}
    slow = {rank: law for rank, law in _slowed(asked, crowd.workers).items() if rank in places}
    for place, factor in crowded.items():
        law = slow.get(place, Slowdown())
        slow[place] = law.model_copy(update={"transfer": law.transfer * factor})
    return network.model_copy(update={"slow": slow}), crowded


def _memory(asked: Asked, strategy: Plays) -> dict[str, float]:
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
    late = [each["staleness"] for each in events]
    if late and found.roles.workers == workers:
        more["staleness"] = float(np.mean(late))
        more["dropped"] = sum(each["update"] < 0 for each in events) / len(events)
    return more


def _sources(asked: Asked, crowd: Crowd) -> tuple[Source, ...]:
    given = asked.experiment.compute
    said = given is not None and (given.seconds is not None or given.values is not None)
    known = [
        Source("compute", "the experiment's own law" if said else "calibration, by rows"),
        Source("order and waiting", "its program, played without values"),
        Source("messages", "the network, shared" if asked.network else "overheads alone"),
    ]
    if crowd.workers < asked.workers:
        few = f"{crowd.workers} workers in the place of {asked.workers}"
        known.append(Source("crowd", f"{few}, with as much traffic at each place as all have"))
    return tuple(known)
