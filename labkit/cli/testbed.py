"""`labkit testbed`: emulated hosts on this machine, which run until `labkit testbed down`."""

from __future__ import annotations

import click

from labkit.common.errors import LabkitError
from labkit.common.terminal import say


@click.group()
def testbed() -> None:
    """Emulate several hosts on this machine (needs Linux and root).

    The emulated hosts have links of limited bandwidth; Slurm can run on them.
    """


@testbed.command()
@click.option(
    "--nodes",
    default=2,
    show_default=True,
    help="Number of emulated hosts, from 2 to 8; their names are a, b, c, …",
)
@click.option(
    "--cores",
    default=2,
    show_default=True,
    help="Number of CPUs of each host that Slurm allocates.",
)
@click.option(
    "--bandwidth", default="1Gb/s", show_default=True, help="Bandwidth of each host's link."
)
@click.option(
    "--slurm/--no-slurm", default=True, show_default=True, help="Run Slurm on the emulated hosts."
)
def up(nodes: int, cores: int, bandwidth: str, slurm: bool) -> None:
    """Start emulated hosts, which run until the command `labkit testbed down`."""
    from labkit.hosts import testbed_state
    from labkit.hosts.testbed_state import TestbedPlan

    plan = TestbedPlan(nodes, cores, bandwidth, slurm)
    folder = testbed_state.folder_of(testbed_state.UP)
    if testbed_state.read_state(folder) is not None:
        raise LabkitError("a testbed is already running; stop it first: labkit testbed down")
    # A testbed (emulated hosts on this machine) that was killed may have left files.
    testbed_state.remove_stale(folder)
    testbed_state.start(testbed_state.folder_of(testbed_state.UP), plan, parent=False)
    _show()


@testbed.command()
def down() -> None:
    """Stop the emulated hosts, and remove their processes, network links, namespaces and files."""
    from labkit.hosts import testbed_state

    ended = testbed_state.end(testbed_state.folder_of(testbed_state.UP))
    say("the testbed has stopped" if ended else "no testbed is running")


@testbed.command()
def status() -> None:
    """List the running emulated hosts, and the commands that reach them."""
    _show()


def _show() -> None:
    from labkit.hosts import testbed_state
    from labkit.hosts.testbed_state import TestbedPlan

    folder = testbed_state.folder_of(testbed_state.UP)
    record = testbed_state.read_state(folder)
    if record is None:
        testbed_state.remove_stale(folder)
        say("no testbed is running; start one: labkit testbed up")
        return
    plan = TestbedPlan(**record["plan"])
    slurm = f", Slurm with {plan.cores} CPUs on each host" if plan.slurm else ""
    say(f"{plan.nodes} hosts at {plan.bandwidth}{slurm}")
    for name in plan.hosts:
        say(f"{name} {record['addresses'][name]}: {folder / testbed_state.AGENT} {name} hostname")
    tried = "srun, sbatch, salloc, " if plan.slurm else ""
    say(f"login: {folder / testbed_state.LOGIN_COMMAND} bash   # for {tried}mpiexec --host a:2,b:2")
