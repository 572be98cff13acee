"""Train several strategies with the same script of faults, and compare the results."""

from __future__ import annotations

import pytest

import labkit as lk
from labkit.bench.runs import run_with_faults, run_without_faults


@pytest.mark.slow
def test_the_league_has_who_goes_on_and_who_does_not(cluster: lk.Cluster) -> None:
    base = lk.Experiment(
        dataset_options={"rows": 160, "test_rows": 20}, model_options={"widths": [6]},
        batch_size=20, workers=3, virtual={"compute_time": 0.01}, verify=False,
    )  # fmt: skip
    servers = lk.ParameterServer(synchronous=False)
    ways = {"all wait": lk.AllReduce(), "nobody waits": servers}
    pairs = run_with_faults(
        cluster, run_without_faults(cluster, base, ways), [lk.Fault(rank=2, step=2, kind="kill")]
    )
    table = lk.figures.fault_table(pairs).set_index("strategy")
    assert list(table.index) == ["nobody waits", "all wait"]
    assert list(table["finished"]) == [True, False]
    assert 0 < table["kept"]["nobody waits"] < 1
    assert table["samples lost"]["all wait"] == 160
    assert "1 of 2; **all wait**" in lk.figures.summarize_fault(pairs)
