"""Test that the equivalence check detects planted faults and passes the same runs without them."""

from __future__ import annotations

from collections.abc import Iterable

import cloudpickle
import faults
import pytest
from faults import FAULTS, Fault, experiment, hunt

from labkit import Cluster

cloudpickle.register_pickle_by_value(faults)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a cache folder, so that all experiments share references of one process."""
    return str(tmp_path_factory.mktemp("cache"))


def missed(cluster: Cluster, cache: str, planted: Iterable[Fault]) -> list[str]:
    """Return faults that were missed or misreported, and runs without a fault that failed."""
    wrong, chosen = [], list(planted)
    for ranks in (2, 3):
        own = [fault for fault in chosen if experiment(fault.shown_by).workers == ranks]
        if not own:
            continue
        told = cluster.call(hunt, own, cache, ranks=ranks)
        assert told == [told[0]] * ranks, "ranks have other verdicts"
        says = {fault.name: (fault.says, fault.at) for fault in own}
        for name, verdict in told[0].items():
            wanted = "failed" if name in says else "passed"
            words = says.get(name, ("", ""))
            if verdict["verdict"] != wanted or not all(w in verdict["reason"] for w in words):
                wrong.append(f"{name}: {verdict}")
    return wrong


@pytest.mark.slow
def test_faults_of_each_kind_are_found(cluster: Cluster, cache: str) -> None:
    assert missed(cluster, cache, [fault for fault in FAULTS if fault.sample]) == []


def test_at_least_thirty_faults_are_planted_each_under_a_name_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


OTHERS = [fault for fault in FAULTS if not fault.sample]


@pytest.mark.exhaustive
@pytest.mark.parametrize("shown_by", dict.fromkeys(fault.shown_by for fault in OTHERS))
def test_every_other_planted_fault_is_found_and_no_run_without_one_fails(
    cluster: Cluster, cache: str, shown_by: str
) -> None:
    assert missed(cluster, cache, [fault for fault in OTHERS if fault.shown_by == shown_by]) == []
