"""Test that training goes on with the same steps, exactly, when ranks are killed."""

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
from sample_survival import EPOCHS, ROWS, STEPS, data

from labkit.communicator import launcher
from tests.acceptance.ledger import audit, read

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("sample_survival.py")
RANKS, HANG = 3, 240.0  # seconds


def killed(
    folder: Path, schedule: str, compressor: str, victims: dict[int, int], last: bool = False
) -> dict[str, Any]:
    """Return what the first surviving rank reports at the end.

    Args:
        folder: Folder for the reports of ranks.
        schedule, compressor: Schedule and compressor of the exchange.
        victims: Ranks to kill, each with the step from which on it is killed.
        last: Whether rank 0 dies during its last action.
    """
    words = [sys.executable, str(SCRIPT), schedule, compressor, str(folder)]
    words += ["last"] if last else []
    environment, end = os.environ | launcher.environment(), time.monotonic() + HANG
    command = [*launcher.mpiexec(RANKS, outlives=True), *words]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as ranks:
        try:
            for victim, step in victims.items():
                while not reached(folder / f"steps{victim}", step):
                    assert ranks.poll() is None
                    assert time.monotonic() < end
                    time.sleep(0.002)
                os.kill(int((folder / f"pid{victim}").read_text()), signal.SIGKILL)
            said = ranks.communicate(timeout=end - time.monotonic())[1]
        finally:
            ranks.kill()
    told = sorted(folder.glob("told*"))
    live = set(range(RANKS)) - victims.keys() - ({0} if last else set())
    assert [int(path.name[4:]) for path in told] == sorted(live), said
    found = [json.loads(path.read_text()) for path in told]
    assert len({each["weights"] for each in found}) == 1
    first: dict[str, Any] = found[0]
    return first


def reached(path: Path, step: int) -> bool:
    return path.exists() and int(path.read_text() or -1) >= step


@pytest.mark.parametrize(
    ("schedule", "compressor", "victims"),
    [("sequential", "", {0: 40, 2: 120}), ("overlap", "", {1: 60}), ("overlap", "OneBit", {0: 30})],
)
def test_it_is_the_training_of_ranks_that_nobody_has_killed(
    tmp_path: Path, schedule: str, compressor: str, victims: dict[int, int]
) -> None:
    found = killed(tmp_path, schedule, compressor, victims)
    account = audit(read(tmp_path), data(), STEPS, EPOCHS)
    assert account.is_exact, account
    assert sum(account.by_rank.values()) == ROWS * EPOCHS
    assert [fault["ranks"] for fault in found["faults"]] == [[victim] for victim in victims]
    assert (tmp_path / "gone").read_text().split() == [f"[{victim}]" for victim in victims]
    assert account.steps_repeated == sum(fault["repeated"] for fault in found["faults"])
    begins = [stretch["step"] for stretch in found["membership_history"]]
    assert begins == [0, *(fault["step"] for fault in found["faults"])]
    assert len(found["epochs"]) == EPOCHS
    if not compressor:  # in float64, sums over other ranks differ in the last digits
        assert found["evaluation"]["loss"] == pytest.approx(0.0052200118733289, rel=1e-6)


def test_another_rank_says_what_came_of_it_where_the_first_dies_over_that(tmp_path: Path) -> None:
    found = killed(tmp_path, "sequential", "", {}, last=True)
    assert audit(read(tmp_path), data(), STEPS, EPOCHS).is_exact
    (fault,) = found["faults"]
    assert (fault["ranks"], fault["step"]) == ([0], STEPS * EPOCHS)
    assert len(found["epochs"]) == EPOCHS
    assert found["evaluation"]["loss"] == pytest.approx(0.0052200118733289, rel=1e-6)
