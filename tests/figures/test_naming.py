"""Names of runs are short, tell them apart, and say nothing that is the same for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from labkit.figures.kit.naming import LONGEST, names
from labkit.records.analysis.columns import Value

VALUES = {
    "strategy": st.sampled_from(["AllReduce", "DelayedGradients"]),
    "compressor": st.sampled_from([None, "OneBit", "ErrorFeedback(TopK(ratio=0.01))", "Q" * 90]),
    "network": st.sampled_from([None, "1GbE", "100Mb"]),
    "workers": st.sampled_from([1, 2, 16]),
    "learning_rate": st.floats(1e-4, 1.0),
    "seed": st.integers(0, 9),
}
ROWS = st.lists(st.fixed_dictionaries({}, optional=VALUES), min_size=1, max_size=30)


def told(rows: list[dict[str, Value]]) -> list[str]:
    return names(rows, ["mlp-digits"] * len(rows))


@given(ROWS)
def test_no_two_names_are_the_same_and_none_is_long(rows: list[dict[str, Value]]) -> None:
    found = told(rows)
    assert len(set(found)) == len(rows)
    assert all(name and len(name) <= LONGEST + len(" (30)") for name in found)


@given(ROWS)
def test_what_all_have_in_common_is_in_no_name(rows: list[dict[str, Value]]) -> None:
    same = [row | {"model": "mlp", "epochs": 3} for row in rows]
    assert told(same) == told(rows)


@given(st.permutations(range(12)))
def test_a_name_does_not_depend_on_where_its_run_stands(order: list[int]) -> None:
    rows: list[dict[str, Value]] = [
        {"compressor": compressor, "network": network, "seed": seed}
        for compressor in (None, "OneBit")
        for network in ("1GbE", "100Mb")
        for seed in range(3)
    ]
    found = told(rows)
    assert told([rows[place] for place in order]) == [found[place] for place in order]


def test_names_are_what_one_would_say() -> None:
    top = "ErrorFeedback(TopK(ratio=0.01))"
    rows: list[dict[str, Value]] = [
        {"strategy": strategy, "compressor": compressor, "network": network, "learning_rate": 0.1}
        for network in ("1GbE", "100Mb")
        for strategy, compressor in (("AllReduce", None), ("AllReduce", top), ("Delayed", None))
    ]
    assert told(rows)[:3] == ["AllReduce, 1GbE", "TopK 1 %, 1GbE", "Delayed, 1GbE"]
    assert told([{"workers": 1}, {"workers": 2}]) == ["workers 1", "workers 2"]
    both = told([{"compressor": top}, {"compressor": "TopK(ratio=0.01)"}])
    assert both == ["EF TopK 1 %", "TopK 1 %"]
    assert told([{}, {}]) == ["mlp-digits (1)", "mlp-digits (2)"]
    odd: list[dict[str, Value]] = [{"network": None}, {"network": "1GbE", "model": "cnn"}]
    same: list[dict[str, Value]] = [{"network": name} for name in ("1GbE", "100Mb", "10GbE")]
    rows = [{"model": "mlp"} | row for row in [*odd, *same]]
    assert told(rows)[:2] == ["no network, mlp", "1GbE, cnn"]


def test_a_number_never_makes_a_name_that_another_has() -> None:
    rows: list[dict[str, Value]] = [{"name": "a"}, {"name": "a"}, {"name": "a (1)"}]
    assert len(set(told(rows))) == 3
