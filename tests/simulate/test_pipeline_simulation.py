"""Test that with equal stages and free messages, the simulator equals each schedule's formula."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.network import Network
from labkit.schedules import PIPELINE
from labkit.schedules.interpreter import ScheduleError
from labkit.schedules.pipeline import ScheduleTable, interleaved
from labkit.simulate.pipeline import PipelineSimulation, simulate_pipeline

COSTS = [(1.0, 1.0, 1.0), (1.0, 2.0, 0.5), (0.02, 0.03, 0.01)]  # F, B, W in s
FLUSHED = sorted(set(PIPELINE) - {"pipedream", "zero_bubble_h2"})


def time_of(
    table: ScheduleTable, forward: float, backward: float, weight: float
) -> PipelineSimulation:
    """Simulate a pipeline whose ranks share their seconds equally among their chunks."""
    v = table.chunks
    return simulate_pipeline(table, forward / v, backward / v, weight / v)


def instant(each: PipelineSimulation, action: str, stage: int, microbatch: int) -> float:
    """Return the time at which a computation starts."""
    table = each.table
    found = (table.action == action) & (table.stage == stage) & (table.microbatch == microbatch)
    return float(each.start[found][0])


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", FLUSHED)
def test_the_bubble_is_the_formula(name: str, costs: tuple[float, float, float]) -> None:
    held = 0
    for p in range(1, 17):
        for m in (1, 2, 7, 16):
            if name == "interleaved" and m % max(1, m // p):
                continue
            table = PIPELINE[name](p, m)
            said = table.bubble(*costs)
            if said is None:
                continue
            held += 1
            each = time_of(table, *costs)
            assert each.bubble == pytest.approx(said, abs=1e-9), (p, m)
            assert each.bubble_share == pytest.approx(table.bubble_share(*costs), abs=1e-9)
            assert each.seconds == pytest.approx(said + m * sum(costs))
    assert held >= 24


@pytest.mark.parametrize("costs", COSTS)
def test_zero_bubble_h2_waits_as_the_paper_says_between_a_ranks_first_row_and_its_last(
    costs: tuple[float, float, float],
) -> None:
    for p in range(1, 9):
        for m in (2 * p - 1, 2 * p, 16):
            table = PIPELINE["zero_bubble_h2"](p, m)
            assert time_of(table, *costs).bubble == pytest.approx(table.bubble(*costs), abs=1e-9)
    assert time_of(PIPELINE["zero_bubble_h2"](8, 16), 1, 1, 1).bubble == 0


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(chunks: int) -> None:
    each = time_of(interleaved(4, 8, chunks), 1, 1, 1)
    ideal = 8 * 3.0
    assert each.bubble / ideal == pytest.approx((1 / chunks) * (4 - 1) / 8)


@pytest.mark.parametrize("costs", COSTS)
def test_interleaving_waits_before_each_chunk_where_micro_batches_are_fewer_than_ranks(
    costs: tuple[float, float, float],
) -> None:
    for p, chunks in product((2, 4, 8), (1, 2, 3, 4)):
        for m in (*range(1, p), *range(p, 2 * p), 2 * p + 2):
            table = interleaved(p, m, chunks)
            waits = p - 1 + (chunks - 1) * max(0, p - m)
            assert time_of(table, *costs).bubble == pytest.approx(waits * sum(costs) / chunks)
            assert table.bubble(*costs) == pytest.approx(waits * sum(costs) / chunks)


@pytest.mark.parametrize("costs", COSTS)
def test_pipedream_never_waits_once_it_is_full(costs: tuple[float, float, float]) -> None:
    for p, m in [(1, 4), (2, 8), (4, 12), (7, 16)]:
        each = time_of(PIPELINE["pipedream"](p, m), *costs)
        full = instant(each, "backward", 0, 0)
        drains = instant(each, "forward", 0, m - 1)
        assert each.utilisation(full, drains) == pytest.approx(1.0)


def test_the_measured_bubble_rates_of_1f1b_lie_above_the_formula() -> None:
    measured = {24: 0.243, 32: 0.199, 64: 0.124}  # Qi 2024, p = 8
    for m, rate in measured.items():
        share = time_of(PIPELINE["1f1b"](8, m), 1, 1, 1).bubble_share
        assert share < rate < share + 0.03


def test_one_micro_batch_gains_nothing_and_4_p_are_near_the_ideal() -> None:
    def speedup(m: int) -> float:
        return 4 * 3.0 * m / time_of(PIPELINE["gpipe"](4, m), 1, 1, 1).seconds

    assert speedup(1) == pytest.approx(1)
    assert speedup(16) > 0.8 * 4


def test_rows_start_and_stop_as_the_drawing_says() -> None:
    each = simulate_pipeline(PIPELINE["gpipe"](2, 2), [1, 2], [3, 4], [0, 1])
    table = each.table
    own = table.computes & (table.rank == 1)
    assert each.start[own].tolist() == [1, 3, 5, 10]
    assert each.stop[own].tolist() == [3, 5, 10, 15]
    assert each.busy.tolist() == [8, 14]
    assert each.seconds == 18
    assert each.utilisation(0, 2).tolist() == [1, 0.5]


def test_a_message_takes_latency_and_bytes_over_bandwidth_and_its_receiver_waits() -> None:
    network = Network(latency=0.5, bandwidth=100.0)
    each = simulate_pipeline(PIPELINE["gpipe"](2, 1), 1, 2, network=network, nbytes=25)
    # forward until 1, message until 1.75, forward until 2.75, backward until 4.75, message until
    # 5.5, backward until 7.5 s
    assert each.seconds == pytest.approx(7.5)
    table = each.table
    sends, receives = table.action == "send", table.action == "receive"
    assert each.start[sends].tolist() == [1, 4.75]
    assert each.stop[sends].tolist() == [1.75, 5.5]
    assert dict(zip(table.stage[receives].tolist(), each.start[receives], strict=True)) == {
        1: 0,
        0: 1,
    }


@pytest.mark.parametrize(("sharing", "stops"), [("fair", [12, 12]), ("fifo", [11, 12])])
def test_messages_to_one_rank_share_its_link_or_wait_for_each_other(
    sharing: str, stops: list[float]
) -> None:
    """Test forward 1 of stage 0 and backward 0 of stage 2: both send to stage 1 at 10 s."""
    network = Network(latency=0, bandwidth=1.0, sharing=sharing)
    each = simulate_pipeline(PIPELINE["1f1b"](3, 2), [5, 1, 1], 1, network=network, nbytes=1)
    meeting = (each.table.action == "send") & (each.start == 10)
    assert each.table.peer[meeting].tolist() == [1, 1]
    assert sorted(each.stop[meeting]) == stops


def test_free_messages_and_an_endless_network_take_as_long() -> None:
    for name in PIPELINE:
        table = PIPELINE[name](4, 8)
        endless = Network(latency=0, bandwidth=1e30)
        free = simulate_pipeline(table, 1, 1, 1)
        assert simulate_pipeline(table, 1, 1, 1, network=endless, nbytes=1).seconds == free.seconds


def test_slow_ranks_hold_up_all_the_others() -> None:
    network = Network(latency=0, bandwidth=1e30, stragglers={1: 2.0})
    table = PIPELINE["1f1b"](3, 32)
    each = simulate_pipeline(table, 1, 1, network=network)
    assert each.busy == pytest.approx([64, 128, 64])
    assert each.seconds == pytest.approx(1 + 128 + 1)


def test_a_slower_network_never_helps_and_a_preset_is_named() -> None:
    table = PIPELINE["zero_bubble"](4, 8)
    names = ("100Gb-infiniband", "10GbE", "1GbE", "100Mb")
    times = [simulate_pipeline(table, 1e-3, 1e-3, 1e-3, network=name, nbytes=1e5) for name in names]
    assert [str(each.network) for each in times] == list(names)
    assert (np.diff([each.seconds for each in times]) > 0).all()


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (([1, 2], 1, 1), r"forward has shape \(2,\); give one value, or one for each of 4 stages"),
        ((1, -1, 1), "backward_input=-1.0 is impossible; give finite numbers, at least 0"),
        (
            (1, 1, float("nan")),
            "backward_weight=nan is impossible; give finite numbers, at least 0",
        ),
    ],
)
def test_seconds_that_cannot_be_are_refused(costs: tuple[object, ...], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        simulate_pipeline(PIPELINE["gpipe"](4, 2), *costs)  # type: ignore[arg-type]


def test_an_empty_stretch_of_time_has_no_utilisation() -> None:
    with pytest.raises(InvalidInput, match="give an end after begin"):
        time_of(PIPELINE["gpipe"](2, 2), 1, 1, 1).utilisation(3, 3)


def test_a_table_that_waits_for_ever_is_refused() -> None:
    table = PIPELINE["gpipe"](2, 2)
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate_pipeline(table.take(table.action != "send"), 1, 1)
