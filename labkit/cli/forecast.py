"""`labkit forecast`: predict time, traffic and cost of an experiment without starting ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labkit.bench.command import numbers
from labkit.cli.shared_options import Report, experiment_named, reports
from labkit.cli.simulate import network_of

if TYPE_CHECKING:
    from labkit.forecast import Forecast

HEAD = (
    *("workers", "step", "90 % interval", "samples/s", "strong", "weak", "on the wire", "waiting"),
    *("sent per step", "training", "cost", "kWh"),
)


def _numbers(ctx: click.Context, option: click.Parameter, text: str | None) -> list[int] | None:
    return None if text is None else numbers(ctx, option, text)


@click.command()
@click.argument("experiment", default="mlp")
@click.option(
    "-p",
    "fields",
    metavar="NAME VALUE",
    nargs=2,
    multiple=True,
    help="Set a field of the experiment whose steps are forecast.",
)
@click.option(
    "--workers",
    callback=_numbers,
    help="Numbers of workers, e.g. 1,2,4.  [default: 1 to 64 with --network; without it, 1 "
    "and the experiment's workers]",
)
@click.option(
    "--network",
    help="Network that connects copies of the calibrated machine: a preset's name, or a .yaml "
    "or .json file with the fields of labkit.Network.  [default: the experiment's "
    "network, if it has one]",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Calibration file of a different machine, for which to forecast.",
)
@click.option("--price-per-node-hour", type=float, help="Price of one node for one hour.")
@click.option("--price-per-gb", type=float, help="Price of sending 10⁹ bytes from a rank.")
@click.option("--node-watts", type=float, help="Electric power of one node in watts.")
@click.option("--ranks-per-node", type=int, help="Number of ranks on each node.")
@click.option(
    "--target-steps",
    type=int,
    help="Number of training steps whose time and cost are forecast.  [default: all epochs of "
    "the experiment]",
)
@reports("the table")
def forecast(
    experiment: str,
    fields: tuple[tuple[str, str], ...],
    workers: list[int] | None,
    network: str | None,
    calibration: Path | None,
    report: Report,
    **prices: Any,
) -> None:
    """Predict an experiment's step time, traffic, cost and energy.

    The forecast starts no ranks, uses the measurements of `labkit calibrate`, and supports up to
    10,000 workers. EXPERIMENT is a YAML file or the name of a model. -p sets fields of the
    experiment:

    labkit forecast mlp -p dataset mnist -p strategy '{name: AllReduce, schedule: overlap}'
    --network 10GbE

    With --json, the result is a list with one object for each number of workers: all forecast
    quantities with their units, and the source of each quantity.
    """
    from labkit.jobs.listing import table

    spec = experiment_named(experiment, dict(fields))
    world = None if network is None else network_of(network)
    counts = workers or ([2**k for k in range(7)] if world else sorted({1, spec.workers}))
    forecasts = [spec.forecast(count, world, calibration, **prices) for count in counts]
    report.details(f"{forecasts[-1].label} on {forecasts[-1].where}")
    text = table([_row(row) for row in forecasts], HEAD)
    report.result(text, [row.to_json() for row in forecasts])
    report.details(table(list(forecasts[-1].sources), ("quantity", "source")))


def _row(forecast: Forecast) -> list[str]:
    from labkit.common.units import bytes_text, duration_text, number_text, seconds_text

    low, high = map(seconds_text, forecast.interval)
    parts = forecast.step.parts
    return [
        f"{forecast.workers:,}",
        seconds_text(forecast.seconds),
        f"{low} to {high}",
        number_text(forecast.samples_per_s),
        f"{forecast.strong_efficiency:.0%}",
        f"{forecast.weak_efficiency:.0%}",
        seconds_text(parts.get("wire", 0.0)),
        seconds_text(parts.get("wait", 0.0)),
        bytes_text(forecast.sent),
        "" if forecast.training_seconds is None else duration_text(forecast.training_seconds),
        "" if forecast.cost is None else number_text(forecast.cost),
        "" if forecast.energy is None else number_text(forecast.energy / 3.6e6),
    ]
