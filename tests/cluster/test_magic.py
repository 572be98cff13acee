"""Test that `%%ranks` cells end with the first rank that fails, and locate the other ranks."""

from __future__ import annotations

import json
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from labkit import Cluster
from labkit.cluster import magic, stack_probe
from labkit.cluster.magic import TRIES, CellFailed, retries_of, run_cell
from labkit.cluster.stack_probe import describe_location
from labkit.common.errors import InvalidInput
from labkit.jobs.notebook import execute

pytestmark = pytest.mark.heavy  # cells run on engines


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeout of stack probes, because ranks of a busy machine must not seem stuck."""
    monkeypatch.setattr(stack_probe, "ANSWER", 60.0)


def placed(source: str) -> str:
    """Return the location of a thread that waits at `leave.wait(…)` in the source of a cell."""
    leave, entered = threading.Event(), threading.Event()

    class Leave:
        def wait(self, *_: Any) -> None:
            entered.set()
            leave.wait()

    # IPython also registers the source of each cell in the module linecache.
    linecache.cache["<cell>"] = (len(source), None, source.splitlines(True), "<cell>")
    code = compile(source, "<cell>", "exec")
    thread = threading.Thread(target=exec, args=(code, {"leave": Leave()}))
    thread.start()
    entered.wait()
    frame = sys._current_frames()[thread.ident or 0]
    while frame.f_code.co_filename != "<cell>":
        assert frame.f_back is not None
        frame = frame.f_back
    told = describe_location(frame)
    leave.set()
    thread.join()
    return told


def test_a_place_is_the_very_call_and_its_line() -> None:
    assert placed("x = 1\ny = [leave.wait(x,\n  'ä'), 2]") == "leave.wait(x, 'ä') (cell, line 2)"
    assert placed("ä = 'ä'; leave.wait('é')") == "leave.wait('é') (cell, line 1)"
    assert placed(f"leave.wait({'1, ' * 40})") == f"leave.wait({'1, ' * 19}1… (cell, line 1)"


def test_a_call_inside_a_function_also_names_the_line_of_the_cell() -> None:
    told = placed("def train():\n    leave.wait()\n\ntrain()")
    assert told == "leave.wait() (train, line 2), from line 4 of the cell"


@pytest.mark.parametrize("line", ["2", "retries", "retries=-1", "again=2"])
def test_a_line_that_is_no_number_of_retries_is_refused(line: str) -> None:
    with pytest.raises(InvalidInput, match="the only option is retries=N"):
        retries_of(line)


class Dying:
    """A cluster whose rank 1 dies several times, each time before or after it has answered.

    Args:
        deaths: Number of deaths.
        answers: Whether rank 1 answers before it dies.
    """

    def __init__(self, deaths: int, answers: bool = False) -> None:
        self.how = SimpleNamespace(fault_tolerant=True, is_local=False)
        self.folder, self.timeout, self.engines = Path(), 60.0, [0, 1]
        self.deaths, self.answers, self.rebuilt = deaths, answers, 0
        self.client = {rank: SimpleNamespace(apply_async=self._ask(rank)) for rank in (0, 1)}

    def _ask(self, rank: int) -> Any:
        said: dict[str, Any] = {"outputs": [], "execute_result": None, "stdout": "", "stderr": ""}
        return lambda _: SimpleNamespace(
            ready=lambda: rank == 0 or self.answers or not self.deaths,
            successful=lambda: True,
            get=lambda: 40 + rank,
            wait_for_output=lambda seconds: None,
            metadata=said,
        )

    def state(self) -> Any:
        return {"dead": [1] if self.deaths else [], "pid": 7}

    def how_ended(self) -> None:
        return None

    def rebuild(self, stuck: list[int]) -> None:
        self.deaths, self.rebuilt = self.deaths - 1, self.rebuilt + 1


def test_engines_whose_ranks_die_before_a_cell_begins_start_anew_three_times() -> None:
    cluster: Any = Dying(TRIES - 1)
    assert magic._processes(cluster) == [40, 41]
    cluster = Dying(TRIES)
    told = r"rank 1 failed: its process has ended; .* 3 times in a row before the cell began"
    with pytest.raises(CellFailed, match=told):
        magic._processes(cluster)
    assert cluster.rebuilt == TRIES


@pytest.mark.parametrize("answers", [True, False])
def test_a_death_when_all_have_done_their_parts_fails_no_cell(answers: bool) -> None:
    cluster: Any = Dying(1, answers)
    cell: Any = magic._Cell.__new__(magic._Cell)
    magic.PendingCalls.__init__(
        cell, cluster, [cluster.client[rank].apply_async(0) for rank in (0, 1)]
    )
    assert cell.dead() == (set() if answers else {1})
    if answers:
        cell._started_at = cell._asked_at = time.monotonic()
        cell.run()
        assert cluster.rebuilt == 0


@pytest.fixture(scope="module")
def three(own_folders: Path) -> Iterator[Cluster]:
    """Yield a cluster of three ranks, which tests may kill."""
    with Cluster(workers=3, name="three") as up:
        run_cell(up, "from mpi4py import MPI\nimport numpy, time\nrank = MPI.COMM_WORLD.rank")
        yield up


def test_outputs_stand_in_rank_order(three: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    run_cell(three, "time.sleep(0.2 * (2 - rank))\nprint('here', rank)")
    assert capsys.readouterr().out == "".join(f"[rank {k}]\nhere {k}\n" for k in range(3))
    run_cell(three, "if rank == 2: print('alone')")
    assert capsys.readouterr().out == "[rank 2]\nalone\n"


FIRST = """from labkit.communicator import world
communicator = world()
communicator.allreduce(numpy.ones(3, "f4"))  # agrees on how it is done; waits for nothing later
"""
# The failing rank waits until the other ranks have reached the point where they wait.
FAILING = """kept = 7
if rank == 0:
    print("before")
    Path(folder, "0").touch(); time.sleep(600)
if rank == 1:
    while not (Path(folder, "0").exists() and Path(folder, "2").exists()): time.sleep(0.01)
    raise ValueError("no such layer")
Path(folder, "2").touch(); communicator.allreduce(numpy.ones(3, "f4"), label="my sum")
"""


def test_the_first_failure_ends_the_cell_and_tells_where_the_others_wait(
    three: Cluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(magic, "GRACE", 3.0)
    run_cell(three, f"from pathlib import Path\nfolder = {str(tmp_path)!r}\n{FIRST}")
    with pytest.raises(CellFailed, match=r"^rank 1 failed: ValueError: no such layer; ") as caught:
        run_cell(three, FAILING)
    assert caught.value.rank == 1
    out, err = capsys.readouterr()
    assert out == "[rank 0]\nbefore\n"
    assert err.index("rank 1 failed:") < err.index("no such layer") < err.index("rank 0 waits")
    assert "rank 0 waits in time.sleep(600) (cell, line 4)" in err
    assert "rank 2 waits in my sum (mpi of float32[3]) (cell, line 8)" in err
    assert "restart" not in err
    run_cell(three, "print(rank, kept)")
    assert capsys.readouterr().out.splitlines()[1::2] == ["0 7", "1 7", "2 7"]


def test_an_interrupt_of_the_cell_ends_it_on_the_ranks(
    three: Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def stop() -> None:
        """Send Ctrl-C one second after all ranks have reached the point where they wait."""
        while len(list(tmp_path.glob("rank*"))) < 3:
            time.sleep(0.02)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGINT)

    run_cell(three, f"from pathlib import Path\nfile = Path({str(tmp_path)!r}, f'rank{{rank}}')")
    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_cell(three, "file.touch(); time.sleep(600)")
    err = capsys.readouterr().err
    assert [f"rank {k} waits in time.sleep(600) (cell, line 1)" in err for k in range(3)] == [
        True
    ] * 3
    run_cell(three, "if rank == 1: print('next')")
    assert capsys.readouterr().out == "[rank 1]\nnext\n"


DEFINED = """mine = rank + 40
def later(): return other, mine
lock = __import__("_thread").allocate_lock()
"""
BLOCKED = """from pathlib import Path
if rank == 0:
    while len(list(Path(folder).glob("rank*"))) < 2: time.sleep(0.01)
    raise KeyError("weights")
Path(folder, f"rank{rank}").touch(); MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, numpy.ones(3))
"""


@pytest.mark.slow
def test_engines_whose_rank_blocks_in_mpi_start_anew_with_the_variables_of_the_others(
    three: Cluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    run_cell(three, DEFINED)
    with monkeypatch.context() as patch:
        patch.setattr(three, "timeout", 8.0)
        patch.setattr(magic, "GRACE", 3.0)
        patch.setattr(magic, "ASK_EVERY", 0.5)
        told = r"KeyError: 'weights'; rank 1 waits in MPI\.COMM_WORLD"
        with pytest.raises(CellFailed, match=told):
            run_cell(three, f"folder = {str(tmp_path)!r}\n{BLOCKED}")
    err = capsys.readouterr().err
    assert "Allreduce(MPI.IN_PLACE, numpy.ones(3)) (cell, line 6)" in err
    assert "rank 1, 2 did not end the cell within 5 s" in err
    assert "The engines of all ranks restart" in err
    kept, _, lost = err.partition("variables of cells: kept: ")[2].partition("; lost: ")
    assert "mine (rank 0)" in kept
    assert "lock (rank 0, 1, 2)" in lost
    assert "mine (rank 1, 2)" in lost
    run_cell(three, "if 'mine' in globals():\n    other = 5\n    print(later())")
    assert capsys.readouterr().out == "[rank 0]\n(5, 40)\n"
    run_cell(three, "from mpi4py import MPI\nprint(MPI.COMM_WORLD.allreduce(1))")
    assert capsys.readouterr().out == "".join(f"[rank {k}]\n3\n" for k in range(3))


# Rank 1 fails after rank 0 has reached the point where it waits.
ENDS = """%%ranks
import time; from pathlib import Path
if here == 1:
    while not Path("asleep").exists(): time.sleep(0.01)
    1 / 0
Path("asleep").touch(); time.sleep(600)"""


def notebook(*sources: str) -> Path:
    """Write a notebook with these cells, and return its path."""
    cell = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    cells = [cell | {"id": f"c{k}", "source": source} for k, source in enumerate(sources)]
    metadata = {"kernelspec": {"name": "python3", "display_name": "", "language": "python"}}
    path = Path("cells.ipynb")
    path.write_text(
        json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


@pytest.mark.slow
def test_a_notebook_has_both_magics_once_a_cluster_is_up() -> None:
    """`%%px` runs on all ranks and ends when all have ended; both magics share variables."""
    job = execute(
        notebook(
            "import labkit as lk\ncluster = lk.Cluster(workers=2)",
            "%%px\nfrom mpi4py import MPI\nhere = MPI.COMM_WORLD.rank",
            "%%ranks\nhere + 5",
            ENDS,
        )
    )
    assert job.state == "failed"
    assert job.rank == 1
    assert "rank 1 failed: ZeroDivisionError: division by zero" in str(job.cause)
    cells = json.loads((job.path / "output.ipynb").read_text())["cells"]
    ours = [cell for cell in cells if "".join(cell["source"]).startswith("%%ranks")]
    texts = [json.dumps(cell["outputs"]) for cell in ours]
    assert texts[0].index("[rank 0]") < texts[0].index('"5"') < texts[0].index('"6"')
    assert "rank 0 waits in time.sleep(600) (cell, line 5)" in texts[1]
