"""What a testbed is to be: how many hosts, their names and addresses, the rate of their links."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.common.errors import InvalidInput, short
from labkit.common.quantities import bits_of

NAMES = "abcdefgh"  # of hosts
LOGIN = "login"  # the machine itself, outside
CONTROL = "control"  # where slurmctld runs, and the switch is
MOST_CORES = 1024


@dataclass(frozen=True)
class Plan:
    """The shape of a testbed, as `labkit.testbed` takes it.

    Raises:
        InvalidInput: a value that cannot work.
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
        """Their names."""
        return tuple(NAMES[: self.nodes])

    @property
    def rate(self) -> int:
        """Bits/s of a link."""
        return bits_of(self.bandwidth, "bandwidth")


def addresses(plan: Plan, number: int) -> dict[str, str]:
    """The address of each host, of the control and of the login, in the network of that number.

    Args:
        number: 0 to 255; 198.18.0.0/15 is kept for tests of networks (RFC 2544): nobody's.
    """
    places = {name: place for place, name in enumerate(plan.hosts, 1)} | {CONTROL: 253, LOGIN: 254}
    return {name: f"198.18.{number}.{place}" for name, place in places.items()}
