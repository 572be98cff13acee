"""Networks: latency, bandwidth, topology, slow ranks; presets by name."""

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
from labkit.network.random_streams import uniform
from labkit.schedules.round import Schedule

Rank: TypeAlias = Annotated[int, Field(ge=0)]
MANY = 12  # links that are shown unfolded
_UNITS = ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s"), (1.0, "b/s"))


class Slowdown(Checked):
    """How much slower than the others a rank is.

    Args: compute: factor on its compute times, the mean where the law is random; transfer: factor
    on the time for which its own links are occupied; law: `constant`; `uniform` on
    [1, 2 · compute - 1]; `exponential`: 1 + an exponential of mean compute - 1; `lognormal`:
    1 + a lognormal of that mean, σ 1; pause: (from, to) of the run's clock, s, in which it stands
    still.
    """

    compute: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    transfer: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    law: Literal["constant", "uniform", "exponential", "lognormal"] = "constant"
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
        # The default stays unsaid, so that experiments keep their hashes.
        fields: dict[str, object] = write(self)
        if self.pause is None:
            fields.pop("pause", None)
        return fields

    def resumes(self, start: float, stop: float) -> float:
        """When a computation ends that would last from start to stop, but for the pause."""
        if self.pause is None or stop <= self.pause[0] or start >= self.pause[1]:
            return stop
        return stop + self.pause[1] - max(start, self.pause[0])

    def factor(self, number: float) -> float:
        """The compute factor that a number in [0, 1) draws from the law."""
        excess = self.compute - 1
        if self.law == "uniform":
            return 1 + 2 * excess * number
        if self.law == "exponential":
            return float(1 - excess * np.log1p(-number))
        if self.law == "lognormal":
            z = NormalDist().inv_cdf(min(max(number, 1e-12), 1 - 1e-12))
            return float(1 + excess * np.exp(z - 0.5))
        return self.compute


def slower_than_fastest(slow: Mapping[int, Slowdown], workers: int) -> list[float]:
    """By how many times each of so many workers computes longer than the fastest, on average."""
    factors = [slow[worker].compute if worker in slow else 1.0 for worker in range(workers)]
    return [factor / min(factors) for factor in factors]


class Network(Checked):
    """A network to emulate or to simulate.

    Args: latency: s from the last byte sent to its arrival, or such as "5ms"; bandwidth: bytes/s of
    a link, each direction, or such as "1Gb/s"; jitter: up to so many s more, drawn for each message
    from `seed` and the message's number; hosts: ranks of each host, or ranks a host: those share
    the host's uplink of `bandwidth`, while between them `host_latency` and `host_bandwidth` count
    (default: the network's); links: (source, destination) -> bytes/s, a directed graph in place of
    the switch; messages take the route of fewest hops, then of lowest ranks; slow: rank ->
    `Slowdown`, or a factor on both compute and transfer; sharing: how messages share a link, "fair"
    (max-min, as TCP's flows do about) or "fifo" (one after the other, each for as long as the link
    alone would take); name: what figures call it.
    """

    latency: Seconds
    bandwidth: BytesPerSecond
    jitter: Seconds = 0.0
    seed: int = 0
    hosts: Annotated[int, Field(ge=1)] | tuple[tuple[Rank, ...], ...] | None = None
    host_latency: Seconds | None = None
    host_bandwidth: BytesPerSecond | None = None
    links: dict[tuple[Rank, Rank], BytesPerSecond] | None = None
    slow: dict[Rank, Slowdown] = Field(default_factory=dict)
    sharing: Literal["fair", "fifo"] = "fair"
    name: str = ""

    @field_validator("links", mode="before")
    @classmethod
    def _links_from_rows(cls, value: Any) -> Any:
        # JSON has no tuples as keys: links travel as rows (source, destination, bytes/s).
        if value is None or isinstance(value, Mapping):
            return value
        rows = list(value) if isinstance(value, list | tuple) else []
        if not rows or any(not isinstance(row, list | tuple) or len(row) != 3 for row in rows):
            raise ValueError("links are rows of (source, destination, bytes/s), at least one")
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
        # The default stays unsaid, so that experiments keep their hashes.
        fields: dict[str, object] = write(self)
        if self.sharing == "fair":
            fields.pop("sharing", None)
        return fields

    @field_validator("slow", mode="before")
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
            raise ValueError("give hosts or links, not both: a graph of links says it all")
        if self.hosts is None and (self.host_latency, self.host_bandwidth) != (None, None):
            raise ValueError("host_latency and host_bandwidth need hosts: say who shares a host")
        return self

    @classmethod
    def named(cls, name: str) -> Network:
        """The preset of this name. Raises: InvalidInput, with all names."""
        if name not in PRESETS:
            raise InvalidInput(
                f"no network is called {name!r}{listed(name, PRESETS)}, or give "
                "Network(latency=<s>, bandwidth=<bytes/s>)"
            )
        return PRESETS[name]

    @classmethod
    def parse(cls, value: str | Network | None) -> Network | None:
        """A network from its name; itself; `None` is the machine's own network, not emulated."""
        return cls.named(value) if isinstance(value, str) else value

    def schedule(self, name: str) -> Schedule:
        """The collective of this name, laid out on this network's hosts or links, if any."""
        found = schedules.named(name)
        if found.layout is None or getattr(self, found.layout) is None:
            return found
        return partial(found, **{found.layout: getattr(self, found.layout)})

    def part(self, ranks: Sequence[int], size: int) -> Network:
        """What some of `size` ranks see of it, who are called 0, 1, … there.

        Contention with the others is not in it; where it counts, a part shares their links' state.
        """
        number = {rank: new for new, rank in enumerate(ranks)}
        seen: dict[str, Any] = {
            "slow": {number[rank]: slow for rank, slow in self.slow.items() if rank in number}
        }
        if self.hosts is not None:
            hosts = self.hosts if isinstance(self.hosts, int) else list(map(list, self.hosts))
            inside = [
                [number[rank] for rank in host if rank in number]
                for host in schedules.host_groups(size, hosts)
            ]
            seen["hosts"] = tuple(tuple(host) for host in inside if host)
        if self.links is not None:
            seen["links"] = {
                (number[one], number[other]): bandwidth
                for (one, other), bandwidth in self.links.items()
                if one in number and other in number
            }
        return self.model_copy(update=seen)

    @property
    def prompt(self) -> Network:
        """The same, on which ranks compute at full speed, while their links are as slow."""
        calm = {"compute": 1.0, "law": "constant", "pause": None}
        slow = {rank: each.model_copy(update=calm) for rank, each in self.slow.items()}
        return self.model_copy(update={"slow": slow})

    def compute_factor(self, rank: int, number: int) -> float:
        """Factor on the rank's compute time number `number` (a step, a pass)."""
        if rank not in self.slow:
            return 1.0
        return self.slow[rank].factor(float(uniform(self.seed, rank, number)[0]))

    def transfer_factor(self, rank: int) -> float:
        """Factor on the time for which the rank's own links are occupied."""
        return self.slow[rank].transfer if rank in self.slow else 1.0

    def _repr_html_(self) -> str:
        return _html(self)

    def __str__(self) -> str:
        return self.name or f"{self.latency:g} s, {self.bandwidth:g} bytes/s"


def _html(network: Network) -> str:
    """Latency and bandwidth, hosts or links, slow ranks, and what a message of 1 MiB takes."""
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
    if network.slow:
        parts.append(_slow(network))
    if network.hosts is None and network.links is None:
        parts.append(line("every rank has one link to a switch that never blocks"))
    return card(f"Network {network.name}".strip(), *parts)


def rate_text(bandwidth: float) -> str:
    """Bytes/s as links are sold, in bits, and as buffers are counted.

    >>> rate_text(125e6)
    '1 Gb/s (125 MB/s)'
    """
    bits = 8 * bandwidth
    size, unit = next((pair for pair in _UNITS if bits >= pair[0]), _UNITS[-1])
    return f"{bits / size:.3g} {unit} ({bandwidth / 1e6:.3g} MB/s)"


def _hosts(network: Network) -> dict[str, str]:
    hosts = network.hosts
    told = f"{hosts} ranks each" if isinstance(hosts, int) else "; ".join(map(str, hosts or ()))
    rows = {"hosts": f"{told}; the ranks of one share its uplink"}
    if network.host_latency is not None:
        rows["latency in a host"] = seconds_text(network.host_latency)
    if network.host_bandwidth is not None:
        rows["bandwidth in a host"] = rate_text(network.host_bandwidth)
    return rows


def _links(network: Network) -> str:
    links = network.links or {}
    rows = [[f"{one} to {other}", rate_text(rate)] for (one, other), rate in links.items()]
    shown = table(rows, ["link", "bandwidth"])
    return shown if len(rows) <= MANY else folded(f"{len(rows)} links", shown)


def _slow(network: Network) -> str:
    rows = [
        [f"rank {rank}", f"{slow.compute:g} ×", f"{slow.transfer:g} ×", slow.law]
        for rank, slow in sorted(network.slow.items())
    ]
    return table(rows, ["slow", "compute", "transfer", "law"])


def _preset(name: str, latency: float, bandwidth: float) -> Network:
    return Network(name=name, latency=latency, bandwidth=bandwidth)


# Latencies are of one small message between programs, kernel and library included.
PRESETS: dict[str, Network] = {
    each.name: each
    for each in (
        # MPI over InfiniBand: 1.5 µs (Koop, Jones and Panda 2008, MVAPICH-Aptus; then of 12 Gb/s).
        _preset("100Gb-infiniband", latency=1.5e-6, bandwidth=12.5e9),
        # TCP between hosts, tuned: 20 µs (Hurwitz and Feng 2003, Initial end-to-end performance
        # evaluation of 10-Gigabit Ethernet).
        _preset("10GbE", latency=20e-6, bandwidth=1.25e9),
        # Half of the 100 µs below which round trips on ordinary hardware did not come
        # (Rumble et al. 2011, It's time for low latency).
        _preset("1GbE", latency=50e-6, bandwidth=125e6),
        # As 1GbE, and a switch that stores a frame of 1,500 bytes before it forwards it: 120 µs.
        _preset("100Mb", latency=170e-6, bandwidth=12.5e6),
        # Light in 5,000 km of fibre, 5 µs a km; a line of 100 Mb/s.
        _preset("wan", latency=25e-3, bandwidth=12.5e6),
    )
}
