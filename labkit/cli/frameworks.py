"""`labkit frameworks`: separate Python environments of other frameworks, for comparisons."""

from __future__ import annotations

import click

from labkit.common.errors import InvalidInput
from labkit.common.terminal import say
from labkit.frameworks.environments import PEERS, SET_UP, find
from labkit.frameworks.environments import setup as set_up
from labkit.frameworks.tf_config import (
    PORT,
    export_commands,
    on_hosts,
    processes_of_this_task,
    slurm_hosts,
)


@click.group()
def frameworks() -> None:
    """Install other frameworks for comparisons with labkit.

    In a notebook, use a framework as lk.ExternalFramework(NAME). On the command line, use a
    framework by labkit bench exchange --peer NAME.
    """


@frameworks.command("list")
def list_peers() -> None:
    """List each framework with its version and Python, or with its installation command."""
    for name in PEERS:
        found = find(name)
        if isinstance(found, str):
            say(found)
        else:
            say(" ".join(filter(None, [f"{name}:", found.version, found.python])))


@frameworks.command()
@click.argument("name", type=click.Choice(SET_UP))
def setup(name: str) -> None:
    """Install a framework into its own Python environment.

    The framework's packages come from the Python package index. The command creates the environment
    in the user's data folder. The variable LABKIT_PEERS can name another folder for the
    environment. The frameworks ddp and fsdp share one installation of PyTorch, which needs 5 GB of
    disk. With UV_TORCH_BACKEND=cpu, the installation has no GPU packages. The environment with JAX
    needs 500 MB of disk. Horovod is compiled, which takes some minutes and requires cmake and a
    compiler.
    """
    found = set_up(name, say)
    say(f"{name}: {found.version} {found.python}")
    say(f'to use {name}: lk.ExternalFramework("{name}"), or labkit bench exchange --peer {name}')


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
