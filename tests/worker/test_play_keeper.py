"""Test that forged checkpoints of simulated trainings run no code."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from labkit import Experiment, ParameterServer
from labkit.common.errors import LabkitError
from labkit.communicator.world import single_rank
from labkit.records.checkpoints import CheckpointContext, Resume
from labkit.worker.checkpoint_keeper import numbers_of
from labkit.worker.compute_backend import ComputeBackend
from labkit.worker.feed import read
from labkit.worker.program_runner import SimulatedTraining, SimulationKeeper
from labkit.worker.recorder import Recorder
from labkit.worker.session import TrainingSession

pytestmark = pytest.mark.heavy
X = np.ones((24, 5), np.float32)
STRATEGY = ParameterServer(1)
QUESTION = Experiment(
    model="mlp", model_options={"widths": [2]}, dataset=(X, np.zeros(24, np.int32)), workers=2,
    batch_size=12, strategy=STRATEGY, virtual={"compute_time": {"seconds": 0.1}}, verify=False,
)  # fmt: skip


def kept_in(folder: Path, form: bytes, pack: Any = np.savez) -> None:
    """Write a checkpoint of one process, as a stranger could write it."""
    file = io.BytesIO()
    index = {"pieces": [["form", [len(form)], [0], True, "uint8"]], "told": {"tensors": []}}
    words = np.frombuffer(json.dumps(index).encode(), np.uint8)
    pack(file, **{"0": np.frombuffer(form, np.uint8), "index": words})
    (folder / "rank0.npz").write_bytes(file.getvalue())


def staged() -> tuple[TrainingSession, ComputeBackend]:
    communicator = single_rank()
    session = TrainingSession(QUESTION, communicator, read(QUESTION, communicator))
    session.recorder = Recorder(communicator, lambda kind, records: None, lambda: False)
    session.compile(session.optimizer())
    stage = ComputeBackend(session, STRATEGY)
    stage.hold(range(len(stage.roles.hosts)))
    return session, stage


def resumed(folder: Path) -> None:
    session, stage = staged()
    resume = Resume(str(folder), {"taken": 3}, same=True)
    keeping = CheckpointContext(None, resume, goes_on=True, folder=str(folder))
    assert session.recorder is not None
    SimulationKeeper(session, keeping, session.recorder).play(
        SimulatedTraining(session, STRATEGY, stage)
    )


# The constructor of this class would start a process.
SPACE = b"clabkit.hosts.host_namespaces\nHostNamespaces\n((dVname\nVa\nstR."
STATE = b'{"schema": 1, "root": [0], "nodes": [["list", []]]}'


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (SPACE, "is not JSON of schema 1"),
        (b"cbuiltins\nopen\n(Vmark\nVw\ntR.", "is not JSON of schema 1"),
        (
            STATE.replace(
                b'"list", []', b'"record", ["HostNamespaces", ["host"], [{"name": "a"}]]'
            ),
            "HostNamespaces",
        ),
        (STATE, "is damaged or was changed"),
    ],
)
def test_a_forged_checkpoint_runs_nothing_and_is_refused_in_one_line(
    form: bytes, says: str, tmp_path: Path
) -> None:
    kept_in(tmp_path, form)
    before = psutil.Process().children()
    with pytest.raises(LabkitError, match=says) as caught:
        resumed(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert psutil.Process().children() == before
    assert not Path("mark").exists()


def test_a_damaged_or_compressed_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    kept_in(tmp_path, STATE, np.savez_compressed)
    with pytest.raises(LabkitError, match=r"rank0\.npz is damaged or was changed .*compressed"):
        resumed(tmp_path)
    for content in (b"", b"PK\3\4", b"\x93NUMPY", pickle.dumps([1])):
        (tmp_path / "rank0.npz").write_bytes(content)
        with pytest.raises(LabkitError, match=r"rank0\.npz is damaged or was changed"):
            resumed(tmp_path)


def test_a_state_that_would_read_for_ever_is_refused() -> None:
    _, stage = staged()
    state = stage.save_state()
    with pytest.raises(
        LabkitError, match=r"a worker with 1000000000000 batches, but .* allows 400"
    ):
        stage.load_state(state | {"replica": ({0: 10**12}, {})})


def test_of_a_callback_a_file_says_numbers_alone() -> None:
    attributes = {"wait": 2, "best": 0.5, "_model": 1, "model": [1], "on_epoch_end": "x"}
    assert numbers_of(attributes) == {"wait": 2, "best": 0.5}
