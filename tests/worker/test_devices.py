"""Test fresh processes with logical devices: rules, executed plans, products and copies."""

from __future__ import annotations

from contextlib import closing

import pytest

from labkit.cluster import Cluster
from labkit.communicator import Communicator
from labkit.figures import break_even, break_even_table
from labkit.frameworks.child import Child
from labkit.records.step_graph import PlacementMeasurements, PlanMeasurement, Row
from labkit.simulate.placement import DeviceGroup, PlacementPlan, compare_policies
from labkit.worker.devices import PROCESS, DeviceRequest

pytestmark = pytest.mark.slow
SMALL = DeviceRequest(widths=(16, 16), features=8, batch=8, repeats=3, sizes=(8, 32))


Answers = tuple[PlacementMeasurements, list[PlacementPlan], list[PlanMeasurement], list[Row]]


def asked_at_once(communicator: Communicator, asked: DeviceRequest) -> Answers:
    """Return the answers of one process to `examine`, `carry_out` and `speeds_of`."""
    child = Child(PROCESS, "devices", (asked, True), communicator, asked.threads)
    with closing(child):
        child.answer()
        found = child.ask("examine")
        machine = DeviceGroup(asked.names, found.latency, found.bandwidth, dispatch=found.dispatch)
        plans = compare_policies(found.tasks, machine, [0])
        measured = child.ask("carry_out", plans, 2)
        # Copies between two CPU devices take the same code as copies to a GPU.
        return found, plans, measured, child.ask("speeds", ("CPU:0", "CPU:1"))


def test_a_process_with_two_devices_tells_and_does_what_it_is_asked(cluster: Cluster) -> None:
    [(found, plans, measured, speeds)] = cluster.call(asked_at_once, SMALL, ranks=1)
    assert set(found.listed) >= {"CPU:0", "CPU:1"}
    types = {row["device"]: str(row["types"]).split(", ") for row in found.kernels}
    assert ["int32" in types[device] for device in ("CPU", "GPU")] == [True, False]
    ran = {(row["question"], row["soft"]): row["ran_on"] for row in found.rules}
    for soft in (True, False):
        assert ran["a scope names a device", soft] == "CPU:1"
        assert ran["a data type without any kernel", soft] == "nowhere"
        assert ran["a variable is on CPU:1", soft] == "CPU:1"
        assert ran["colocated with an operation on CPU:0", soft] == "CPU:0"
    on = {operation.name: operation.device for operation in found.scoped.operations}
    assert found.scoped.devices == ["CPU:0", "CPU:1"]
    assert {on[name] for name in found.log if name in on} == {"CPU:0", "CPU:1"}
    assert all(on[name] == device for name, device in found.log.items() if name in on)
    assert [each.copies for each in measured] == [len(plan.copies) for plan in plans]
    for plan, each in zip(plans, measured, strict=True):
        placed = {node.name: node.device for node in each.graph.operations}
        names = plan.machine.devices
        assert all(placed[t] == names[at] for t, at in plan.devices.items() if t in placed)
        assert each.losses == measured[0].losses  # all bits are equal
        assert len(each.seconds) == 2
    table = break_even_table(speeds)
    assert table["n"].tolist() == [8, 32]
    assert (table[["device_ms", "there_ms"]] > 0).all(axis=None)  # which is longer is random
    assert "Matrix product on CPU:0 and CPU:1 by size" in break_even(speeds).alt  # type: ignore[union-attr]
