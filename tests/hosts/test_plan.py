"""Test the options that a testbed accepts, and the configuration files made for it."""

from __future__ import annotations

import pytest

from labkit.common.errors import InvalidInput
from labkit.common.quantities import bits_of
from labkit.hosts.supervisor import configuration
from labkit.hosts.testbed_state import TestbedPlan, addresses


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 1}, "nodes=1 is impossible; give a whole number from 2 to 8"),
        ({"nodes": 9}, "nodes=9 is impossible; give a whole number from 2 to 8"),
        ({"nodes": True}, "nodes=True is impossible; give a whole number"),
        ({"cores": 0}, "cores=0 is impossible; give a whole number from 1"),
        ({"cores": 1.5}, r"cores=1\.5 is impossible"),
        (
            {"bandwidth": "fast"},
            "bandwidth='fast' is impossible; give a rate of at least 1Mb per second",
        ),
        ({"bandwidth": 1e9}, r"bandwidth=1000000000\.0 is impossible; .* such as 100Mb or 1Gb"),
        ({"slurm": "yes"}, "slurm='yes' is impossible; give True or False"),
    ],
)
def test_what_no_testbed_can_be_is_refused_with_what_is_allowed(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        TestbedPlan(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "bits"), [("1Mb", 10**6), ("2.5Gb", 25 * 10**8), ("100Mb/s", 10**8), ("1Gb/s", 10**9)]
)
def test_a_rate_is_read_with_and_without_its_second(rate: str, bits: int) -> None:
    assert bits_of(rate) == bits


def test_each_host_has_a_name_and_an_address_of_its_own() -> None:
    plan = TestbedPlan(nodes=3)
    assert addresses(plan, 7) == {
        "a": "198.18.7.1",
        "b": "198.18.7.2",
        "c": "198.18.7.3",
        "control": "198.18.7.253",
        "login": "198.18.7.254",
    }


def test_slurm_is_told_of_each_node_where_it_is_and_how_many_cpus_it_has() -> None:
    plan = TestbedPlan(nodes=2, cores=3)
    lines = configuration(plan, addresses(plan, 0)).splitlines()
    assert "SlurmctldHost=control(198.18.0.253)" in lines
    assert [line for line in lines if line.startswith("NodeName")] == [
        "NodeName=a NodeAddr=198.18.0.1 CPUs=3 State=UNKNOWN",
        "NodeName=b NodeAddr=198.18.0.2 CPUs=3 State=UNKNOWN",
    ]
