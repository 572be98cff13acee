"""A rank that trains the experiments of a folder, and writes its progress to the folder.

python -m tests.acceptance.faults.rank FOLDER    under mpiexec
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import keras

from labkit.communicator import Communicator, world
from labkit.experiment import Experiment
from labkit.worker.work import work
from tests.acceptance.faults.mpi_job import ASKED, BEGUN, HANG, STEPS, TOLD
from tests.acceptance.sample_ledger import SampleLedger


class Moments(keras.callbacks.Callback):
    """A callback that records when training begins and when each step ends.

    Args:
        folder: where.
        communicator: Communicator of this process.
    """

    def __init__(self, folder: Path, communicator: Communicator) -> None:
        super().__init__()
        self._communicator, self._folder = communicator, folder
        self._steps = (folder / f"{STEPS}{communicator.number}").open("a", buffering=1)
        self.weights: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Record the time at which training begins; from then on, the rank may be killed."""
        file = self._folder / f"{BEGUN}{self._communicator.number}"
        if not file.exists():  # after a death, training begins again without dead ranks
            file.write_text(str(self._communicator.clock.now()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the time of the step's end by the host's clock, and the number of dead ranks."""
        print(self._communicator.clock.now(), len(self._communicator.dead), file=self._steps)

    def on_train_end(self, logs: Any = None) -> None:
        """Store the weights; those of the last training are the result."""
        self.weights = self.model.get_weights()


def train(experiment: Experiment, folder: Path) -> None:
    """Train an experiment, and write the result to the folder."""
    communicator = world(timeout=HANG / 2)
    moments = Moments(folder, communicator)
    asked = experiment.replace(callbacks=lambda: [SampleLedger(folder), moments])
    whole = work(communicator, asked, None).whole
    digest = hashlib.sha256(b"".join(each.tobytes() for each in moments.weights)).hexdigest()
    told: dict[str, Any] = {"weights": digest}
    if whole is not None:
        told |= {"faults": whole.faults, "accuracy": whole.evaluation["accuracy"]}
    (folder / f"{TOLD}{communicator.number}").write_text(json.dumps(told))
    communicator.close()


def main() -> None:
    folder = Path(sys.argv[1])
    for place, experiment in pickle.loads((folder / ASKED).read_bytes()):
        faulthandler.dump_traceback_later(HANG, exit=True)
        own = folder / place
        own.mkdir(exist_ok=True)
        train(experiment, own)


if __name__ == "__main__":
    main()
