"""Published results of pipelines, reproduced by simulation of `labkit.schedules.pipeline`."""

from __future__ import annotations

from labkit.network import Network
from labkit.schedules import PIPELINE
from labkit.simulate.pipeline import simulate_pipeline
from labkit.simulate.published.reproduction import (
    BUBBLE_1F1B,
    DDG,
    DDG_WRN,
    TORCHGPIPE,
    TORCHGPIPE_AMOEBANET,
    Figures,
    Parameters,
    Reproduction,
)

MESSAGE = "time of a message, in forward passes of a micro-batch"
# F, B and W are example times in s. With the times F, B and W, the schedule ZB-H2 has a bubble.
F, B, W = 1.0, 1.2, 0.8


def share(schedule: str, stages: int, microbatches: int, message: float = 0.0) -> float:
    """Return a pipeline's idle fraction if a pass takes 1 s and a message `message` s."""
    network = Network(latency=message, bandwidth=1.0) if message else None
    table = PIPELINE[schedule](stages, microbatches)
    return 1 - 3 * microbatches / simulate_pipeline(table, 1, 1, 1, network=network).seconds


def _numbers(name: str) -> list[int]:
    """Return the integers in the name of a result."""
    return [int(word) for word in name.replace(",", " ").split() if word.isdigit()]


def _rate_fit(known: Figures) -> Parameters:
    """Fit the message time by the secant method, because the total time is almost linear in it."""
    ((name, rate),) = known.items()
    stages, microbatches = _numbers(name)
    points = [(message, share("1f1b", stages, microbatches, message)) for message in (0.0, 0.1)]
    while abs(points[-1][1] - rate) > 1e-12:
        (one, low), (other, high) = points[-2:]
        message = other + (rate - high) * (other - one) / (high - low)
        points.append((message, share("1f1b", stages, microbatches, message)))
    return {MESSAGE: points[-1][0]}


def _rate(parameters: Parameters, name: str) -> float:
    stages, microbatches = _numbers(name)
    return share("1f1b", stages, microbatches, parameters[MESSAGE])


def _gpipe_bubble(parameters: Parameters, name: str) -> float:
    return share("gpipe", *_numbers(name))


def _bubble(parameters: Parameters, name: str) -> float:
    """Return the longest idle time of a rank in a pipeline with the named schedule, in s."""
    schedule = {"1F1B": "1f1b", "ZB-H1": "zero_bubble", "ZB-H2": "zero_bubble_h2"}[
        name.split(",")[0]
    ]
    return simulate_pipeline(PIPELINE[schedule](*_numbers(name)), F, B, W).bubble


def speedup(stages: int, microbatches: int) -> float:
    """Return the speed-up p (1 - bubble) of p equal stages over one stage, without overhead."""
    return stages * (1 - share("gpipe", stages, microbatches))


RELATIVE_SPEED = "speed relative to one stage"


def _amoebanet_fit(known: Figures) -> Parameters:
    ((name, value),) = known.items()
    return {RELATIVE_SPEED: value / speedup(*_numbers(name))}


def _amoebanet(parameters: Parameters, name: str) -> float:
    return parameters[RELATIVE_SPEED] * speedup(*_numbers(name))


def _delayed(parameters: Parameters, name: str) -> float:
    """Return the speed-up 3 / (1 + 2 / K) of K modules whose backward passes run simultaneously."""
    return 3 / (1 + 2 / _numbers(name)[0])


_BUBBLE = "bubble share"
_FORMS = {
    "1F1B, 8, 24": 7 * (F + B + W),
    "ZB-H1, 8, 24": 7 * (F + B - W),
    "ZB-H2, 8, 24": 7 * (F + B - 2 * W),
}
_GPIPE = {
    f"stages {k}, micro-batches {m}": (k - 1) / (m + k - 1) for k, m in ((4, 4), (4, 16), (8, 32))
}

REPRODUCTIONS = (
    Reproduction(
        "GPipe", "C", "(K - 1) / (M + K - 1)", _BUBBLE, _GPIPE, _gpipe_bubble, within=1e-9
    ),
    Reproduction(
        "Qi 2024, zero bubble", "C", "forms", "bubble, F = 1", _FORMS, _bubble, within=1e-9
    ),
    Reproduction(
        "Qi 2024, zero bubble",
        "P",
        "1F1B, measured",
        _BUBBLE,
        BUBBLE_1F1B,
        _rate,
        ("p = 8, m = 24",),
        _rate_fit,
    ),
    Reproduction(
        "torchgpipe",
        "R",
        "AmoebaNet-D",
        "speed-up",
        TORCHGPIPE_AMOEBANET,
        _amoebanet,
        ("8 stages, m = 1",),
        _amoebanet_fit,
    ),
    Reproduction(
        "torchgpipe", "R", "ResNet-101, number of micro-batches unknown", "speed-up", TORCHGPIPE
    ),
    Reproduction(
        "Huo 2018, DDG",
        "F",
        "bound 3 / (1 + 2 / K) [C]",
        "speed-up",
        DDG | DDG_WRN,
        _delayed,
        marks=dict.fromkeys(DDG_WRN, "R"),
        verdicts=dict.fromkeys(DDG | DDG_WRN, "bound"),
    ),
)
