"""`labkit tf-config`: print each process's TF_CONFIG, for scripts that use tf.distribute."""

from __future__ import annotations

import click

from labkit.common.errors import InvalidInput
from labkit.common.terminal import say
from labkit.frameworks.tf_config import (
    PORT,
    export_commands,
    on_hosts,
    processes_of_this_task,
    slurm_hosts,
)


@click.command("tf-config")
@click.argument("hosts", metavar="HOST...", nargs=-1)
@click.option(
    "--slurm",
    is_flag=True,
    help="Use the hosts of the current Slurm job; inside an srun task, print only the line of "
    "that task.",
)
@click.option(
    "--workers",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Number of workers on each host.",
)
@click.option(
    "--servers",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Number of parameter servers on each host; with servers, the first host also runs "
    "the chief.",
)
@click.option(
    "--server-inside-worker",
    "inside",
    is_flag=True,
    help="Run servers inside worker processes; each worker starts a tf.distribute.Server.",
)
@click.option("--evaluator", is_flag=True, help="Add an evaluator process on the last host.")
@click.option(
    "--port",
    default=PORT,
    show_default=True,
    type=click.IntRange(1, 65_000),
    help="Port of the first task on each host.",
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
    """Print the TF_CONFIG of each process.

    Each line is a shell command that exports TF_CONFIG for a process on its host.
    """
    if slurm == bool(hosts):
        raise InvalidInput(
            "give either host names (labkit tf-config HOST...) or --slurm (labkit tf-config "
            "--slurm)"
        )
    names = slurm_hosts() if slurm else hosts
    spec = on_hosts(names, workers, servers, inside, evaluator, port)
    for process, line in export_commands(
        processes_of_this_task(spec) if slurm else spec.processes(), spec
    ):
        say(f"# {process}\n{line}")
