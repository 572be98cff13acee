"""Warm engines: taken once, by who would have started the same, as new; and they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from left import PATIENCE, left_of

from labkit import Cluster
from labkit.cli.app import app
from labkit.cluster import naming, warm
from labkit.cluster.lease import WARM, Lease, take
from labkit.cluster.start import Start

# Who comes for a cluster: what it finds on the ranks, and what training makes of it.
COMES = """
import hashlib, json, os, sys, time
import labkit

experiment = labkit.Experiment(
    model="mlp", dataset="digits", dataset_options={"rows": 256, "test_rows": 64},
    workers=2, epochs=2, batch_size=64, strategy=labkit.AllReduce(),
)

def found():
    import os, sys
    return os.getcwd(), dict(os.environ), sys.path

with labkit.Cluster(workers=2, name=sys.argv[1] or None) as cluster:
    if len(sys.argv) > 2:  # until another has come, too
        open(sys.argv[2], "w").close()
        while len(os.listdir(os.path.dirname(sys.argv[2]))) < 2:
            time.sleep(0.05)
    names = cluster.view.apply_sync(lambda: sorted(k for k in globals() if k[0] != "_"))
    engines = cluster.view.apply_sync(os.getpid)
    run = cluster.run(experiment, show=False)
    there = cluster.view.apply_sync(found)  # now, when TensorFlow has set what it sets
    weights = [each.tobytes() for each in run.model().get_weights()]
    print(json.dumps({
        "there": there, "names": names, "engines": engines,
        "losses": run.history["loss"].tolist(), "accuracy": run.metrics["test_accuracy"],
        "weights": hashlib.sha256(b"".join(weights)).hexdigest(),
    }))
"""
KEPT_WARM = "2 MPI engines, kept warm since a start of"
# What tells one start from another: where it listens, and who it was.
OWN = ("LABKIT_KEEPER", "IPP_", "OMPI_", "PMIX_", "PRTE_", "_")


def comes(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMES, *(arguments or ("",))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(child: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, err = child.communicate(timeout=280)
    assert child.returncode == 0, err
    return json.loads(out), err


def as_found(record: dict[str, Any]) -> dict[str, Any]:
    """What is the same from start to start."""
    there = [
        [folder, {k: v for k, v in own.items() if not k.startswith(OWN)}, path]
        for folder, own, path in record["there"]
    ]
    return record | {"there": there, "engines": None}


def wait_for(folder: Path, state: str | None) -> None:
    end = time.monotonic() + PATIENCE
    while (said := warm.standing(folder)) is None or said["state"] != state:
        if said is None and state is None:
            return
        assert time.monotonic() < end, said
        time.sleep(0.1)


# --- who takes what ------------------------------------------------------------------------------


def test_a_cluster_is_taken_from_who_keeps_it_warm_once(tmp_path: Path) -> None:
    lease = Lease(tmp_path, WARM)
    assert take(tmp_path)
    assert not take(tmp_path)
    assert not lease.path.exists()
    lease.release()


@pytest.mark.parametrize(
    "other",
    [
        {"workers": 3},
        {"threads": 2},
        {"fault_tolerant": True},
        {"fault_tolerant": True, "spares": 1},
    ],
)
def test_another_shape_has_another_name(other: dict[str, Any]) -> None:
    assert naming.usual_name(Start(**{"workers": 2} | other)) != naming.usual_name(Start(2))


def test_engines_that_have_read_other_variables_or_run_other_code_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = naming.usual_name(Start(2))
    for name, value in (("XLA_FLAGS", "--xla_dump_to=x"), ("OMPI_MCA_btl", "tcp,self")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            # What a start sets itself, it sets for all.
            assert (naming.usual_name(Start(2)) == usual) == (name == "OMPI_MCA_btl"), name
    for name in ("version", "fingerprint"):
        with monkeypatch.context() as patch:
            patch.setattr(naming, name, lambda *_: "another")
            assert naming.usual_name(Start(2)) != usual, name
    monkeypatch.setenv("MPLBACKEND", "agg")  # of a kernel
    assert naming.usual_name(Start(2)) == usual


# --- on real engines -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)  # four starts with TensorFlow, on a busy machine
def test_one_user_takes_warm_engines_and_finds_what_fresh_ones_have(
    own_runtime: Path, tmp_path: Path
) -> None:
    folder = naming.folder_of(naming.usual_name(Start(2)))
    first = CliRunner().invoke(app, ["warm"])
    assert first.output.startswith("warm after"), first.output
    again = CliRunner().invoke(app, ["warm", "--minutes", "5"])
    assert again.output.startswith("already warm: 2 ranks of 1 thread"), again.output
    said = warm.standing(folder)
    assert said is not None
    assert said["bytes"] > 2 * 100 * 2**20

    with Cluster(workers=1) as smaller:  # not its shape: it stands as it stood
        assert smaller.state()["warm"] is None
    assert warm.standing(folder) == said

    # Two at one moment: one has taken it, and the other attaches, as to any that is up.
    (tmp_path / "both").mkdir()
    both = [comes("", str(tmp_path / "both" / name)) for name in ("a", "b")]
    (one, err), (other, other_err) = map(told, both)
    assert (KEPT_WARM in err) + (KEPT_WARM in other_err) == 1
    assert one["engines"] == other["engines"]

    wait_for(folder, WARM)  # behind them
    taken, err = told(comes())
    assert KEPT_WARM in err
    assert not set(taken["engines"]) & set(one["engines"])
    fresh, err = told(comes("fresh"))
    assert KEPT_WARM not in err
    assert as_found(taken) == as_found(fresh)

    wait_for(folder, WARM)
    with Cluster(workers=2) as mine:
        assert [each["workers"] for each in warm.stop(workers=2, threads=1)] == [2]
        assert mine.call(lambda communicator: communicator.rank) == [0, 1]
        assert mine.state()["warm"]
    assert left_of(own_runtime) == []


@pytest.mark.slow
def test_what_nobody_takes_ends_after_its_time_or_when_told(own_runtime: Path) -> None:
    folder = naming.folder_of(naming.usual_name(Start(1)))
    said, already = warm.start(Start(1), idle=1)
    assert (said["state"], already) == ("warm", False)
    wait_for(folder, None)
    assert left_of(own_runtime) == []
    warm.start(Start(1), idle=600)
    assert warm.stop(workers=2) == []
    assert CliRunner().invoke(app, ["warm", "--stop"]).output == "ended: 1 rank of 1 thread\n"
    # Engines are gone when it returns, not soon after.
    assert left_of(own_runtime, patience=0) == []
    assert "no such engines" in CliRunner().invoke(app, ["warm", "--stop"]).output


@pytest.mark.slow
def test_kill_9_of_who_keeps_them_warm_leaves_nothing(own_runtime: Path) -> None:
    said, _ = warm.start(Start(1), idle=600)
    os.kill(said["pid"], signal.SIGKILL)
    assert left_of(own_runtime) == []
