"""`labkit tf-config`: what each host of a cluster is told, for a script with tf.distribute."""

from __future__ import annotations

import click

from labkit.common.errors import InvalidInput
from labkit.common.terminal import say
from labkit.frameworks.tf_config import PORT, lines, of_this_task, on_hosts, slurm_hosts


@click.command("tf-config")
@click.argument("hosts", metavar="HOST...", nargs=-1)
@click.option(
    "--slurm",
    is_flag=True,
    help="The hosts of the job of Slurm's in which it is called; in what srun starts, the line of "
    "that task alone.",
)
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1), help="A node.")
@click.option(
    "--servers",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="A node; with any, the first host has the chief, too.",
)
@click.option(
    "--server-inside-worker",
    "inside",
    is_flag=True,
    help="Servers live in the processes of the workers, which start a tf.distribute.Server each.",
)
@click.option("--evaluator", is_flag=True, help="One more process on the last host.")
@click.option(
    "--port",
    default=PORT,
    show_default=True,
    type=click.IntRange(1, 65_000),
    help="Of a node's first task.",
)
def tf_config(
    hosts: tuple[str, ...],
    slurm: bool,
    workers: int,
    servers: int,
    inside: bool,
    evaluator: bool,
    port: int,
) -> None:
    """Print TF_CONFIG of each process of a cluster, as a line for the shell of its host."""
    if slurm == bool(hosts):
        raise InvalidInput("give hosts, or --slurm, and not both: labkit tf-config HOST...")
    found = slurm_hosts() if slurm else hosts
    spec = on_hosts(found, workers, servers, inside, evaluator, port)
    for who, line in lines(of_this_task(spec) if slurm else spec.processes(), spec):
        say(f"# {who}\n{line}")
