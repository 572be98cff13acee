"""`labkit calibrate`: measure once what forecasts of this machine are made from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from labkit.bench.command import compressors, numbers
from labkit.common.output import output_option
from labkit.common.terminal import say

if TYPE_CHECKING:
    from labkit.compression import Compressor
    from labkit.forecast import Calibration


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option(
    "-p", "fields", metavar="NAME VALUE", nargs=2, multiple=True, help="Of all experiments."
)
@output_option("-o", "output", help="Write it here instead.")
@click.option("--threads", default="1", show_default=True, callback=numbers, help="Of a rank.")
@click.option("--batches", default="16,64,256", show_default=True, callback=numbers)
@click.option("--workers", default=2, show_default=True, help="Ranks at once, at most.")
@click.option(
    "--compressors",
    "further",
    callback=compressors,
    help="Further ones, beside all that need no fields: '{name: TopK, ratio: 0.001}'.",
)
@click.option("--quick", is_flag=True, help="Fewer repeats and sizes: a few minutes.")
@click.option("--show", is_flag=True, help="Only show what this machine, or -o FILE, has.")
def calibrate(
    models: tuple[str, ...],
    fields: tuple[tuple[str, str], ...],
    output: Path | None,
    threads: list[int],
    batches: list[int],
    workers: int,
    further: list[Compressor],
    quick: bool,
    show: bool,
) -> None:
    """Measure what steps, messages and compressors take here, for `labkit forecast`.

    MODEL is a name, or the YAML file of an experiment, whose model, data set, precision and
    optimizer count; -p sets these of all: labkit calibrate mlp cnn -p dataset mnist. Of an
    experiment of several workers, whole steps of its strategy are measured, too. What is measured
    is kept with this machine and its versions, beside what was measured before.
    """
    from labkit.bench.calibration_runs import calibrate as measure
    from labkit.bench.compression import without_fields
    from labkit.cli.experiments import experiment_named
    from labkit.forecast import Calibration
    from labkit.forecast.calibration_store import here
    from labkit.jobs.listing import shown

    if show:
        _show(Calibration.load(output) if output else here())
        return
    experiments = [experiment_named(model, dict(fields)) for model in models or ("mlp",)]
    found = measure(
        experiments,
        workers,
        batches,
        threads,
        [*without_fields(), *further],
        quick,
        file=output,
        told=lambda line: say(line, err=True),
    )
    _show(found)
    say(f"calibration {found.hash8}: {shown(output) if output else 'kept for this machine'}")


def _show(calibration: Calibration) -> None:
    """Where each figure is from, and latency and speed of each level."""
    from labkit.common.units import seconds_text
    from labkit.forecast.provenance import fits, sources
    from labkit.jobs.listing import table

    say(table(sources(calibration), ("figure", "known by")))
    rows = [
        (level, seconds_text(fit.alpha), f"{fit.beta:.2e}", f"{fit.gamma:.2e}", f"{fit.error:.0%}")
        for level, fit in fits(calibration).items()
    ]
    if rows:
        say(table(rows, ("level", "a message", "s a byte sent", "s a byte added", "off by")))
