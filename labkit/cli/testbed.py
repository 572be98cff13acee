"""`labkit testbed`: hosts on this machine that stay up until they are ended."""

from __future__ import annotations

import click

from labkit.common.errors import LabkitError
from labkit.common.terminal import say


@click.group()
def testbed() -> None:
    """Several hosts on this machine, with links of a given rate and Slurm (Linux, as root)."""


@testbed.command()
@click.option("--nodes", default=2, show_default=True, help="Hosts, 2 to 8: a, b, c, …")
@click.option("--cores", default=2, show_default=True, help="CPUs that Slurm counts on each.")
@click.option("--bandwidth", default="1Gb/s", show_default=True, help="Of each host's link.")
@click.option("--slurm/--no-slurm", default=True, show_default=True, help="Run Slurm on them.")
def up(nodes: int, cores: int, bandwidth: str, slurm: bool) -> None:
    """Start them; they stay up until `labkit testbed down`."""
    from labkit.hosts import state
    from labkit.hosts.plan import Plan

    plan = Plan(nodes, cores, bandwidth, slurm)
    folder = state.folder_of(state.UP)
    if state.state(folder) is not None:
        raise LabkitError("a testbed is up already; end it first: labkit testbed down")
    state.forget(folder)  # what one that was killed has left
    state.start(state.folder_of(state.UP), plan, parent=False)
    _show()


@testbed.command()
def down() -> None:
    """End them: every process, link, namespace and file."""
    from labkit.hosts import state

    ended = state.end(state.folder_of(state.UP))
    say("the testbed has ended" if ended else "no testbed is up")


@testbed.command()
def status() -> None:
    """Say which hosts are up, and how commands reach them."""
    _show()


def _show() -> None:
    from labkit.hosts import state
    from labkit.hosts.plan import Plan

    folder = state.folder_of(state.UP)
    found = state.state(folder)
    if found is None:
        state.forget(folder)
        say("no testbed is up; start one: labkit testbed up")
        return
    plan = Plan(**found["plan"])
    slurm = f", Slurm with {plan.cores} CPUs on each" if plan.slurm else ""
    say(f"{plan.nodes} hosts at {plan.bandwidth}{slurm}")
    for name in plan.hosts:
        say(f"{name} {found['addresses'][name]}: {folder / state.AGENT} {name} hostname")
    tried = "srun, sbatch, salloc, " if plan.slurm else ""
    say(f"login: {folder / state.LOGIN_COMMAND} bash   # for {tried}mpiexec --host a:2,b:2")
