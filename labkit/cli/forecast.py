"""`labkit forecast`: what an experiment would take on any number of workers; nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labkit.bench.command import numbers
from labkit.cli.simulate import network_of
from labkit.common.terminal import say

if TYPE_CHECKING:
    from labkit.forecast import Forecast

HEAD = (
    *("workers", "step", "nine in ten", "samples/s", "strong", "weak", "on the wire", "waiting"),
    *("sent a step", "training", "price", "kWh"),
)


def _numbers(ctx: click.Context, option: click.Parameter, text: str | None) -> list[int] | None:
    return None if text is None else numbers(ctx, option, text)


@click.command()
@click.argument("experiment", default="mlp")
@click.option("-p", "fields", metavar="NAME VALUE", nargs=2, multiple=True, help="One field.")
@click.option("--workers", callback=_numbers, help="Such as 1,2,4; default: up to 64, or its own.")
@click.option(
    "--network",
    help="Between machines like the measured one: a name, or a .yaml or .json file with the fields "
    "of labkit.Network; default: the experiment's own, emulated on one machine, or none.",
)
@click.option("--calibration", type=click.Path(path_type=Path), help="Of another machine.")
@click.option("--node-hour", type=float, help="Price of a node for an hour.")
@click.option("--gigabyte", type=float, help="Price of 10⁹ bytes that leave a rank.")
@click.option("--watts", type=float, help="Of a node.")
@click.option("--ranks-a-node", type=int, help="How many ranks have a node together.")
@click.option("--target-steps", type=int, help="Steps to the target; default: its epochs.")
@click.option("--json", "as_json", is_flag=True, help="All figures, and where each is from.")
def forecast(
    experiment: str,
    fields: tuple[tuple[str, str], ...],
    workers: list[int] | None,
    network: str | None,
    calibration: Path | None,
    as_json: bool,
    **prices: Any,
) -> None:
    """Forecast a step, its parts and price, up to 10,000 workers, from what was measured.

    EXPERIMENT is a YAML file, or the name of a model; -p sets its fields:

    labkit forecast mlp -p dataset mnist -p strategy '{name: AllReduce, schedule: overlap}'
    --network 10GbE
    """
    from labkit.cli.experiments import experiment_named
    from labkit.jobs.listing import table

    asked = experiment_named(experiment, dict(fields))
    world = None if network is None else network_of(network)
    counts = workers or ([2**k for k in range(7)] if world else sorted({1, asked.workers}))
    forecasts = [asked.forecast(count, world, calibration, **prices) for count in counts]
    if as_json:
        say(json.dumps([each.to_json() for each in forecasts], indent=1, allow_nan=False))
        return
    say(f"{forecasts[-1].label} on {forecasts[-1].where}")
    say(table([_row(each) for each in forecasts], HEAD))
    say(table(list(forecasts[-1].sources), ("figure", "known by")))


def _row(each: Forecast) -> list[str]:
    from labkit.common.units import bytes_text, duration_text, number_text, seconds_text

    low, high = map(seconds_text, each.interval)
    parts = each.taken.parts
    return [
        f"{each.workers:,}",
        seconds_text(each.seconds),
        f"{low} to {high}",
        number_text(each.samples_per_s),
        f"{each.strong:.0%}",
        f"{each.weak:.0%}",
        seconds_text(parts.get("wire", 0.0)),
        seconds_text(parts.get("wait", 0.0)),
        bytes_text(each.sent),
        "" if each.training is None else duration_text(each.training),
        "" if each.money is None else number_text(each.money),
        "" if each.energy is None else number_text(each.energy / 3.6e6),
    ]
