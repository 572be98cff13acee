"""Predicted beside measured, in one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.common.errors import InvalidInput
from labkit.common.units import seconds_text
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate.calibrate import Fit, Measurement
from labkit.simulate.costs import closed_form
from labkit.simulate.simulation import simulate

if TYPE_CHECKING:
    import pandas

# What `labkit.bench.collectives.measure` returns: numbers and names by column.
Rows: TypeAlias = Sequence[Mapping[str, Any]]


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
    return [_row(measurement, world, gamma) for measurement in measurements]


def measurements(rows: Rows) -> list[Measurement]:
    """The medians of a bench's rows, of all algorithms that have a schedule and were right."""
    return [
        Measurement(row["bytes"], row["median_ms"] / 1e3, row["algorithm"], row["workers"])
        for row in rows
        if row["algorithm"] in ALLREDUCE and row.get("correct", True)
    ]


def prediction_table(rows: Rows, network: Network, gamma: float) -> pandas.DataFrame:
    """A row a measurement: ms as measured and predicted, and error = predicted / measured - 1.

    What has no schedule is not predicted; rows whose results were wrong have no time.
    """
    import pandas as pd

    found = []
    for row in rows:
        right = row.get("correct", True)
        known = predict(measurements([row]), network, gamma)
        each = known[0] if known else None
        found.append(
            {
                "algorithm": row["algorithm"],
                "workers": row["workers"],
                "bytes": row["bytes"],
                "measured_ms": row["median_ms"] if right else None,
                "min_ms": row["min_ms"] if right else None,
                "p90_ms": row["p90_ms"] if right else None,
                "predicted_ms": 1e3 * each.predicted if each else None,
                "closed_form_ms": 1e3 * each.closed_form if each else None,
                "error": each.error if each else None,
                "correct": right,
            }
        )
    times = ["measured_ms", "min_ms", "p90_ms", "predicted_ms", "closed_form_ms", "error"]
    return pd.DataFrame(found).astype(dict.fromkeys(times, "float64"))


def model_of(
    rows: Rows, network: str | Network | Fit | None, gamma: float
) -> tuple[Network, float, str]:
    """Network and γ of the prediction, and where they are from."""
    if not rows:
        raise InvalidInput("no rows to compare: give those of labkit.bench.collectives.measure")
    if isinstance(network, Fit):
        return network.network(), network.gamma, _fit_text(network)
    if network is None:
        names = {row["network"] for row in rows}
        if len(names) > 1 or None in names:
            raise InvalidInput(
                f"measured on {', '.join(sorted(map(str, names)))}: say with which network to "
                f"predict, or give calibrate(measurements(rows))"
            )
        network = str(names.pop())
    world = Network.named(network) if isinstance(network, str) else network
    return world, gamma, f"simulation on {world}"


def _fit_text(fit: Fit) -> str:
    """`α 12 µs, β 0.1 ns a byte (9.8 GB/s), γ 0.05 ns a byte`"""
    speed = f" ({1e-9 / fit.beta:.3g} GB/s)" if fit.beta else ""
    return (
        f"fit of {fit.count} measurements: α {seconds_text(fit.alpha)}, "
        f"β {1e9 * fit.beta:.3g} ns a byte{speed}, γ {1e9 * fit.gamma:.3g} ns a byte"
    )


def _row(each: Measurement, network: Network, gamma: float) -> Prediction:
    seconds = simulate(each.algorithm, each.size, each.nbytes, network, gamma=gamma).seconds
    form = closed_form(each.algorithm, each.size, each.nbytes, network, gamma)
    error = seconds / each.seconds - 1
    return Prediction(each.algorithm, each.size, each.nbytes, each.seconds, seconds, form, error)
