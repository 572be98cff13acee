"""`labkit simulate`: an allreduce on any network, without processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from labkit.common.terminal import say

if TYPE_CHECKING:
    from labkit.network import Network


@click.command()
@click.argument("algorithm")
@click.option("--workers", default=8, show_default=True, help="Ranks; up to 10,000.")
@click.option("--bytes", "nbytes", default=1e8, show_default=True, help="Of the buffer.")
@click.option(
    "--network",
    default="1GbE",
    show_default=True,
    help="A name, or a .yaml or .json file with the fields of labkit.Network.",
)
@click.option("--gamma", default=0.0, show_default=True, help="Seconds to add one byte.")
def simulate(algorithm: str, workers: int, nbytes: float, network: str, gamma: float) -> None:
    """Predict an allreduce on any network and any number of ranks, without processes."""
    from labkit.schedules import ALLREDUCE
    from labkit.simulate import closed_form
    from labkit.simulate import simulate as predict

    world = network_of(network)
    result = predict(algorithm, workers, nbytes, world, gamma=gamma)
    say(
        f"{algorithm}, {workers} ranks, {nbytes:,.0f} bytes, {world}, simulated: "
        f"{1e3 * result.seconds:,.3f} ms; most messages of a rank {result.messages.max():,.0f}, "
        f"most bytes sent by a rank {result.sent.max():,.0f}"
    )
    if algorithm in ALLREDUCE and not (world.hosts or world.links or world.slow or world.jitter):
        form = closed_form(algorithm, workers, nbytes, world, gamma)
        say(f"closed form: {1e3 * form:,.3f} ms")


def network_of(given: str) -> Network:
    """The network of this name, or of this file. Raises: InvalidInput, in words."""
    from labkit.jobs.parameters import read_text, read_yaml
    from labkit.network import Network

    path = Path(given)
    if path.suffix not in (".yaml", ".yml", ".json"):
        return Network.named(given)
    fields = read_yaml(read_text(path), given)  # JSON is YAML, too
    return Network(**{"name": path.stem} | fields)
