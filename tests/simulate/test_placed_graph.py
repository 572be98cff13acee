"""Test that all placement plans obey their machine, and compare small ones with the optimum."""

from __future__ import annotations

import math
from itertools import pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.simulate.placement import (
    DeviceGroup,
    GraphTask,
    Need,
    PlacementPlan,
    TaskGraph,
    all_on_one,
    at_random,
    list_schedule,
    round_robin,
)

# Sums of quarters are exact, so times can be compared with equality.
QUARTERS = st.integers(0, 12).map(lambda number: number / 4)
FREE = DeviceGroup(("A", "B"))


@st.composite
def graphs(draw: st.DrawFn, most: int = 10, groups: str = "gh") -> TaskGraph:
    count = draw(st.integers(1, most))
    together = st.sampled_from(["", *groups])
    tasks = [
        GraphTask(f"t{n}", draw(QUARTERS), draw(QUARTERS), draw(together) if groups else "")
        for n in range(count)
    ]
    pairs = [(a, b) for b in range(count) for a in range(b)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    sizes = draw(st.lists(QUARTERS, min_size=2 * count, max_size=2 * count))
    needs = []
    for a, b in chosen:
        output = draw(st.integers(0, 1))  # a tensor has the same size for all its readers
        needs.append(Need(f"t{a}", f"t{b}", sizes[2 * a + output], output))
    return TaskGraph(tuple(tasks), tuple(needs))


@st.composite
def machines(draw: st.DrawFn) -> DeviceGroup:
    devices = draw(st.integers(1, 3))
    bandwidth = draw(st.sampled_from([0.5, 1.0, math.inf]))
    return DeviceGroup(tuple("ABC"[:devices]), draw(QUARTERS), bandwidth, dispatch=draw(QUARTERS))


def plans(graph: TaskGraph, machine: DeviceGroup) -> list[PlacementPlan]:
    made = [list_schedule(graph, machine), round_robin(graph, machine)]
    return [*made, at_random(graph, machine, 3), all_on_one(graph, machine)]


def overlap(spans: list[tuple[float, float]]) -> bool:
    return any(before[1] > after[0] for before, after in pairwise(sorted(spans)))


@given(graphs(), machines())
def test_no_device_and_no_link_does_two_things_at_once(
    graph: TaskGraph, machine: DeviceGroup
) -> None:
    for plan in plans(graph, machine):
        for device in range(len(machine.devices)):
            assert not overlap([plan.spans[name] for name in plan.on(device)])
        links: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for copy in plan.copies:
            links.setdefault((copy.sender, copy.receiver), []).append((copy.start, copy.stop))
        assert not any(overlap(spans) for spans in links.values())


@given(graphs(), machines())
def test_nothing_starts_before_its_inputs_have_come(graph: TaskGraph, machine: DeviceGroup) -> None:
    for plan in plans(graph, machine):
        copied = {(copy.task, copy.output, copy.receiver): copy for copy in plan.copies}
        assert len(copied) == len(plan.copies)  # one copy per receiving device
        for need in graph.needs:
            came = plan.spans[need.source][1]
            device = plan.devices[need.target]
            if plan.devices[need.source] != device:
                copy = copied[need.source, need.output, device]
                assert copy.start >= came
                assert copy.stop - copy.start >= machine.copy_seconds(need.bytes)
                came = copy.stop
            assert plan.spans[need.target][0] >= came
        for task in graph.tasks:
            start, stop = plan.spans[task.name]
            assert stop - start == task.seconds + machine.dispatch


@given(graphs(), machines())
def test_groups_stay_together_and_no_plan_beats_the_bound(
    graph: TaskGraph, machine: DeviceGroup
) -> None:
    for plan in plans(graph, machine):
        for group in "gh":
            assert len({plan.devices[t.name] for t in graph.tasks if t.group == group}) <= 1
        assert plan.makespan >= graph.shortest(machine) - 1e-9
        assert sum(plan.kept_bytes) == sum(task.bytes for task in graph.tasks)


@given(graphs(), st.integers(1, 3), QUARTERS)
def test_where_copies_are_free_list_scheduling_is_never_longer_than_one_device(
    graph: TaskGraph, devices: int, dispatch: float
) -> None:
    machine = DeviceGroup(tuple("ABC"[:devices]), dispatch=dispatch)
    assert list_schedule(graph, machine).makespan <= all_on_one(graph, machine).makespan


@given(graphs(), st.floats(1, 40))
def test_memory_is_kept_within_its_limit_or_the_plan_is_refused(
    graph: TaskGraph, memory: float
) -> None:
    machine = DeviceGroup(("A", "B"), memory=memory)
    for make in (list_schedule, round_robin, lambda g, m: at_random(g, m, 1)):
        try:
            plan = make(graph, machine)
        except InvalidInput as error:
            assert "more memory" in str(error)  # noqa: PT017 - a plan need not be refused
        else:
            assert max(plan.kept_bytes) <= memory
    total = sum(task.bytes for task in graph.tasks)
    if total > memory:
        with pytest.raises(InvalidInput, match="more memory"):
            all_on_one(graph, machine)


@given(graphs(), machines())
def test_the_order_on_devices_can_be_carried_out(graph: TaskGraph, machine: DeviceGroup) -> None:
    """Test that each device's order, together with the tasks' dependencies, has no cycle."""
    for plan in plans(graph, machine):
        chains = [pairwise(plan.on(device)) for device in range(len(machine.devices))]
        more = tuple(Need(a, b) for chain in chains for a, b in chain)
        TaskGraph(graph.tasks, graph.needs + more)  # the constructor refuses a cycle


def best(graph: TaskGraph, machine: DeviceGroup) -> float:
    """Return the shortest makespan of all placements and orders; each task starts when it can."""
    count, found = len(machine.devices), math.inf
    names = [task.name for task in graph.tasks]
    sound = [
        order
        for order in permutations(names)
        if all(order.index(need.source) < order.index(need.target) for need in graph.needs)
    ]
    for devices in product(range(count), repeat=len(names)):
        on = dict(zip(names, devices, strict=True))
        for order in sound:
            free, stops, links = [0.0] * count, {}, {}
            copied: dict[tuple[str, int, int], float] = {}
            for name in order:
                came = 0.0
                for need in graph.before[name]:
                    if on[need.source] == on[name]:
                        came = max(came, stops[need.source])
                        continue
                    key = (need.source, need.output, on[name])
                    if key not in copied:
                        link = (on[need.source], on[name])
                        begin = max(stops[need.source], links.get(link, 0.0))
                        links[link] = copied[key] = begin + machine.copy_seconds(need.bytes)
                    came = max(came, copied[key])
                start = max(came, free[on[name]])
                seconds = graph.by_name[name].seconds + machine.dispatch
                stops[name] = free[on[name]] = start + seconds
            found = min(found, max(stops.values()))
    return found


@settings(max_examples=25)
@given(graphs(most=4, groups=""), QUARTERS)
def test_small_graphs_are_held_against_the_best_of_all_plans(
    graph: TaskGraph, latency: float
) -> None:
    machine = DeviceGroup(("A", "B"), latency=latency)
    shortest = best(graph, machine)
    for plan in plans(graph, machine):
        assert plan.makespan >= shortest
    # Graham 1966: a list schedule takes at most twice the best time, where copies are free.
    assert list_schedule(graph, FREE).makespan <= 2 * best(graph, FREE)


TOWERS = TaskGraph(
    (
        GraphTask("a", 4.0),
        GraphTask("b", 4.0),
        GraphTask("x", 0.0, device=0),
        GraphTask("sum", 1.0),
    ),
    (Need("x", "a", 1.0), Need("x", "b", 1.0), Need("a", "sum", 1.0), Need("b", "sum", 1.0)),
)


def test_two_towers_part_where_a_copy_is_cheap_and_stay_where_it_is_dear() -> None:
    cheap = list_schedule(TOWERS, DeviceGroup(("A", "B"), latency=0.5))
    assert {cheap.devices["a"], cheap.devices["b"]} == {0, 1}
    assert cheap.makespan == 0.5 + 4 + 1  # the sum runs beside b; a's result arrived while b ran
    assert cheap.makespan == best(TOWERS, DeviceGroup(("A", "B"), latency=0.5))
    dear = list_schedule(TOWERS, DeviceGroup(("A", "B"), latency=8.0))
    assert (set(dear.devices.values()), dear.makespan, dear.copies) == ({0}, 9.0, ())


def test_round_robin_deals_in_the_order_of_the_step_and_keeps_what_is_bound() -> None:
    plan = round_robin(TOWERS, FREE)
    assert plan.devices == {"x": 0, "a": 0, "b": 1, "sum": 0}
    assert plan.busy == (1.0, 0.8)


def test_random_placements_come_again_with_their_seed_and_differ_without() -> None:
    many = TaskGraph(tuple(GraphTask(str(n), 1.0) for n in range(12)))
    placed = [tuple(at_random(many, FREE, seed).devices.items()) for seed in (1, 1, 2)]
    assert placed[0] == placed[1] != placed[2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DeviceGroup(()), "give one or more unique names"),
        (lambda: DeviceGroup(("A", "A")), "give one or more unique names"),
        (lambda: DeviceGroup(("A",), latency=-1.0), "latency=-1.0 is impossible"),
        (lambda: DeviceGroup(("A",), bandwidth=0.0), "bandwidth=0.0 is impossible"),
        (lambda: TaskGraph(()), "at least one task"),
        (lambda: TaskGraph((GraphTask("a", -1.0),)), "give finite seconds and bytes"),
        (lambda: TaskGraph((GraphTask("a", 1.0),), (Need("a", "z"),)), "'z', which is not a task"),
        (lambda: TaskGraph((GraphTask("a", 1.0),), (Need("a", "a"),)), "a cycle among a"),
        (
            lambda: list_schedule(TaskGraph((GraphTask("a", 1.0, device=2),)), FREE),
            "bound to device 2",
        ),
    ],
)
def test_what_is_no_graph_and_no_machine_is_refused(make: object, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        make()  # type: ignore[operator]
