"""Cost of an allreduce: simulated from its schedule on a network, or measured on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from labkit.common.errors import InvalidInput
from labkit.communicator.algorithms import UNMETERED, refuse_unmetered
from labkit.exchange.autotune import fastest
from labkit.forecast.calibration import Provenance, Spread
from labkit.forecast.load import FEW, Load, candidates, load_cost
from labkit.forecast.query import Query
from labkit.forecast.time_distributions import (
    NOTHING,
    add_spreads,
    interpolate,
    range_note,
    scale_spread,
)
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import exact_form


class CollectiveEstimate(NamedTuple):
    """The estimated cost of a collective.

    Attributes:
        seconds: Seconds until the last rank is done.
        links: Bytes that cross each link; with many ranks, only the busiest link of each type.
        sent: Total bytes that all ranks together send.
    """

    seconds: Spread
    links: Mapping[str, float] = {}
    sent: float = 0.0


@dataclass(frozen=True)
class AllReduceCosts:
    """The costs of all allreduces of an experiment, which use a single algorithm.

    Args:
        query: Query with the ranks, their network and the calibration.
        algorithm: Name in `labkit.communicator.ALGORITHMS`, or "auto".
        largest: Bytes of the largest buffer, by which "auto" chooses the algorithm.
        dense: Whether buffers are sent uncompressed.
        turns: Whether messages use a shared link one after the other (FIFO) instead of at the same
            time.
    """

    query: Query
    algorithm: str
    largest: float
    dense: bool = True
    turns: bool = False

    @cached_property
    def network(self) -> Network | None:
        """The network between the ranks, without compute slowdowns."""
        network = self.query.network
        if network is None:
            return None
        prompt = network.with_full_speed_compute
        return prompt.model_copy(update={"sharing": "fifo"}) if self.turns else prompt

    @cached_property
    def gamma(self) -> float:
        """The fitted seconds to add a byte; 0 on emulated networks (included in their overhead)."""
        fit = self.query.fits.get("host")
        return 0.0 if fit is None or self.query.emulated or self.query.virtual else fit.gamma

    @cached_property
    def chosen(self) -> str:
        """The name of the algorithm; for "auto", the one that `labkit.exchange.autotune` chooses.

        Raises:
            InvalidInput: The algorithm cannot run on the emulated network.
        """
        network, size = self.network, self.query.workers
        if network is not None and (self.query.emulated or self.algorithm != "mpi"):
            refuse_unmetered(self.algorithm, network)
        if self.algorithm != "auto" or size == 1:
            return self.algorithm
        if not self.dense and not self.query.emulated:
            return "mpi"
        if network is None:
            names = [name for name in ("mpi", "ring", "shared_memory") if self._measurements(name)]
            seconds = {name: self._measured(name, self.largest).median for name in names}
            return fastest(seconds, "measured").algorithm if names else "shared_memory"
        if self.query.emulated:
            names = list(ALLREDUCE)
        else:
            between = [n for n, collective in ALLREDUCE.items() if collective.between is not None]
            names = ["ring", *(between if network.hosts is not None else ())]
        seconds = candidates(names, size, self.largest, network, self.gamma)
        return fastest(seconds, f"simulated on {network}").algorithm

    @cached_property
    def source(self) -> Provenance:
        """A description of how the costs of the allreduces were obtained."""
        network = self.network
        if self.query.workers == 1:
            return Provenance("sums", "one rank needs no allreduce")
        if network is None:
            measurements = self._measurements(self.chosen)
            note = range_note(self.largest, (nbytes for nbytes, _ in measurements))
            method = f"measured, interpolated between sizes{note and note + ' bytes'}"
            method = method if measurements else "fitted to measurements"
            return Provenance(f"sums by {self.chosen}", method)
        size, name = self.query.workers, self._schedule
        is_exact = size > FEW and exact_form(name, size, self.largest, network) is not None
        method = "by its closed form, which is exact here" if is_exact else "message by message"
        model_note = (
            ", as a model of the MPI library's algorithm" if self.chosen in UNMETERED else ""
        )
        additions = (
            ", plus the measured overhead of the network emulation" if self.query.emulated else ""
        )
        additions += ", with a fitted time per byte of addition" if self.gamma else ""
        return Provenance(
            f"sums by {name}{model_note}", f"simulated on {network}, {method}{additions}"
        )

    def take(self, load: Load) -> CollectiveEstimate:
        """Return the estimated cost of one collective that transfers the data `load`.

        Raises:
            InvalidInput: The collective was not measured.
        """
        size = self.query.workers
        if size == 1 or load.nbytes <= 0 or (self.query.virtual and self.network is None):
            return CollectiveEstimate(NOTHING)
        if self.network is None:
            return CollectiveEstimate(self._measured(self.chosen, load))
        name = self._schedule
        if load.kind == "gather" and ALLREDUCE[name].gathers is not None:
            name, load = "allgather_ring", Load("sum", size * load.nbytes)
        gamma = self.gamma if load.kind == "sum" else 0.0
        seconds, links, sent, rounds = load_cost(name, size, load, self.network, gamma)
        spread = Spread(median=seconds, low=seconds, high=seconds)
        if self.query.emulated:
            for nbytes in rounds:
                spread = add_spreads(spread, self.query.overhead_cost("emulated", nbytes))
        return CollectiveEstimate(spread, links, sent)

    @property
    def _schedule(self) -> str:
        """The name of the simulated schedule; a ring stands for the MPI library's own algorithm."""
        return "ring" if self.chosen == "mpi" else self.chosen

    def _measured(self, name: str, load: Load | float) -> Spread:
        """Return the measured time; a gather takes half the time of an allreduce of equal size."""
        if isinstance(load, Load) and load.kind != "sum":
            total = load.total_bytes(self.query.workers)
            return scale_spread(self._measured("mpi" if name in UNMETERED else name, total), 0.5)
        nbytes = load.nbytes if isinstance(load, Load) else load
        if measurements := self._measurements(name):
            return interpolate(measurements, nbytes)
        fit = self.query.fits.get("memory" if name == "shared_memory" else "host")
        schedule = "ring" if name == "shared_memory" else name
        if fit is None or not fit.beta or schedule not in ALLREDUCE:
            raise InvalidInput(
                f"algorithm={name!r} among {self.query.workers} ranks of one machine was not "
                "measured; measure it with `labkit calibrate`, or give a network"
            )
        load = Load("sum", nbytes)
        seconds = load_cost(schedule, self.query.workers, load, fit.network(), fit.gamma).seconds
        return Spread(
            median=seconds, low=seconds * max(0.0, 1 - fit.worst), high=seconds * (1 + fit.worst)
        )

    def _measurements(self, name: str) -> list[tuple[float, Spread]]:
        """Return (bytes, seconds) of an algorithm's measurements with this number of ranks."""
        key = name, self.query.workers
        return [
            (collective.nbytes, collective.seconds)
            for collective in self.query.calibration.collectives
            if collective.level != "link" and (collective.algorithm, collective.workers) == key
        ]
