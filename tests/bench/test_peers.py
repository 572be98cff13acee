"""Peers: what is installed is measured by labkit's rule; what is not is said in a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from labkit.bench.peers import processes
from labkit.bench.peers.beside import check
from labkit.bench.peers.beside import measure as measure_peers
from labkit.bench.peers.meeting import Meeting, same
from labkit.bench.peers.processes import run
from labkit.bench.steps import CASES, Case
from labkit.common.errors import InvalidInput, LabkitError
from labkit.frameworks import environments, foreign
from labkit.frameworks.environments import PEERS, Found, find


def test_an_unknown_peer_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidInput, match=r"peer='gossip'.*multi_worker_mirrored, ddp, horovod"):
        find("gossip")


def test_peers_cannot_run_on_an_emulated_network() -> None:
    check([], "1GbE")
    check(["ddp"], None)
    with pytest.raises(InvalidInput, match="leave out --network"):
        check(["ddp"], "1GbE")


def test_multi_worker_mirrored_is_there_with_tensorflow() -> None:
    assert find("multi_worker_mirrored") == Found("multi_worker_mirrored", sys.executable)


def test_a_peer_that_is_not_installed_is_a_remark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "find_spec", lambda _: None)
    monkeypatch.delenv("LABKIT_TORCH_PYTHON", raising=False)
    monkeypatch.setenv("LABKIT_PEERS", str(tmp_path))
    assert measure_peers(["ddp"], ["cnn"]) == ([], [str(find("ddp"))])


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
    monkeypatch.setattr("labkit.bench.peers.meeting.LIMIT", 0.1)
    with pytest.raises(TimeoutError, match="rank 0 has waited"):
        pair[0].meet()


# --- processes -----------------------------------------------------------------------------------


def fake(tmp_path: Path, body: str) -> Found:
    """A "Python" that runs this instead of the peer's script; argv[1] is the task."""
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(body))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$3"\n')
    python.chmod(0o755)
    return Found("ddp", str(python))


def test_each_process_gets_its_rank_and_one_thread(tmp_path: Path) -> None:
    peer = fake(
        tmp_path,
        """
        import json, os, sys
        task = json.loads(sys.argv[1])
        threads = [os.environ[n] for n in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")]
        assert threads == ["1", "1"] and "OMPI_COMM_WORLD_RANK" not in os.environ
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
    with pytest.raises(LabkitError, match=r"ddp ended early on rank 1: .*the cable is gone"):
        run(peer, ["cnn"], 2, 1)
    assert time.monotonic() - start < 300  # else ten minutes
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid0").read_text()), 0)


def test_a_peer_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "START", 0.3)
    monkeypatch.setattr(processes, "CASE", 0.1)
    with pytest.raises(LabkitError, match="ddp did not end within 0 s"):
        run(fake(tmp_path, "import time; time.sleep(600)"), ["cnn"], 2, 1)


def test_the_script_needs_nothing_of_labkits_dependencies(tmp_path: Path) -> None:
    """A peer's Python may have NumPy and the peer only."""
    Path("sample_of_peers.py").write_text(
        "import sys\n"
        "from importlib import import_module\n"
        "for name in ('meeting', 'ddp', 'horovod', 'multi_worker_mirrored'):\n"
        "    import_module(f'labkit.bench.peers.{name}')\n"
        "for name in ('child', 'exported'):\n"
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
def test_all_frameworks_start_from_the_same_arrays(case: Case) -> None:
    arrays = case.arrays()
    assert sum(array.size for array in arrays) == case.parameters
    assert all(array.dtype == np.float32 for array in arrays)
    x, y = case.data(1)
    assert x.shape == (case.batch, 784)
    assert y.shape == (case.batch,)
    assert not np.array_equal(x, case.data(0)[0])


def installed(name: str) -> bool:
    return isinstance(find(name), Found)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_installed_is_measured_and_ends_with_equal_weights(name: str) -> None:
    if not installed(name):
        pytest.skip(str(find(name)))
    rows, remarks = measure_peers([name], ["mlp-1024", "cnn"], repeats=1)
    assert remarks == []
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
