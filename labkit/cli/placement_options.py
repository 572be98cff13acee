"""Options that say where the ranks of a notebook's clusters start."""

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
    help="What starts the ranks of its clusters; default: what the other options say, or this "
    "machine.",
)
HOSTS = click.option("--hosts", metavar="a:2,b:2", help="Hosts with their ranks, or a host file.")
NODES = click.option("--nodes", type=click.IntRange(1), help="How many nodes Slurm gives.")
AGENT = click.option("--agent", metavar="COMMAND", help="In place of ssh.")
SLURM = click.option(
    "--slurm", metavar="OPTIONS", help="For salloc: '--partition=short --time=10'."
)
FAULT_TOLERANT = click.option(
    "--fault-tolerant",
    is_flag=True,
    help="Runs outlive the death of ranks, as on Cluster(fault_tolerant=True).",
)


def placed(command: F) -> F:
    """Give a command these options; it hands them to `place`."""
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
    """Settle, for what this process starts, where clusters are that do not say it themselves.

    Clusters may also be fault-tolerant that do not say so.

    Raises:
        InvalidInput: what cannot be, or would have no effect.
    """
    from labkit.cluster.start import TOLERANT, VARIABLES, Start

    if fault_tolerant:
        os.environ[TOLERANT] = "1"
    if not any((launcher, hosts, nodes, agent, slurm)):
        return

    if slurm and not (launcher or hosts or os.environ.get(VARIABLES["launcher"])):
        launcher = "slurm"
    how = Start.asked(None, launcher=launcher, hosts=hosts, nodes=nodes)
    for option, value, of in (
        ("--nodes", nodes, ("slurm",)),
        ("--slurm", slurm, ("slurm",)),
        ("--agent", agent, ("hosts", "slurm")),
    ):
        if value and how.launcher not in of:
            raise InvalidInput(
                f"{option} says nothing of --launcher {how.launcher}; give it with "
                f"--launcher {' or '.join(of)}"
            )
    listed = ",".join(map(str, how.hosts))
    given = {"hosts": listed, "nodes": str(nodes or ""), "agent": agent, "options": slurm}
    settled = {"launcher": how.launcher} | {field: each for field, each in given.items() if each}
    os.environ |= {VARIABLES[field]: each for field, each in settled.items()}
