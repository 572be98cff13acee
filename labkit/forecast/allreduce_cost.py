"""What a sum of gradients takes: on a network by the rows of its schedule, here as measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from labkit.common.errors import InvalidInput
from labkit.communicator.algorithms import UNMETERED, refuse_unmetered
from labkit.exchange.autotune import least
from labkit.forecast.calibration import Source, Spread
from labkit.forecast.load import FEW, Load, candidates, carried
from labkit.forecast.query import Query
from labkit.forecast.time_distributions import NOTHING, beyond, both, by_bytes, times
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import exact_form


class Carried(NamedTuple):
    """What a collective takes.

    Attributes:
        seconds: until the last rank is done.
        links: bytes that cross each; of many ranks the busiest of each kind.
        sent: bytes of all ranks.
    """

    seconds: Spread
    links: Mapping[str, float] = {}
    sent: float = 0.0


@dataclass(frozen=True)
class Sums:
    """The sums of an experiment's ranks, by one algorithm.

    Args:
        asked: the ranks, where they are, and what was measured.
        algorithm: a name of `labkit.communicator.ALGORITHMS`, or "auto".
        largest: bytes of the largest buffer, by which "auto" is chosen.
        dense: buffers travel as they are.
        turns: ranks take turns at links that they share.
    """

    asked: Query
    algorithm: str
    largest: float
    dense: bool = True
    turns: bool = False

    @cached_property
    def network(self) -> Network | None:
        """On which they meet; its ranks come when they come."""
        network = self.asked.network
        if network is None:
            return None
        prompt = network.prompt
        return prompt.model_copy(update={"sharing": "fifo"}) if self.turns else prompt

    @cached_property
    def gamma(self) -> float:
        """Seconds to add a byte, as fitted; what emulating a network takes has it already."""
        fit = self.asked.fits.get("host")
        return 0.0 if fit is None or self.asked.emulated or self.asked.virtual else fit.gamma

    @cached_property
    def chosen(self) -> str:
        """The algorithm, as `labkit.exchange.autotune` finds it where it is "auto".

        Raises: InvalidInput, for one that cannot run there.
        """
        network, size = self.network, self.asked.workers
        if network is not None and (self.asked.emulated or self.algorithm != "mpi"):
            refuse_unmetered(self.algorithm, network)
        if self.algorithm != "auto" or size == 1:
            return self.algorithm
        if not self.dense and not self.asked.emulated:
            return "mpi"
        if network is None:
            names = [name for name in ("mpi", "ring", "shared_memory") if self._known(name)]
            seconds = {name: self._measured(name, self.largest).median for name in names}
            return least(seconds, "measured").algorithm if names else "shared_memory"
        if self.asked.emulated:
            names = list(ALLREDUCE)
        else:
            between = [n for n, collective in ALLREDUCE.items() if collective.between is not None]
            names = ["ring", *(between if network.hosts is not None else ())]
        seconds = candidates(names, size, self.largest, network, self.gamma)
        return least(seconds, f"simulated on {network}").algorithm

    @cached_property
    def source(self) -> Source:
        """Where their seconds are from."""
        network = self.network
        if self.asked.workers == 1:
            return Source("sums", "one rank has nothing to add up")
        if network is None:
            known = self._known(self.chosen)
            far = beyond(self.largest, (nbytes for nbytes, _ in known))
            how = f"measured, on a line between sizes{far and far + ' bytes'}"
            how = how if known else "fitted to what was measured"
            return Source(f"sums by {self.chosen}", how)
        size, name = self.asked.workers, self._schedule
        form = size > FEW and exact_form(name, size, self.largest, network) is not None
        how = "by its closed form, which is exact here" if form else "row by row"
        stands = ", which stands for the MPI library's own" if self.chosen in UNMETERED else ""
        added = ", and what emulating it takes longer, measured" if self.asked.emulated else ""
        added += ", adding a byte as fitted" if self.gamma else ""
        return Source(f"sums by {name}{stands}", f"simulated on {network}, {how}{added}")

    def take(self, load: Load) -> Carried:
        """Seconds and bytes of one of them.

        Raises: InvalidInput, where it was not measured.
        """
        size = self.asked.workers
        if size == 1 or load.nbytes <= 0 or (self.asked.virtual and self.network is None):
            return Carried(NOTHING)
        if self.network is None:
            return Carried(self._measured(self.chosen, load))
        name = self._schedule
        if load.kind == "gather" and ALLREDUCE[name].gathers is not None:
            name, load = "allgather_ring", Load("sum", size * load.nbytes)
        gamma = self.gamma if load.kind == "sum" else 0.0
        seconds, links, sent, rounds = carried(name, size, load, self.network, gamma)
        spread = Spread(median=seconds, low=seconds, high=seconds)
        if self.asked.emulated:
            for nbytes in rounds:
                spread = both(spread, self.asked.once("emulated", nbytes))
        return Carried(spread, links, sent)

    @property
    def _schedule(self) -> str:
        """What is simulated; the library does not say what it sends: the ring sends the least."""
        return "ring" if self.chosen == "mpi" else self.chosen

    def _measured(self, name: str, load: Load | float) -> Spread:
        """On this machine. Payloads of all ranks travel as half of a sum of as many bytes does."""
        if isinstance(load, Load) and load.kind != "sum":
            whole = load.whole(self.asked.workers)
            return times(self._measured("mpi" if name in UNMETERED else name, whole), 0.5)
        nbytes = load.nbytes if isinstance(load, Load) else load
        if known := self._known(name):
            return by_bytes(known, nbytes)
        fit = self.asked.fits.get("memory" if name == "shared_memory" else "host")
        schedule = "ring" if name == "shared_memory" else name
        if fit is None or not fit.beta or schedule not in ALLREDUCE:
            raise InvalidInput(
                f"algorithm={name!r} among {self.asked.workers} ranks of one machine was not "
                "measured; measure it by `labkit calibrate`, or give a network"
            )
        load = Load("sum", nbytes)
        seconds = carried(schedule, self.asked.workers, load, fit.network(), fit.gamma).seconds
        return Spread(
            median=seconds, low=seconds * max(0.0, 1 - fit.worst), high=seconds * (1 + fit.worst)
        )

    def _known(self, name: str) -> list[tuple[float, Spread]]:
        """Bytes and seconds of this algorithm among as many ranks of this machine."""
        wanted = name, self.asked.workers
        return [
            (collective.nbytes, collective.seconds)
            for collective in self.asked.calibration.collectives
            if collective.level != "link" and (collective.algorithm, collective.workers) == wanted
        ]
