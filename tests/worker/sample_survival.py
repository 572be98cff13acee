"""Ranks that train an experiment while some are killed; run as a script under mpiexec.

    sample_survival.py SCHEDULE COMPRESSOR FOLDER

A rank writes its process in the folder, and at the end what it has come to.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from labkit import AllReduce, Experiment
from labkit.communicator import world
from labkit.worker.work import work

ROWS, STEPS, EPOCHS = 600, 25, 30


def data() -> tuple[np.ndarray, np.ndarray]:
    """Rows that are told from each other."""
    x = np.random.default_rng(1).standard_normal((ROWS, 12)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32)


def experiment(schedule: str, compressor: str | None, **more: Any) -> Experiment:
    """Some hundred steps, in float64 where nothing is compressed."""
    strategy = AllReduce(schedule=schedule, compressor=compressor, bucket_bytes=4096)
    return Experiment(
        model="mlp", model_options={"widths": [64, 32]}, dataset=data(), validation=data(),
        strategy=strategy, workers=3, batch_size=ROWS // STEPS, epochs=EPOCHS, optimizer="adam",
        precision="float64" if compressor is None else "float32", gate=False, **more,
    )  # fmt: skip


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    schedule, compressor, folder = sys.argv[1], sys.argv[2] or None, Path(sys.argv[3])
    communicator = world(limit=60.0)
    (folder / f"pid{communicator.rank}").write_text(str(os.getpid()))

    def report(kind: str, records: Any) -> None:
        if kind == "step":
            (folder / f"steps{communicator.number}").write_text(str(records[-1]["step"]))

    found = work(communicator, experiment(schedule, compressor), None, report)
    weights = found.whole.model if found.whole else b""
    told = {
        "rank": communicator.number,
        "rows": [[row["step"], row["samples"]] for row in found.rows],
        "weights": hashlib.sha256(weights).hexdigest() if weights else "",
    }
    if found.whole is not None:
        told |= {"faults": found.whole.faults, "stretches": found.whole.stretches}
        told |= {"epochs": found.whole.epochs, "evaluation": dict(found.whole.evaluation)}
    (folder / f"told{communicator.number}").write_text(json.dumps(told))
    communicator.close()


if __name__ == "__main__":
    main()
