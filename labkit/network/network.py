"""The network model: latency, bandwidth, topology, and slow ranks, with named presets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import NormalDist
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from labkit import schedules
from labkit.common.errors import InvalidInput
from labkit.common.html import card, folded, line, pairs, table
from labkit.common.nearest import listed
from labkit.common.quantity_fields import BytesPerSecond, Seconds
from labkit.common.units import seconds_text
from labkit.common.validated import Checked
from labkit.network.compute_time import uniform
from labkit.schedules.round import Schedule

Rank: TypeAlias = Annotated[int, Field(ge=0)]
# Tables with more than MAX_UNFOLDED_LINKS links are folded (hidden until clicked).
MAX_UNFOLDED_LINKS = 12
_UNITS = ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s"), (1.0, "b/s"))


class Slowdown(Checked):
    """The factors by which a rank computes and transfers data more slowly than other ranks.

    Args:
        compute: The factor on compute times, or its mean if `distribution` is random; at least 1;
            default: 1.
        transfer: The factor on the time for which a message occupies the rank's links; default: 1.
        distribution: Distribution of the factor; "constant" (default), "uniform" on [1, 2 · compute
            - 1], "exponential" or "lognormal". An exponential factor is 1 plus an exponentially
            distributed random number. A lognormal factor is 1 plus a lognormal random
            number. The lognormal random number has σ = 1 and the mean compute - 1.
        pause: The interval (from, to) in which the rank computes nothing; default: none. The ends
            of the interval are seconds since the start of the run.
    """

    compute: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    transfer: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    distribution: Literal["constant", "uniform", "exponential", "lognormal"] = "constant"
    pause: tuple[Seconds, Seconds] | None = None

    @field_validator("pause")
    @classmethod
    def _forward(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] > value[1]:
            raise ValueError(f"pause={value} ends before it begins; give (from, to) in seconds")
        return value

    @model_serializer(mode="wrap")
    def _as_before_there_were_pauses(
        self, write: SerializerFunctionWrapHandler
    ) -> dict[str, object]:
        # The default value of `pause` is not serialized, so that hashes of earlier experiments
        # remain valid.
        fields: dict[str, object] = write(self)
        if self.pause is None:
            fields.pop("pause", None)
        return fields

    def resumes(self, start: float, stop: float) -> float:
        """Return the end time in s of a computation that would end at `stop` without the pause."""
        if self.pause is None or stop <= self.pause[0] or start >= self.pause[1]:
            return stop
        return stop + self.pause[1] - max(start, self.pause[0])

    def factor(self, number: float) -> float:
        """Return the factor by which a computation takes longer.

        Args:
            number: The probability of the quantile, a uniform random number in [0, 1).
        """
        excess = self.compute - 1
        if self.distribution == "uniform":
            return 1 + 2 * excess * number
        if self.distribution == "exponential":
            return float(1 - excess * np.log1p(-number))
        if self.distribution == "lognormal":
            z = NormalDist().inv_cdf(min(max(number, 1e-12), 1 - 1e-12))
            return float(1 + excess * np.exp(z - 0.5))
        return self.compute


def relative_compute_times(slow: Mapping[int, Slowdown], workers: int) -> list[float]:
    """Return the mean compute time of each worker relative to the fastest worker."""
    factors = [slow[worker].compute if worker in slow else 1.0 for worker in range(workers)]
    return [factor / min(factors) for factor in factors]


class Network(Checked):
    """A model of a network, which labkit emulates between processes or simulates.

    Args:
        latency: Seconds between the departure and the arrival of a byte, or a text such as "5ms".
        bandwidth: Bytes/s of each link in each direction, as a number or as a text such as "1Gb/s".
        jitter: Maximum in s of a random delay that is added to each message's latency; default: 0.
            The delay is uniform, and depends on `seed` and the number of the message.
        seed: The random seed of jitter and slowdowns; default: 0.
        hosts: One list of ranks per host, or the number of ranks per host. The ranks of a host
            share its uplink, which has the bandwidth `bandwidth`. By default, each rank has its own
            link to one switch.
        host_latency, host_bandwidth: Latency in seconds and bandwidth in bytes/s between ranks of
            one host; default: `latency` and `bandwidth`.
        links: Directed graph that replaces the switch, as a mapping from (source, destination) to
            bytes/s. In a network with `links`, a message takes the route with the fewest links. If
            several routes are equally short, the message takes the one through the lowest rank
            numbers.
        stragglers: Slow ranks, as a mapping from rank to `Slowdown`; default: none. A number
            instead of a `Slowdown` multiplies both compute and transfer times.
        sharing: How messages share a link; "fair" means max-min fair rates, approximately as in
            TCP. With "fifo", a link sends one message at a time; default: "fair".
        name: The name of the network in figures; default: empty.
    """

    latency: Seconds
    bandwidth: BytesPerSecond
    jitter: Seconds = 0.0
    seed: int = 0
    hosts: Annotated[int, Field(ge=1)] | tuple[tuple[Rank, ...], ...] | None = None
    host_latency: Seconds | None = None
    host_bandwidth: BytesPerSecond | None = None
    links: dict[tuple[Rank, Rank], BytesPerSecond] | None = None
    stragglers: dict[Rank, Slowdown] = Field(default_factory=dict)
    sharing: Literal["fair", "fifo"] = "fair"
    name: str = ""

    @field_validator("links", mode="before")
    @classmethod
    def _links_from_rows(cls, value: Any) -> Any:
        # JSON keys cannot be tuples, so links are stored as rows (source, destination, bytes/s).
        if value is None or isinstance(value, Mapping):
            return value
        rows = list(value) if isinstance(value, list | tuple) else []
        if not rows or any(not isinstance(row, list | tuple) or len(row) != 3 for row in rows):
            raise ValueError("links must be a list of at least one (source, destination, bytes/s)")
        return {(source, destination): bandwidth for source, destination, bandwidth in rows}

    @field_serializer("links")
    def _links_to_rows(
        self, value: dict[tuple[int, int], float] | None
    ) -> list[tuple[int, int, float]] | None:
        return None if value is None else [(*pair, bandwidth) for pair, bandwidth in value.items()]

    @model_serializer(mode="wrap")
    def _as_before_there_was_sharing(
        self, write: SerializerFunctionWrapHandler
    ) -> dict[str, object]:
        # The default value of `sharing` is not serialized, so that hashes of earlier experiments
        # remain valid.
        fields: dict[str, object] = write(self)
        if self.sharing == "fair":
            fields.pop("sharing", None)
        return fields

    @field_validator("stragglers", mode="before")
    @classmethod
    def _slow_from_factors(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            rank: {"compute": slow, "transfer": slow} if isinstance(slow, int | float) else slow
            for rank, slow in value.items()
        }

    @model_validator(mode="after")
    def _one_topology(self) -> Network:
        if self.hosts is not None and self.links is not None:
            raise ValueError(
                "give hosts or links, not both, because links define the whole topology"
            )
        if self.hosts is None and (self.host_latency, self.host_bandwidth) != (None, None):
            raise ValueError(
                "host_latency and host_bandwidth need hosts; give the ranks of each host"
            )
        return self

    @classmethod
    def named(cls, name: str) -> Network:
        """Return the network preset with this name.

        Raises:
            InvalidInput: If no preset has this name; the error message lists all names.
        """
        if name not in PRESETS:
            raise InvalidInput(
                f"no network is called {name!r}{listed(name, PRESETS)}, or give "
                "Network(latency=<s>, bandwidth=<bytes/s>)"
            )
        return PRESETS[name]

    @classmethod
    def parse(cls, value: str | Network | None) -> Network | None:
        """Return the preset named `value`, or `value` itself if it is a `Network` or None."""
        return cls.named(value) if isinstance(value, str) else value

    def schedule(self, name: str) -> Schedule:
        """Return the collective schedule of this name, adapted to the network's hosts or links."""
        schedule = schedules.get_collective(name)
        if schedule.layout is None or getattr(self, schedule.layout) is None:
            return schedule
        return partial(schedule, **{schedule.layout: getattr(self, schedule.layout)})

    def part(self, ranks: Sequence[int], size: int) -> Network:
        """Return a network with only the given ranks, which get the new numbers 0, 1, …

        The returned network ignores contention with messages of other ranks. Emulations include
        contention with messages of other ranks, because their processes share the state of the
        links.

        Args:
            ranks: The ranks to keep, in their new order.
            size: The number of ranks of the whole network.
        """
        number = {rank: new for new, rank in enumerate(ranks)}
        fields: dict[str, Any] = {
            "stragglers": {
                number[rank]: slow for rank, slow in self.stragglers.items() if rank in number
            }
        }
        if self.hosts is not None:
            hosts = self.hosts if isinstance(self.hosts, int) else list(map(list, self.hosts))
            members = [
                [number[rank] for rank in host if rank in number]
                for host in schedules.host_groups(size, hosts)
            ]
            fields["hosts"] = tuple(tuple(host) for host in members if host)
        if self.links is not None:
            fields["links"] = {
                (number[source], number[destination]): bandwidth
                for (source, destination), bandwidth in self.links.items()
                if source in number and destination in number
            }
        return self.model_copy(update=fields)

    @property
    def with_full_speed_compute(self) -> Network:
        """A copy of the network with the same slow links, but without slow computation."""
        full_speed = {"compute": 1.0, "distribution": "constant", "pause": None}
        slow = {rank: slow.model_copy(update=full_speed) for rank, slow in self.stragglers.items()}
        return self.model_copy(update={"stragglers": slow})

    def compute_factor(self, rank: int, number: int) -> float:
        """Return the slowdown factor of a rank's computation (a step or pass) with this number."""
        if rank not in self.stragglers:
            return 1.0
        return self.stragglers[rank].factor(float(uniform(self.seed, rank, number)[0]))

    def transfer_factor(self, rank: int) -> float:
        """Return the factor by which a message occupies the rank's links for longer."""
        return self.stragglers[rank].transfer if rank in self.stragglers else 1.0

    def _repr_html_(self) -> str:
        return _html(self)

    def __str__(self) -> str:
        return self.name or f"{self.latency:g} s, {self.bandwidth:g} bytes/s"


def _html(network: Network) -> str:
    """Return an HTML card: latency, bandwidth, topology, slow ranks, and transfer time of 1 MiB."""
    rows = {
        "latency": seconds_text(network.latency),
        "bandwidth of a link": rate_text(network.bandwidth),
        "1 MiB over one link": seconds_text(network.latency + 2**20 / network.bandwidth),
    }
    if network.jitter:
        rows["jitter"] = f"up to {seconds_text(network.jitter)} more, seed {network.seed}"
    if network.sharing == "fifo":
        rows["messages on one link"] = "one after the other"
    if network.hosts is not None:
        rows |= _hosts(network)
    parts = [pairs(rows)]
    if network.links is not None:
        parts.append(_links(network))
    if network.stragglers:
        parts.append(_slow(network))
    if network.hosts is None and network.links is None:
        parts.append(line("every rank has one link to a nonblocking switch"))
    return card(f"Network {network.name}".strip(), *parts)


def rate_text(bandwidth: float) -> str:
    """Return a bandwidth as text in bits per second and in bytes per second.

    >>> rate_text(125e6)
    '1 Gb/s (125 MB/s)'
    """
    bits = 8 * bandwidth
    size, unit = next((pair for pair in _UNITS if bits >= pair[0]), _UNITS[-1])
    return f"{bits / size:.3g} {unit} ({bandwidth / 1e6:.3g} MB/s)"


def _hosts(network: Network) -> dict[str, str]:
    hosts = network.hosts
    groups = f"{hosts} ranks each" if isinstance(hosts, int) else "; ".join(map(str, hosts or ()))
    rows = {"hosts": f"{groups}; the ranks of a host share its uplink"}
    if network.host_latency is not None:
        rows["latency in a host"] = seconds_text(network.host_latency)
    if network.host_bandwidth is not None:
        rows["bandwidth in a host"] = rate_text(network.host_bandwidth)
    return rows


def _links(network: Network) -> str:
    links = network.links or {}
    rows = [[f"{source} to {end}", rate_text(rate)] for (source, end), rate in links.items()]
    shown = table(rows, ["link", "bandwidth"])
    return shown if len(rows) <= MAX_UNFOLDED_LINKS else folded(f"{len(rows)} links", shown)


def _slow(network: Network) -> str:
    rows = [
        [f"rank {rank}", f"{slow.compute:g} ×", f"{slow.transfer:g} ×", slow.distribution]
        for rank, slow in sorted(network.stragglers.items())
    ]
    return table(rows, ["straggler", "compute", "transfer", "distribution"])


def _preset(name: str, latency: float, bandwidth: float) -> Network:
    return Network(name=name, latency=latency, bandwidth=bandwidth)


# The latency of a preset is the time of a small message between programs. The latency includes the
# time in kernel and library.
PRESETS: dict[str, Network] = {
    network.name: network
    for network in (
        # Latency of MPI over InfiniBand: 1.5 µs (Koop, Jones and Panda 2008, MVAPICH-Aptus, on 12
        # Gb/s).
        _preset("100Gb-infiniband", latency=1.5e-6, bandwidth=12.5e9),
        # Latency of tuned TCP between hosts: 20 µs (Hurwitz and Feng 2003, Initial end-to-end
        # performance evaluation of 10-Gigabit Ethernet).
        _preset("10GbE", latency=20e-6, bandwidth=1.25e9),
        # Latency of 1GbE: half of the minimum round-trip time of 100 µs on ordinary hardware
        # (Rumble et al. 2011, It's time for low latency).
        _preset("1GbE", latency=50e-6, bandwidth=125e6),
        # Latency of 100-Mb/s Ethernet: the latency of 1GbE plus 120 µs. A switch needs 120 µs to
        # store a frame of 1,500 bytes before it forwards the frame.
        _preset("100Mb", latency=170e-6, bandwidth=12.5e6),
        # The latency of the wide-area link is the time of light in fibre. The fibre has a length of
        # 5,000 km and needs 5 µs per km. The wide-area link has a bandwidth of 100 Mb/s.
        _preset("wan", latency=25e-3, bandwidth=12.5e6),
    )
}
