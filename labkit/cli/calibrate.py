"""`labkit calibrate`: measure this machine once, for use by `labkit forecast`."""

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
    "-p",
    "fields",
    metavar="NAME VALUE",
    nargs=2,
    multiple=True,
    help="Set a field of all experiments that the calibration runs.",
)
@output_option("-o", "output", help="Calibration file to write.  [default: this machine's file]")
@click.option(
    "--threads",
    default="1",
    show_default=True,
    callback=numbers,
    help="Numbers of TensorFlow threads per rank, separated by commas.",
)
@click.option(
    "--batches", default="16,64,256", show_default=True, callback=numbers, help="Batch sizes."
)
@click.option(
    "--workers", default=2, show_default=True, help="Largest number of ranks that is measured."
)
@click.option(
    "--compressors",
    "further",
    callback=compressors,
    help="Further gradient compressors to measure, e.g. '{name: TopK, ratio: 0.001}'; "
    "compressors without required fields are always measured.",
)
@click.option(
    "--quick", is_flag=True, help="Measure fewer repeats and sizes, which takes a few minutes."
)
@click.option(
    "--show",
    is_flag=True,
    help="Only show the calibration of this machine, or of -o FILE; measure nothing.",
)
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
    """Measure this machine for `labkit forecast`.

    The command measures the times of training steps, messages and compressors. Each MODEL is the
    name of a model, or an experiment's YAML file. An experiment's YAML file contains model, data
    set, precision and optimizer. The option -p sets a field of all these experiments: labkit
    calibrate mlp cnn -p dataset mnist

    If an experiment has several workers, whole steps of its strategy are measured as well. The
    results are added to the stored calibration of this machine and its software versions.
    """
    from labkit.bench.calibration_runs import calibrate as measure
    from labkit.bench.compression import without_fields
    from labkit.cli.shared_options import experiment_named
    from labkit.forecast import Calibration
    from labkit.forecast.calibration_store import local_calibration
    from labkit.jobs.listing import displayed_path

    if show:
        _show(Calibration.load(output) if output else local_calibration())
        return
    experiments = [experiment_named(model, dict(fields)) for model in models or ("mlp",)]
    calibration = measure(
        experiments,
        workers,
        batches,
        threads,
        [*without_fields(), *further],
        quick,
        file=output,
        progress=lambda line: say(line, err=True),
    )
    _show(calibration)
    say(
        f"calibration {calibration.hash8}: "
        f"{displayed_path(output) if output else 'stored for this machine'}"
    )


def _show(calibration: Calibration) -> None:
    """Print how each quantity was measured; then latency and cost per byte of each network."""
    from labkit.common.units import seconds_text
    from labkit.forecast.calibration_store import fits, sources
    from labkit.jobs.listing import table

    say(table(sources(calibration), ("quantity", "source")))
    rows = [
        (level, seconds_text(fit.alpha), f"{fit.beta:.2e}", f"{fit.gamma:.2e}", f"{fit.error:.0%}")
        for level, fit in fits(calibration).items()
    ]
    if rows:
        say(table(rows, ("level", "latency", "s per byte sent", "s per byte added", "fit error")))
