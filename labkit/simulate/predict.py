"""Predicted beside measured, in one table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from labkit.network import Network
from labkit.simulate.calibrate import Measurement
from labkit.simulate.costs import closed_form
from labkit.simulate.simulation import simulate


@dataclass(frozen=True)
class Prediction:
    """A row of the table: what was measured, and what model and formula say (s).

    `error` is predicted / measured - 1. For comparison: ASTRA-sim predicts a real allreduce
    within 3 to 21 %.
    """

    algorithm: str
    size: int
    nbytes: float
    measured: float
    predicted: float
    closed_form: float
    error: float


def predict(
    measurements: Iterable[Measurement], network: str | Network, gamma: float = 0.0
) -> list[Prediction]:
    """Simulate what was measured, on a network that was given or fitted; gamma: s a byte added.

    The closed form is that of one switch; on hosts or a graph of links only the simulator counts.

    Raises: InvalidInput, for an algorithm or a network that does not exist.
    """
    world = Network.named(network) if isinstance(network, str) else network
    return [_row(each, world, gamma) for each in measurements]


def _row(each: Measurement, network: Network, gamma: float) -> Prediction:
    seconds = simulate(each.algorithm, each.size, each.nbytes, network, gamma=gamma).seconds
    form = closed_form(each.algorithm, each.size, each.nbytes, network, gamma)
    error = seconds / each.seconds - 1
    return Prediction(each.algorithm, each.size, each.nbytes, each.seconds, seconds, form, error)
