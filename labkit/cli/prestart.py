"""`labkit prestart`: start rank processes in advance, so that clusters start at once."""

from __future__ import annotations

import os

import click

from labkit.cli.sweep import FORCE
from labkit.common.machine import OVERSUBSCRIBE
from labkit.common.terminal import say
from labkit.common.units import bytes_text, plural

COUNT = click.IntRange(1)


@click.command()
@click.option("--workers", type=COUNT, help="Number of ranks.  [default: 2]")
@click.option("--threads", type=COUNT, help="TensorFlow threads in each rank.  [default: 1]")
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Number of minutes without use after which the engines end.",
)
@click.option(
    "--stop",
    is_flag=True,
    help="End the warm engines that have the given --workers and --threads; without these "
    "options, end all warm engines.",
)
@click.option("--force", is_flag=True, help=FORCE)
def prestart(
    workers: int | None, threads: int | None, minutes: float, stop: bool, force: bool
) -> None:
    """Start engines (rank processes) in advance for the next cluster.

    The engines import TensorFlow, and then wait for a notebook, script or run that uses them. The
    first cluster that needs the engines claims them. Warm engines end together with the cluster
    that claimed them, so that no two clusters share state. The command replaces engines that a
    cluster has used. A cluster claims warm engines only with equal numbers of ranks and threads.
    Warm engines must also have the same environment as the cluster. Python, labkit and TensorFlow
    must also be the same.
    """
    from labkit.cluster import warm as pool
    from labkit.cluster.start import Start

    if stop:
        ended = pool.stop(workers, threads)
        for engines in ended:
            say(f"ended: {_shape(engines['workers'], engines['threads'])}")
        if not ended:
            say("no warm engines have the given --workers and --threads")
        return
    how = Start.from_options(workers, threads or 1, launcher="local")
    if force:
        os.environ[OVERSUBSCRIBE] = "1"
    status, already = pool.start(how, 60 * minutes)
    shape, end = _shape(how.workers, how.threads), "labkit prestart --stop"
    idle = f"{status['idle'] / 60:g} minutes without use, or when you run {end}"
    if status["state"] != "warm":
        say(
            f"{shape}: the engines are in use or starting; new engines start after each use, "
            f"until you run {end}"
        )
    elif already:
        say(
            f"engines are already warm: {shape}, {bytes_text(status['bytes'])} of memory; they "
            f"end after {idle}"
        )
    else:
        took = f"warm after {status['seconds']:.1f} s: {shape}"
        say(f"{took}, {bytes_text(status['bytes'])} of memory; the engines end after {idle}")


def _shape(workers: int, threads: int) -> str:
    return f"{plural(workers, 'rank')} of {plural(threads, 'thread')}"
