"""Attack real commands at random moments with signals, resource limits, and full file systems.

After each attack the command must end, name the cause in its output and its record, and leave no
processes or files. After that, a new run must work.
"""

from __future__ import annotations

import os
import random
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click

from labkit.bench.command import AS_JSON, names, show_rows
from labkit.bench.timing import Row
from labkit.common.errors import LabkitError
from labkit.common.nearest import refuse_unknown
from labkit.common.terminal import say
from tests.acceptance.command_under_test import LEFT, CommandUnderTest, wait_for

Act: TypeAlias = Callable[[CommandUnderTest], None]
STILL = 20.0  # seconds for which all processes are stopped
STALE = 60  # number of shared-memory segments without an owner
SWEPT = ("workers=2,3", "--jobs", "1")
STARTED = (4, 8, 16)  # numbers of ranks that start while their caller is killed
STARTS = 20.0  # seconds that the start of ranks takes on two cores
ADDRESSES = 2 << 30  # limit of mapped memory, bytes; too small for TensorFlow


@dataclass(frozen=True)
class Attack:
    """An attack on a command, and the way in which the command must end.

    Attributes:
        act: The function that attacks the command.
        told: Regular expression that must match the cause in the command's record or output.
        state: Required final state of the records; "" if the attack may precede the first record.
        kind: Kind of the command, see `CommandUnderTest`.
        more: Further arguments of the command line.
        begin: Function that the child process calls before it executes the command.
        spread: Maximal number of seconds between the start of work on the ranks and the attack.
        anytime: If positive, the attack comes at a random moment within this number of seconds
            after the command's start, and `spread` is ignored.
        role: The seconds of `anytime` begin when a process with this role exists.
        ranks: Possible numbers of ranks; each attack draws one of them.
        within: Seconds after which no process or file of the command may remain.
        followed: Whether the campaign starts another run after the attack.
    """

    act: Act
    told: str
    state: str = "failed"
    kind: str = "notebook"
    more: tuple[str, ...] = ()
    begin: Callable[[], None] | None = None
    spread: float = 2.0
    anytime: float = 0.0
    role: str = ""
    ranks: tuple[int, ...] = (2,)
    within: float = LEFT
    followed: bool = True


def _send(signal: str, role: str = "") -> Act:
    return lambda target: target.send(signal, role)


def _nothing(target: CommandUnderTest) -> None:
    """Do nothing: the attack's function `begin` has already limited the command's memory."""


def _still(target: CommandUnderTest) -> None:
    """Stop all processes for a while, check that they continue, then end the command by Ctrl-C."""
    target.send("SIGSTOP")
    time.sleep(STILL)
    target.send("SIGCONT")
    before = target.steps()
    wait_for(lambda: target.steps() > before, target)
    target.send("SIGINT", "command")


def _few_addresses() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))


def _stale_segments(target: CommandUnderTest) -> None:
    """Leave shared-memory segments without an owner, named as by Open MPI; kill the command."""
    for number in range(STALE):
        (target.shared / f"sm_segment.stale.{number}").write_bytes(b"stale")
    target.send("SIGKILL")


def _fill(target: CommandUnderTest) -> None:
    """Fill the file system of the runs, then end the command."""
    with (target.runs / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:  # the file system is full
            target.send("SIGINT", "command")


def _make_read_only(target: CommandUnderTest) -> None:
    """Make the file system of the runs read-only, then end the command."""
    subprocess.run(["mount", "-o", "remount,ro", str(target.runs)], check=True)
    target.send("SIGINT", "command")


def _killed(role: str, told: str = "", **more: Any) -> Attack:
    return Attack(_send("SIGKILL", role), told or f"{role}.*SIGKILL", **more)


def _killed_start(role: str, state: str, **more: Any) -> Attack:
    """Return an attack that kills the process of a role at a random moment while ranks start."""
    return Attack(
        _send("SIGKILL", role),
        "",
        state,
        anytime=STARTS,
        role=role,
        ranks=STARTED,
        within=15.0,
        followed=False,
        **more,
    )


TWO, MANY = ("-p", "workers", "2"), ("-p", "workers", "9999")
ATTACKS = {
    "keeper killed": _killed("keeper", "parent process of the engines.*SIGKILL"),
    "controller killed": _killed("controller"),
    "its parts killed": _killed("part of the controller", "child process .* of the controller"),
    "mpiexec killed": _killed("mpiexec"),
    "rank killed": _killed("rank 1"),
    "rank killed in training": _killed("rank 1", kind="experiment", more=TWO),
    "rank crashed": Attack(_send("SIGSEGV", "rank 1"), "rank 1.*SIGSEGV"),
    "rank ended": Attack(_send("SIGTERM", "rank 1"), "rank 1.*SIGTERM", "interrupted"),
    "rank stopped": Attack(_send("SIGSTOP", "rank 1"), "rank 1.*SIGSTOP"),
    "kernel killed": _killed("kernel"),
    "job killed": _killed("job", "process of the notebook.*SIGKILL"),
    "command killed": _killed("command", "is gone", state="interrupted"),
    "command ended": Attack(_send("SIGTERM", "command"), "SIGTERM", "interrupted"),
    "sweep killed": _killed("command", "is gone", state="interrupted", kind="sweep", more=SWEPT),
    "sweep ended": Attack(
        _send("SIGTERM", "command"), "SIGTERM", "interrupted", kind="sweep", more=SWEPT
    ),
    "all ended": Attack(_send("SIGTERM"), "SIGTERM", "interrupted"),
    "all killed": Attack(_send("SIGKILL"), "is gone", "interrupted"),
    "all stopped for a while": Attack(_still, "by the user", "interrupted"),
    "Ctrl-C at any moment": Attack(
        _send("SIGINT", "command"), "by the user|^$", "interrupted", anytime=15.0
    ),
    "Ctrl-C in training": Attack(
        _send("SIGINT", "command"), "by the user", "interrupted", kind="experiment", more=TWO
    ),
    "too little memory": Attack(
        _nothing, "[Mm]emory", kind="experiment", more=TWO, begin=_few_addresses
    ),
    "too many workers": Attack(_nothing, "memory.*--force", "", kind="experiment", more=MANY),
    "too many by force": Attack(
        _nothing, "memory.*allowed are", "", kind="experiment", more=(*MANY, "--force")
    ),
    "script killed at its start": _killed_start("command", "", kind="script"),
    "command killed at its start": _killed_start("command", "interrupted"),
    "job killed at its start": _killed_start("job", "failed"),
    "kernel killed at its start": _killed_start("kernel", "failed"),
    "stale segments": Attack(_stale_segments, "is gone", "interrupted"),
    "full disk": Attack(_fill, "No space left on device", kind="experiment", more=TWO),
    "read-only disk": Attack(_make_read_only, "Read-only file system", kind="experiment", more=TWO),
}
DISKS = ("full disk", "read-only disk")


def measure(only: Sequence[str], times: int, seed: int) -> Iterator[Row]:
    """Attack commands, and yield one row per attack when all its repeats are done.

    Args:
        only: Names of attacks in `ATTACKS`; if empty, all attacks are made.
        times: Number of repeats of each attack.
        seed: Seed of the random numbers that set the moments of the attacks.

    Raises:
        InvalidInput: A name is not in `ATTACKS`.
    """
    refuse_unknown("attack", only, ATTACKS)
    draw = random.Random(seed)
    for name in only or ATTACKS:
        if name in DISKS and os.geteuid() != 0:
            continue  # only root can mount a small file system
        ends = [_try(name, ATTACKS[name], draw) for _ in range(times)]
        wrong = [end["wrong"] for end in ends if end["wrong"]]
        yield {
            "bench": "attack",
            "case": name,
            "seed": seed,
            "tried": len(ends),
            "survived": len(ends) - len(wrong),
            "seconds": max(float(end["seconds"] or 0) for end in ends),
            "left": "; ".join(str(end["left"]) for end in ends if end["left"]),
            "told": str(ends[-1]["told"]),
            "wrong": "; ".join(map(str, wrong)),
        }


def _try(name: str, attack: Attack, draw: random.Random) -> Row:
    """Attack one command; return a row with its end time, leftovers, output and faults."""
    ranks = draw.choice(attack.ranks)
    how = attack.kind, attack.more, attack.begin
    target = CommandUnderTest(*how, disk=name in DISKS, ranks=ranks)
    try:
        if attack.anytime:
            wait_for(lambda: attack.role in ("", *target.processes().values()), target)
            time.sleep(draw.uniform(0.0, attack.anytime))
        elif attack.act is not _nothing:
            wait_for(target.at_work, target)
            time.sleep(draw.uniform(0.0, attack.spread))
        begin = time.monotonic()
        attack.act(target)
        ended = target.ended()
        seconds = time.monotonic() - begin
        left = target.left(attack.within)
        told = target.told()
        wrong = [] if ended else ["the command did not end"]
        wrong += [f"left: {', '.join(left)}"] if left else []
        wrong += [f"told: {told}"] if not re.search(attack.told, told, re.DOTALL) else []
        wrong += _odd_states(attack, target)
        wrong += ["a traceback"] if "Traceback" in target.said() else []
        fails = attack.followed and not target.next_works()
        wrong += ["the next run does not work"] if fails else []
        wrong = [f"{name}: {each}" for each in wrong]
        text = ", ".join(left)
        return {"seconds": seconds, "left": text, "told": told, "wrong": "; ".join(wrong)}
    except LabkitError as error:
        return {"seconds": 0.0, "left": "", "told": "", "wrong": f"{name}: {error}"}
    finally:
        target.close()


def _odd_states(attack: Attack, target: CommandUnderTest) -> list[str]:
    """Return descriptions of the record states that differ from the state the attack requires.

    An attack at a random moment may precede the first record, so a missing record is allowed.
    """
    states = [str(record["state"]) for record in target.records()]
    if not attack.state:
        return [f"started: {states}"] if states else []
    if not states and not attack.anytime:
        return ["no record"]
    return [f"state: {state}" for state in states if state not in (attack.state, "queued")]


@click.command("attack")
@click.option("--only", "names", default=None, callback=names, help="Names with commas; or all.")
@click.option(
    "--times", default=1, show_default=True, type=click.IntRange(1), help="Each so often."
)
@click.option("--seed", default=0, show_default=True, help="Of the moments.")
@AS_JSON
def command(names: list[str], times: int, seed: int, file: Path | None) -> None:
    """Attack real commands of this machine by signals, resource limits and full disks."""
    rows = []
    for row in measure(names, times, seed):
        rows.append(row)
        say(f"{row['case']}: {row['survived']} of {row['tried']}: {row['told']}", err=True)
        if row["wrong"]:
            say(f"  wrong: {row['wrong']}", err=True)
    columns = {"case": f"attack (seed {seed})", "tried": "tried", "survived": "survived"}
    columns |= {"seconds": "s until the end", "left": "left", "wrong": "wrong"}
    show_rows(rows, columns, file)
