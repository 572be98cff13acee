"""The virtual clock without values: programs as they are, messages as heavy as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from labkit.compression import Compressor, Mean
from labkit.forecast.allreduce_cost import Sums
from labkit.forecast.load import FEW, VALUE, Load
from labkit.forecast.meta_vector import MetaVector
from labkit.forecast.pace import Pace
from labkit.network import Links, Network
from labkit.network.topology import Seconds
from labkit.programs import Backend, Code, CodecChannel, EventLog, Message, Predict, Update
from labkit.programs.actions import Action, Program, Vector
from labkit.programs.virtual_allreduce import Together
from labkit.programs.virtual_runtime import VirtualRuntime
from labkit.simulate import Simulation


class Tally:
    """What was spent or carried, by name, and when; asked for between two moments."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[float, float]]] = {}

    def add(self, name: str, now: float, amount: float) -> None:
        """So much more, at a moment (s)."""
        self._found.setdefault(name, []).append((now, amount))

    def between(self, begin: float, end: float, prefix: str = "") -> dict[str, float]:
        """Sums of what was added in [begin, end), of the names that begin so, without that."""
        return {
            name.removeprefix(prefix): sum(each for now, each in own if begin <= now < end)
            for name, own in self._found.items()
            if name.startswith(prefix)
        }


class _HollowTogether(Together):
    """Allreduces whose values nobody has; those that were simulated once are known.

    Among few on a network as on the virtual clock; elsewhere the last to come begins, and all are
    done as `Sums` says.
    """

    def __init__(
        self,
        workers: int,
        network: Network | None,
        shapes: Sequence[tuple[int, ...]],
        pace: Pace,
        tally: Tally,
    ) -> None:
        super().__init__(workers, network, shapes, 0)
        self._pace, self._tally = pace, tally
        self._codec = 0.0, 0.0  # s before and after the exchange
        self._simulations: dict[tuple[object, ...], Simulation] = {}
        self._now = 0.0

    def _exchange(
        self, kind: str, size: float, came: Seconds, algorithm: str
    ) -> tuple[Seconds, Seconds, Seconds]:
        (encode, decode), self._codec = self._codec, (0.0, 0.0)
        self._now = float(came.max())
        self._tally.add("codec", self._now, (encode + decode) * len(came))
        came, pace = came + encode, self._pace
        exact = len(came) == pace.asked.workers <= FEW
        if not exact or (self._network is None and not pace.asked.virtual):
            load = Load("sum" if kind == "sum" else "gather", size)
            taken = Sums(pace.asked, algorithm, size).take(load)
            for link, nbytes in taken.links.items():
                self._tally.add(f"link {link}", self._now, nbytes)
            self._tally.add("sent", self._now, taken.sent)
            none = np.zeros(len(came))
            return np.full(len(came), came.max() + taken.seconds.median + decode), none, none
        clock, messages, wire = super()._exchange(kind, size, came, algorithm)
        rounds = messages.max()
        if pace.overheads and rounds:
            clock = clock + rounds * pace.once("emulated", wire.max() / rounds)
        self._tally.add("sent", self._now, float(wire.sum()))
        return clock + decode, messages, wire

    def _simulated(self, name: str, nbytes: float, network: Network, came: Seconds) -> Simulation:
        key = name, nbytes, came.tobytes()
        if key not in self._simulations:
            self._simulations[key] = super()._simulated(name, nbytes, network, came)
        found = self._simulations[key]
        for link, each in zip(found.links, found.carried.tolist(), strict=True):
            self._tally.add(f"link {link}", self._now, each)
        return found

    def _compressed(
        self, compressor: Compressor, weighted: Sequence[Vector], fragment: int
    ) -> tuple[Vector, list[tuple[str, float]]]:
        encode, decode, payload = self._pace.codec(compressor, VALUE * weighted[0].size)
        sends, decoded = [], 1
        for start, stop, shape in self._pieces(compressor, weighted[0].size):
            for kind, size in compressor.collectives(
                shape, payload * (stop - start) / weighted[0].size
            ):
                sends.append(("sum" if kind is Mean else "gather", float(size)))
                decoded += 0 if kind is Mean else self._pace.asked.workers
        self._codec = encode, decode * decoded
        return weighted[0], sends


class HollowWorld(VirtualRuntime):
    """Plays programs on the virtual clock with hollow values: only times and bytes are true.

    Beside what `VirtualWorld` counts, codecs take what was measured, where the clock is the wall's.

    Args:
        programs, hosts, scenes, diary, network, shapes: see there.
        pace: how long things take.
        tally: takes down bytes by link, and what else was spent.
        crowded: how many ranks' traffic each of these places stands for; 1 elsewhere.
        many: how many workers each one stands for.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        hosts: Sequence[int],
        scenes: Backend,
        diary: EventLog,
        pace: Pace,
        tally: Tally,
        network: Network | None = None,
        shapes: Sequence[tuple[int, ...]] = (),
        crowded: Mapping[int, float] | None = None,
        many: float = 1.0,
    ) -> None:
        super().__init__(programs, hosts, scenes, diary, pace, network, shapes)
        self._together = _HollowTogether(len(programs), network, shapes, pace, tally)
        self._pace, self._tally = pace, tally
        self._crowded, self._many = crowded or {}, many
        self._links = Links(network, 1 + max(hosts)) if network is not None else None
        self._ways: dict[tuple[int, int], list[tuple[str, float]]] = {}

    def _act(self, number: int, action: Action) -> tuple[bool, Any]:
        pace = self._pace
        match action:
            case Code(call) if isinstance(call, partial):
                end: Any = (
                    call.func
                )  # of what a worker and a server say: a method of a `CodecChannel`
                spent, found = self._said(end.__self__, end.__name__, *call.args)
                if not spent:
                    return True, found
                self._diary.coded(number, spent)
                self._answer(self.now + spent, number, found)
                return False, None
            case Update(of=of):
                if number in pace.shares:
                    pace.factor = pace.alone if len(of) == 1 else pace.mean
                else:  # a worker's own
                    self._tally.add("update", self.now, pace.updated(number, 0.0))
            case Predict():
                pace.factor = pace.predictions
        done = super()._act(number, action)
        pace.factor = 1.0
        return done

    def _said(self, talk: CodecChannel, what: str, values: Vector) -> tuple[float, Any]:
        """What a call of one end of a talk takes, s, and what it gives."""
        if talk.compressor is None:
            return 0.0, getattr(talk, what)(values)
        encode, decode, payload = self._pace.codec(talk.compressor, VALUE * talk.size)
        if what in ("push", "answer"):
            return encode, MetaVector(payload, np.uint8)
        return decode, MetaVector(talk.size, talk.dtype)

    def _way(self, source: int, to: int) -> list[tuple[str, float]]:
        """The links between two places, and how many ranks' traffic each stands for."""
        if (source, to) not in self._ways:
            assert self._links is not None  # for the type checker: else nobody asks
            way = self._links.way(np.array([source]), np.array([to]))
            ends = [*((each, source) for each in way.departure), *((e, to) for e in way.arrival)]
            self._ways[source, to] = [
                (self._links.names[int(link[0])], self._crowded.get(end, 1.0))
                for link, end in ends
                if link[0] >= 0
            ]
        return self._ways[source, to]

    def _send(self, source: int, to: int, message: Message) -> None:
        ends = self._hosts[source], self._hosts[to]
        if message.values is not None and ends[0] != ends[1]:
            nbytes = message.values.nbytes
            self._tally.add("sent", self.now, self._many * nbytes)
            for link, crowd in self._way(*ends) if self._links is not None else ():
                self._tally.add(f"link {link}", self.now, crowd * nbytes)
        super()._send(source, to, message)
