"""A script for ranks under mpiexec: they train an experiment while some are killed.

    sample_survival.py SCHEDULE COMPRESSOR FOLDER [last]

A rank writes its process id into the folder, and its result at the end. With `last`, rank 0 dies
during its last action.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

from labkit import AllReduce, Experiment
from labkit.communicator import world
from labkit.worker.session import TrainingSession
from labkit.worker.work import work

sys.path.insert(0, str(Path(__file__).parents[2]))  # mpiexec starts the script in its own folder
from tests.acceptance.sample_ledger import SampleLedger

ROWS, STEPS, EPOCHS = 600, 25, 30


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return rows that all differ, with labels."""
    x = np.random.default_rng(1).standard_normal((ROWS, 12)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32)


def experiment(schedule: str, compressor: str | None, **more: Any) -> Experiment:
    """Return an experiment of some hundred steps, in float64 without a compressor."""
    strategy = AllReduce(schedule=schedule, compressor=compressor, bucket_bytes=4096)
    return Experiment(
        model="mlp", model_options={"widths": [64, 32]}, dataset=data(), validation=data(),
        strategy=strategy, workers=3, batch_size=ROWS // STEPS, epochs=EPOCHS, optimizer="adam",
        precision="float64" if compressor is None else "float32", verify=False, **more,
    )  # fmt: skip


class Last(keras.callbacks.Callback):
    """A callback that keeps the weights at the end of training."""

    def __init__(self, into: list[Any]) -> None:
        super().__init__()
        self._into = into

    def on_train_end(self, logs: Any = None) -> None:
        """Replace the weights of an earlier end."""
        self._into[:] = self.model.get_weights()


def main() -> None:
    faulthandler.dump_traceback_later(230, exit=True)
    schedule, compressor, folder = sys.argv[1], sys.argv[2] or None, Path(sys.argv[3])
    communicator = world(timeout=100.0)
    (folder / f"pid{communicator.rank}").write_text(str(os.getpid()))

    if sys.argv[4:] == ["last"] and communicator.rank == 0:
        TrainingSession.saved = lambda session: os.kill(os.getpid(), signal.SIGKILL)

    def report(kind: str, records: Any) -> None:
        if kind == "step" and records:
            (folder / f"steps{communicator.number}").write_text(str(records[-1]["step"]))
        if kind == "fault":
            with (folder / "gone").open("a") as file:
                file.writelines(f"{record['ranks']}\n" for record in records)

    last: list[Any] = []
    asked = experiment(schedule, compressor, callbacks=lambda: [SampleLedger(folder), Last(last)])
    found = work(communicator, asked, None, report)
    digest = hashlib.sha256(b"".join(each.tobytes() for each in last)).hexdigest()
    told = {
        "rank": communicator.number,
        "rows": [[row["step"], row["samples"]] for row in found.rows],
        "weights": digest,
    }
    if found.whole is not None:
        told |= {"faults": found.whole.faults, "membership_history": found.whole.membership_history}
        told |= {"epochs": found.whole.epochs, "evaluation": dict(found.whole.evaluation)}
    (folder / f"told{communicator.number}").write_text(json.dumps(told))
    communicator.close()


if __name__ == "__main__":
    main()
