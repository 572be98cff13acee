"""The plan of a testbed: number, names and addresses of the hosts, and the rate of the links."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.common.errors import InvalidInput, short
from labkit.common.quantities import bits_of

NAMES = "abcdefgh"  # names of the hosts, one letter each
LOGIN = "login"  # name of this machine, which is the login node
CONTROL = "control"  # name of the host with slurmctld and the switch
MOST_CORES = 1024


@dataclass(frozen=True)
class TestbedPlan:
    """The validated parameters of `labkit.testbed`.

    Raises:
        InvalidInput: A value is invalid.
    """

    nodes: int = 2
    cores: int = 2
    bandwidth: str = "1Gb/s"
    slurm: bool = True

    def __post_init__(self) -> None:
        for field, least, most in (("nodes", 2, len(NAMES)), ("cores", 1, MOST_CORES)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise InvalidInput(
                    f"{field}={short(value)} is impossible; "
                    f"give a whole number from {least} to {most}"
                )
        if not isinstance(self.slurm, bool):
            raise InvalidInput(f"slurm={short(self.slurm)} is impossible; give True or False")
        bits_of(self.bandwidth, "bandwidth")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the virtual hosts: "a", "b", …"""
        return tuple(NAMES[: self.nodes])

    @property
    def rate(self) -> int:
        """The bandwidth of a link in bits/s."""
        return bits_of(self.bandwidth, "bandwidth")


def addresses(plan: TestbedPlan, number: int) -> dict[str, str]:
    """Return the IPv4 address of each host, of the host `control` and of the login node, by name.

    Args:
        plan: Parameters of the testbed.
        number: Third byte of the network 198.18.N.0/24, from 0 to 255; RFC 2544 reserves
            198.18.0.0/15 for network tests.
    """
    places = {name: place for place, name in enumerate(plan.hosts, 1)} | {CONTROL: 253, LOGIN: 254}
    return {name: f"198.18.{number}.{place}" for name, place in places.items()}
