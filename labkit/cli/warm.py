"""`labkit warm`: engines that wait, so that who comes next need not."""

from __future__ import annotations

import os

import click

from labkit.cli.sweep import FORCE
from labkit.common.capacity import OVERSUBSCRIBE
from labkit.common.terminal import say
from labkit.common.units import bytes_text, plural

COUNT = click.IntRange(1)


@click.command()
@click.option("--workers", type=COUNT, help="Ranks.  [default: 2]")
@click.option("--threads", type=COUNT, help="TensorFlow's threads in each.  [default: 1]")
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="They end by themselves after so many without use.",
)
@click.option("--stop", is_flag=True, help="End those of this shape; of all, where none is given.")
@click.option("--force", is_flag=True, help=FORCE)
def warm(workers: int | None, threads: int | None, minutes: float, stop: bool, force: bool) -> None:
    """Keep engines with TensorFlow imported for the next notebook, script or run of this shape.

    One user takes them, and they end with it: what a notebook finds is as new. The next are warmed
    when all that used the last have ended. Only who would start the very same engines takes them:
    of this Python, labkit, TensorFlow and environment.
    """
    from labkit.cluster import warm as pool
    from labkit.cluster.start import Start

    if stop:
        ended = pool.stop(workers, threads)
        for standing in ended:
            say(f"ended: {_shape(standing['workers'], standing['threads'])}")
        if not ended:
            say("no such engines are kept warm")
        return
    how = Start.asked(workers, threads or 1, launcher="local")
    if force:
        os.environ[OVERSUBSCRIBE] = "1"
    said, already = pool.start(how, 60 * minutes)
    shape, end = _shape(how.workers, how.threads), "labkit warm --stop"
    idle = f"{said['idle'] / 60:g} minutes without use, or by: {end}"
    if said["state"] != "warm":
        say(f"{shape}: in use or being started; the next are warmed after that, until {end}")
    elif already:
        say(f"already warm: {shape}, {bytes_text(said['bytes'])} of memory; they end after {idle}")
    else:
        took = f"warm after {said['seconds']:.1f} s: {shape}"
        say(f"{took}, {bytes_text(said['bytes'])} of memory; they end after {idle}")


def _shape(workers: int, threads: int) -> str:
    return f"{plural(workers, 'rank')} of {plural(threads, 'thread')}"
