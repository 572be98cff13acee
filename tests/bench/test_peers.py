"""Test comparisons with other frameworks: measurements, and a remark if one is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from labkit.bench.peers import peer_comparison
from labkit.bench.peers.peer_comparison import PeerComparison, run, validate_peers
from labkit.bench.peers.rank import Meeting, Record, same
from labkit.bench.steps import CASES, ModelCase
from labkit.bench.timing import Row
from labkit.common.errors import InvalidInput, LabkitError
from labkit.frameworks import environments, foreign
from labkit.frameworks.environments import PEERS, Installation, find


def test_an_unknown_peer_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        InvalidInput, match=r"peer='gossip'.*multi_worker_mirrored, ddp, fsdp, horovod, jax"
    ):
        find("gossip")


def test_external_frameworks_cannot_run_on_an_emulated_network() -> None:
    validate_peers([], "1GbE")
    validate_peers(["ddp"], None)
    with pytest.raises(InvalidInput, match="remove --network or --peer"):
        validate_peers(["ddp"], "1GbE")


def test_multi_worker_mirrored_is_there_with_tensorflow() -> None:
    there = f"tensorflow {version('tensorflow')}"
    assert find("multi_worker_mirrored") == Installation(
        "multi_worker_mirrored", sys.executable, there
    )


def test_a_peer_that_is_not_installed_is_a_remark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "versions", lambda _: "")
    monkeypatch.delenv("LABKIT_TORCH_PYTHON", raising=False)
    monkeypatch.setenv("LABKIT_PEERS", str(tmp_path))
    others = PeerComparison(["ddp"], ["cnn"])
    others.turn()
    assert (others.rows(), others.remarks) == ([], [str(find("ddp"))])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Record | str]]:
    """Return what each fake framework reports for the CNN, turn by turn: a record, or an error."""
    turns: dict[str, list[Record | str]] = {}

    def run(peer: Installation, *_: object, repeats: int) -> list[Record]:
        said = turns[peer.name].pop(0)
        if isinstance(said, str):
            raise LabkitError(said)
        return [said]

    monkeypatch.setattr(peer_comparison, "run", run)
    monkeypatch.setattr(peer_comparison, "find", lambda name: Installation(name, "python", "9.8"))
    return turns


def record(added: float, same_weights: bool = True) -> Record:
    seconds = {"local": [0.01], "step": [0.01 + added], "raw allreduce": [0.002]}
    kinds = {"local": [0.0], "step": [added], "raw allreduce": [0.0]}
    return Record(
        case="cnn", version="9.8", seconds=seconds, added=kinds, same_weights=same_weights
    )


OWN: list[Row] = [
    {"case": "cnn", "what": "local", "median_ms": 9.0},
    {"case": "cnn", "what": "overlap", "same_weights": True, "added_ms": 9.0},
    {"case": "cnn", "what": "sequential", "same_weights": True, "added_ms": 1.5},
]


def test_turns_are_repeats_and_ours_is_held_against_their_median(
    told: dict[str, list[Record | str]],
) -> None:
    told["ddp"] = [record(0.005), record(0.002), record(0.006)]
    others = PeerComparison(["ddp"], ["cnn", "embedding"])
    for _ in range(3):
        others.turn()
    local, step, raw = others.rows(OWN)
    assert [row["what"] for row in (local, step, raw)] == ["ddp local", "ddp", "ddp raw allreduce"]
    assert step["repeats"] == 3
    assert step["added_ms"] == pytest.approx(5)
    assert (step["added_min_ms"], step["added_max_ms"]) == pytest.approx((2, 6))
    assert step["ours"] == "sequential"
    assert step["ours_to_theirs"] == pytest.approx(0.3)
    assert "ours_to_theirs" not in local
    assert others.remarks == []


def test_a_peer_whose_weights_are_not_equal_has_no_speed_and_one_that_fails_is_not_asked_again(
    told: dict[str, list[Record | str]],
) -> None:
    told["ddp"] = [record(0.005), record(0.002, same_weights=False)]
    told["horovod"] = ["horovod ended early"]
    others = PeerComparison(["ddp", "horovod"], ["cnn"])
    for _ in range(2):
        others.turn()
    local, step, _ = others.rows(OWN)
    assert local["median_ms"] == pytest.approx(10)
    assert step["same_weights"] is False
    assert step["median_ms"] is step["added_ms"] is None
    assert "ours_to_theirs" not in step
    assert others.remarks == [
        "horovod ended early",
        "ddp: no times for cnn, because the ranks end with unequal weights",
    ]


@pytest.mark.parametrize("own", [[], OWN[:1], [OWN[2] | {"added_ms": -0.1}]])
def test_without_a_cost_of_ours_nothing_is_held_against_theirs(
    told: dict[str, list[Record | str]], own: list[Row]
) -> None:
    told["ddp"] = [record(0.005)]
    others = PeerComparison(["ddp"], ["cnn"])
    others.turn()
    assert not any("ours_to_theirs" in row for row in others.rows(own))


# --- meeting and timing --------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> list[Meeting]:
    path = tmp_path / "meeting"
    path.write_bytes(bytes(Meeting.size_of(2)))
    return [Meeting(path, rank, 2) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("sums", "wanted"), [((5.0, 5.0), True), ((5.0, 5.1), False), ((5.0, np.nan), False)]
)
def test_equal_weights_are_told_from_unequal_ones(
    pair: list[Meeting], sums: tuple[float, float], wanted: bool
) -> None:
    said: list[bool] = []
    other = threading.Thread(target=lambda: said.append(same(pair[1], sums[1])))
    other.start()
    said.append(same(pair[0], sums[0]))
    other.join(10)
    assert said == [wanted] * 2


def test_whoever_waits_in_vain_is_told(
    pair: list[Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labkit.bench.peers.rank.LIMIT", 0.1)
    with pytest.raises(TimeoutError, match="rank 0 waited"):
        pair[0].barrier()


# --- processes -----------------------------------------------------------------------------------


def fake(tmp_path: Path, body: str) -> Installation:
    """Return an installation whose "Python" runs this code; argv[1] is the task."""
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(body))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$3"\n')
    python.chmod(0o755)
    return Installation("ddp", str(python), "9.8")


def test_each_process_gets_its_rank_and_one_thread(tmp_path: Path) -> None:
    peer = fake(
        tmp_path,
        """
        import json, os, sys
        task = json.loads(sys.argv[1])
        names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        assert [os.environ[name] for name in names] == ["1", "1", "2"]  # as our ranks have them
        assert "OMPI_COMM_WORLD_RANK" not in os.environ
        print("a word of some library's")
        print(json.dumps({"rank": task["rank"], "size": task["size"], "case": task["cases"][0]}))
        """,
    )
    assert run(peer, ["cnn"], 3, 1) == [{"rank": 0, "size": 3, "case": "cnn"}]


def test_when_one_process_fails_the_others_are_ended_and_its_last_line_is_told(
    tmp_path: Path,
) -> None:
    peer = fake(
        tmp_path,
        f"""
        import json, os, sys, time
        task = json.loads(sys.argv[1])
        open({str(tmp_path)!r} + f"/pid{{task['rank']}}", "w").write(str(os.getpid()))
        if task["rank"] == 1:
            while not os.path.exists({str(tmp_path)!r} + "/pid0"):
                time.sleep(0.01)
            raise RuntimeError("the cable is gone")
        time.sleep(600)
        """,
    )
    start = time.monotonic()
    with pytest.raises(LabkitError, match=r"of ddp on rank 1 ended before .*the cable is gone"):
        run(peer, ["cnn"], 2, 1)
    assert time.monotonic() - start < 300  # otherwise, the timeout is ten minutes
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid0").read_text()), 0)


def test_a_peer_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_comparison, "START", 0.3)
    monkeypatch.setattr(peer_comparison, "CASE", 0.1)
    with pytest.raises(LabkitError, match="ddp did not end within 0 s"):
        run(fake(tmp_path, "import time; time.sleep(600)"), ["cnn"], 2, 1)


def test_the_script_needs_nothing_of_labkits_dependencies(tmp_path: Path) -> None:
    """The Python of another framework may contain only NumPy and this framework."""
    Path("sample_of_peers.py").write_text(
        "import sys\n"
        "from importlib import import_module\n"
        "for name in ('rank', 'torch', 'jax', 'tensorflow'):\n"
        "    import_module(f'labkit.bench.peers.{name}')\n"
        "for name in ('child', 'exported', 'foreign'):\n"
        "    import_module(f'labkit.frameworks.{name}')\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    code = (
        "import importlib.abc, sys\n"
        "REFUSED = ('pydantic', 'mpi4py', 'psutil', 'yaml', 'click', 'cloudpickle')\n"
        "class Refuse(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in REFUSED:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "sys.argv = ['foreign.py', 'sample_of_peers']\n"
        f"sys.path.insert(0, {str(Path(foreign.__file__).parent)!r})\n"
        "import foreign\n"
        "sys.path.insert(0, '')\n"
        "sys.path.insert(0, '')\n"
        "foreign.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


# --- the same work -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_all_frameworks_start_from_the_same_arrays(case: ModelCase) -> None:
    arrays = case.arrays()
    assert sum(array.size for array in arrays) == case.parameters
    assert all(array.dtype == np.float32 for array in arrays)
    x, y = case.data(1)
    assert x.shape == (case.batch, 784)
    assert y.shape == (case.batch,)
    assert not np.array_equal(x, case.data(0)[0])


def installed(name: str) -> bool:
    return isinstance(find(name), Installation)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_installed_is_measured_and_ends_with_equal_weights(name: str) -> None:
    if not installed(name):
        pytest.skip(str(find(name)))
    others = PeerComparison([name], ["mlp-1024", "cnn"])
    others.turn()
    rows = others.rows()
    assert others.remarks == []
    assert [(row["case"], row["what"]) for row in rows] == [
        (case, what)
        for case in ("mlp-1024", "cnn")
        for what in (f"{name} local", name, f"{name} raw allreduce")
    ]
    for local, step, raw in (rows[:3], rows[3:]):
        assert step["same_weights"]
        assert step["added_min_ms"] <= step["added_ms"] <= step["added_max_ms"]
        difference = step["median_ms"] - local["median_ms"]
        assert step["added_ms"] == pytest.approx(difference, abs=step["median_ms"])
        assert 0 < raw["min_ms"] <= raw["median_ms"] <= raw["p90_ms"]
