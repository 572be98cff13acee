"""The strategies that claim to survive deaths of ranks, and the experiment that tests this."""

from __future__ import annotations

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.communicator import ALGORITHMS
from labkit.communicator.reductions import validate_one_host
from labkit.compression import COMPRESSORS, ErrorFeedback, TopK
from labkit.exchange.autotune import SCHEDULES
from labkit.experiment import Experiment
from labkit.strategies import STRATEGIES, AllReduce, Strategy

ROWS, BATCH, EPOCHS = 600, 24, 20
LOSSY = (None, COMPRESSORS["OneBit"](), ErrorFeedback(inner=TopK(ratio=0.1)))


def data(rows: int = ROWS, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct samples with class labels that a model can learn only by some training."""
    x = np.random.default_rng(seed).standard_normal((rows, 12)).astype(np.float32)
    return x, (x[:, 0] * x[:, 1] + x[:, 2] > 0).astype(np.int32)


def claimed(apart: bool = False) -> list[Strategy]:
    """Return all variants of `AllReduce`, and all other strategies that declare to survive deaths.

    Args:
        apart: Whether the ranks are on several hosts.
    """
    ways = [
        AllReduce(algorithm=algorithm, schedule=schedule, compressor=compressor, bucket_bytes=4096)
        for algorithm in ALGORITHMS
        for schedule in SCHEDULES
        for compressor in LOSSY
        if _runs(algorithm, apart)
    ]
    others = [kind() for kind in STRATEGIES.values() if kind is not AllReduce]
    return [each for each in (*ways, *others) if each.fault_tolerant]


def _runs(algorithm: str, apart: bool) -> bool:
    try:
        validate_one_host(algorithm, on_one_host=not apart)
    except InvalidInput:
        return False
    return True


def question(strategy: Strategy, workers: int, seed: int, epochs: int) -> Experiment:
    """Return an experiment of some hundred short steps; it uses float64 unless it is lossy."""
    return Experiment(
        model="mlp",
        model_options={"widths": [32, 16]},
        dataset=data(),
        validation=data(500, seed=2),
        strategy=strategy,
        workers=workers,
        batch_size=BATCH,
        epochs=epochs,
        optimizer="adam",
        precision="float64" if strategy.lossy is None else "float32",
        seed=seed,
        verify=False,
    )


def named(strategy: Strategy) -> str:
    """Return the name of a strategy with its algorithm, schedule and lossy compressor."""
    said = (getattr(strategy, field, "") for field in ("algorithm", "schedule"))
    lossy = strategy.lossy
    return " ".join(
        filter(None, (type(strategy).__name__, *said, lossy_name(strategy) if lossy else ""))
    )


def lossy_name(strategy: Strategy) -> str:
    """Return the name of a strategy's lossy compressor, or "exact" if it has none."""
    return "exact" if strategy.lossy is None else type(strategy.lossy).__name__
