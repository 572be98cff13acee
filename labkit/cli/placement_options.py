"""Options of commands that select the hosts on which clusters start their ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from labkit.common.errors import InvalidInput

F = TypeVar("F", bound=Callable[..., Any])

LAUNCHER = click.option(
    "--launcher",
    type=click.Choice(["local", "hosts", "slurm"]),
    help="Launcher that starts the ranks.  [default: hosts with --hosts; slurm with --nodes "
    "or --slurm; without these, local]",
)
HOSTS = click.option(
    "--hosts",
    metavar="a:2,b:2",
    help="Hosts with their numbers of ranks, such as a:2,b:2, or a host file.",
)
NODES = click.option(
    "--nodes", type=click.IntRange(1), help="Number of nodes to request from Slurm."
)
AGENT = click.option(
    "--agent", metavar="COMMAND", help="Remote shell command to use instead of ssh."
)
SLURM = click.option(
    "--slurm",
    metavar="OPTIONS",
    help="Options that are passed to salloc, such as '--partition=short --time=10'.",
)
FAULT_TOLERANT = click.option(
    "--fault-tolerant",
    is_flag=True,
    help="Let runs continue when ranks fail, as with Cluster(fault_tolerant=True).",
)


def placed(command: F) -> F:
    """Add the options of this module to a command, which passes their values to `place`."""
    for option in (FAULT_TOLERANT, SLURM, AGENT, NODES, HOSTS, LAUNCHER):
        command = option(command)
    return command


def place(
    launcher: str | None,
    hosts: str | None,
    nodes: int | None,
    agent: str | None,
    slurm: str | None,
    fault_tolerant: bool = False,
) -> None:
    """Set environment variables that provide the defaults of all clusters that this process starts.

    Arguments of the class Cluster override these defaults.

    Args:
        launcher: The launcher of ranks: "local", "hosts" or "slurm"; None: infer the launcher from
            the other options.
        hosts: Hosts with their numbers of ranks, such as "a:2,b:2", or the path of a host file.
        nodes: The number of nodes to request from Slurm.
        agent: The remote shell command that replaces ssh.
        slurm: Options for Slurm's command salloc.
        fault_tolerant: Whether clusters survive the failure of some ranks.

    Raises:
        InvalidInput: An option is invalid, or has no effect with the chosen launcher.
    """
    from labkit.cluster.start import TOLERANT, VARIABLES, Start

    if fault_tolerant:
        os.environ[TOLERANT] = "1"
    if not any((launcher, hosts, nodes, agent, slurm)):
        return

    if slurm and not (launcher or hosts or os.environ.get(VARIABLES["launcher"])):
        launcher = "slurm"
    how = Start.from_options(None, launcher=launcher, hosts=hosts, nodes=nodes)
    for option, value, launchers in (
        ("--nodes", nodes, ("slurm",)),
        ("--slurm", slurm, ("slurm",)),
        ("--agent", agent, ("hosts", "slurm")),
    ):
        if value and how.launcher not in launchers:
            raise InvalidInput(
                f"{option} has no effect with --launcher {how.launcher}; give it with "
                f"--launcher {' or '.join(launchers)}"
            )
    listed = ",".join(map(str, how.hosts))
    values = {"hosts": listed, "nodes": str(nodes or ""), "agent": agent, "options": slurm}
    settled = {"launcher": how.launcher} | {
        field: value for field, value in values.items() if value
    }
    os.environ |= {VARIABLES[field]: value for field, value in settled.items()}
