"""`labkit simulate`: simulate an allreduce without ranks, and reproduce published results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from labkit.common.errors import InvalidInput
from labkit.common.output import output_option
from labkit.common.quantities import parse_bytes
from labkit.common.terminal import say

if TYPE_CHECKING:
    from labkit.network import Network
    from labkit.simulate.published import Judged


@click.command()
@click.argument("algorithm", required=False)
@click.option("--workers", default=8, show_default=True, help="Number of ranks, up to 10,000.")
@click.option(
    "--bytes",
    "nbytes",
    default="1e8",
    show_default=True,
    help="Size of the buffer that each rank contributes, in bytes.",
)
@click.option(
    "--network",
    default="1GbE",
    show_default=True,
    help="Network that is simulated: a preset's name, or a .yaml or .json file with the "
    "fields of labkit.Network.",
)
@click.option(
    "--gamma", default=0.0, show_default=True, help="Seconds that a rank needs to sum one byte."
)
@click.option(
    "--published",
    is_flag=True,
    help="Compare measurements of published papers with the simulator's predictions.",
)
@output_option(
    "--json", "file", help="File to which the rows of --published are written, as JSON lines."
)
def simulate(
    algorithm: str | None,
    workers: int,
    nbytes: str,
    network: str,
    gamma: float,
    published: bool,
    file: Path | None,
) -> None:
    """Simulate an allreduce on a network, without starting processes.

    Any network can be simulated, with up to 10,000 ranks. ALGORITHM is a name of
    labkit.schedules.ALLREDUCE, e.g. ring.
    """
    if published == (algorithm is not None) or (file and not published):
        raise InvalidInput(
            f"algorithm={algorithm}, published={published}, json={file}: give either an "
            "algorithm, or --published with or without --json FILE"
        )
    if algorithm is None:
        _published(file)
    else:
        _allreduce(algorithm, workers, parse_bytes(nbytes, "--bytes"), network, gamma)


def _published(file: Path | None) -> None:
    """Print, for each published study, a table of published and predicted values."""
    from labkit.records.store import write_atomically
    from labkit.simulate.published import VERDICTS, reproduce

    rows = reproduce()
    for _, study in groupby(rows, lambda row: (row.source, row.study)):
        say("\n".join(_study_lines(list(study))) + "\n")
    say("\n".join(f"{verdict}: {meaning}" for verdict, meaning in VERDICTS.items()))
    if file:
        lines = (asdict(row) | {"error": row.error, "verdict": row.verdict} for row in rows)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, "".join(json.dumps(line) + "\n" for line in lines))


def _study_lines(rows: list[Judged]) -> Iterator[str]:
    """Yield the text lines of one study: source, fitted parameters, and a table of values."""
    first = rows[0]
    yield f"{first.source}: {first.study}; {first.unit}"
    if first.parameters:
        values = "; ".join(f"{name} = {value:.4g}" for name, value in first.parameters.items())
        yield f"  fitted on {' · '.join(first.fitted)}: {values}"
    yield f"  {'':28} {'ours':>10} {'published':>10} {'error':>12}"
    for row in rows:
        ours = "—" if row.predicted is None else f"{row.predicted:.4g}"
        unit = " points" if row.points else " %"
        error = "" if row.error is None else f"{100 * row.error:+.1f}{unit}"
        published = f"{row.published:10.4g} [{row.mark}]"
        yield f"  {row.what:28} {ours:>10} {published} {error:>12}  {row.verdict}"


def _allreduce(algorithm: str, workers: int, nbytes: float, network: str, gamma: float) -> None:
    """Print the simulated time of an allreduce, and the closed-form time if there is one."""
    from labkit.schedules import ALLREDUCE, IN_NETWORK
    from labkit.simulate import closed_form
    from labkit.simulate import simulate as predict

    world = network_of(network)
    result = predict(algorithm, workers, nbytes, world, gamma=gamma)
    say(
        f"{algorithm}, {workers} ranks, {nbytes:,.0f} bytes, {world}, simulated: "
        f"{1e3 * result.seconds:,.3f} ms; a rank sends at most {result.messages.max():,.0f} "
        f"messages and {result.sent.max():,.0f} bytes"
    )
    known = algorithm in ALLREDUCE | IN_NETWORK
    if known and not (world.hosts or world.links or world.stragglers or world.jitter):
        form = closed_form(algorithm, workers, nbytes, world, gamma)
        say(f"closed form: {1e3 * form:,.3f} ms")


def network_of(source: str) -> Network:
    """Return the network of a name or a file; raise InvalidInput if neither exists."""
    from labkit.jobs.parameters import read_text, read_yaml
    from labkit.network import Network

    path = Path(source)
    if path.suffix not in (".yaml", ".yml", ".json"):
        return Network.named(source)
    # JSON files work as well, because JSON is a subset of YAML.
    fields = read_yaml(read_text(path), source)
    return Network(**{"name": path.stem} | fields)
