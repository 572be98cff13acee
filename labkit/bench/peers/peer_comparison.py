"""Benchmark rows of other frameworks ("peers"), and start and end of their processes.

A row has the same fields as a row of `labkit.bench.exchange`. All processes run on this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from labkit.bench.exchange import USUAL
from labkit.bench.peers.rank import Meeting, Record, Task
from labkit.bench.steps import CASES
from labkit.bench.timing import Row, added, head, spread
from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator import launcher
from labkit.frameworks import foreign
from labkit.frameworks.child import computing, outside_mpi
from labkit.frameworks.environments import Installation, find
from labkit.frameworks.namespaces import private_network
from labkit.frameworks.tf_config import free_ports

TIMES = ("median_ms", "min_ms", "p90_ms", "added_ms", "added_min_ms", "added_max_ms")
# The constants START and CASE are timeouts in seconds. START limits the start of a framework, and
# CASE limits each benchmark case.
START, CASE = 120.0, 300.0
RANK = [foreign.__file__, "labkit.bench.peers.rank"]


def validate_peers(names: Sequence[str], network: str | None) -> None:
    """Validate the names of the frameworks to compare, and the network.

    Raises:
        InvalidInput: A framework is unknown, or a network is given. Only labkit can emulate a
            network.
    """
    for name in names:
        find(name)
    if names and network is not None:
        raise InvalidInput(
            f"other frameworks (--peer) cannot run on the emulated network {network!r}; remove "
            "--network or --peer"
        )


class PeerComparison:
    """Measurements of other frameworks, in turn with labkit, on the same cases and in the same way.

    Each call of `turn` starts new single-threaded processes on this machine. The processes of a
    framework communicate over loopback. At any time, processes of only one framework run, so that
    frameworks do not slow each other down.

    Args:
        names: Names of other frameworks, such as "ddp" or "horovod".
        cases: Names of benchmark cases; names that are not in `labkit.bench.steps.CASES` are
            skipped.
        workers: Number of processes of each framework.

    Attributes:
        remarks: One sentence for each framework that is not installed or fails. A framework also
            gets a sentence if its ranks end with unequal weights.

    Raises:
        InvalidInput: A framework is unknown.
    """

    def __init__(self, names: Sequence[str], cases: Sequence[str], workers: int = 2) -> None:
        self._cases, self._workers = [case for case in cases if case in CASES], workers
        installations = [find(name) for name in dict.fromkeys(names)]
        # If a framework is missing or fails, labkit records a remark, and still measures the other
        # frameworks.
        self.remarks = [peer for peer in installations if isinstance(peer, str)]
        self._records: dict[Installation, list[Record]] = {
            p: [] for p in installations if isinstance(p, Installation)
        }

    def turn(self) -> None:
        """Measure one repeat of every framework and case, with all kinds of steps."""
        for peer in list(self._records):
            try:
                self._records[peer] += run(peer, self._cases, self._workers, repeats=1)
            except LabkitError as error:
                self.remarks.append(str(error))
                del self._records[peer]

    def rows(self, local_rows: Sequence[Row] = ()) -> list[Row]:
        """Return three rows per framework and case: local step, step with exchange, allreduce.

        If the weights of the ranks differ at the end, `remarks` contains a sentence. The row of
        steps with exchange then has no times.

        Args:
            local_rows: Rows of labkit, with which the rows of other frameworks are compared.
                The comparison uses labkit's schedule `USUAL`, or labkit's first schedule if `USUAL`
                was not measured.
        """
        rows: list[Row] = []
        for peer, all_records in self._records.items():
            for case in self._cases:
                if records := [each for each in all_records if each["case"] == case]:
                    rows += self._of(peer, records, _ours(local_rows, case))
        return rows

    def _of(self, peer: Installation, records: Sequence[Record], ours: Row | None) -> Iterator[Row]:
        case, same = records[0]["case"], all(each["same_weights"] for each in records)
        if not same:
            self.remarks.append(
                f"{peer.name}: no times for {case}, because the ranks end with unequal weights"
            )
        for kind in records[0]["seconds"]:
            what = peer.name if kind == "step" else f"{peer.name} {kind}"
            row = head("exchange", case, what, self._workers, repeats=len(records))
            row |= {"peer": peer.name, "version": records[0]["version"]}
            row["bytes"] = 4 * CASES[case].parameters
            medians = [value for each in records for value in each["seconds"][kind]]
            row |= spread(medians)
            if kind == "step":
                row |= {"same_weights": same} | added(
                    [value for each in records for value in each["added"][kind]]
                )
                row |= _comparison(row, ours) if same else dict.fromkeys(TIMES)
            yield row


def _ours(own: Sequence[Row], case: str) -> Row | None:
    """Return labkit's own measurement of a test case, or None."""
    exchanged = [row for row in own if row["case"] == case and row.get("same_weights")]
    return next((r for r in exchanged if r["what"] == USUAL), next(iter(exchanged), None))


def _comparison(theirs: Row, ours: Row | None) -> Row:
    """Return labkit's added time divided by the other framework's added time.

    The result is empty if the added time of labkit or of the other framework is not positive. An
    added time that is not positive is smaller than the noise.
    """
    if ours is None or not min(_added_ms(ours), _added_ms(theirs)) > 0:
        return {}
    return {"ours": ours["what"], "ours_to_theirs": _added_ms(ours) / _added_ms(theirs)}


def _added_ms(row: Row) -> float:
    return float(row["added_ms"] or 0)


def run(peer: Installation, cases: Sequence[str], workers: int, repeats: int) -> list[Record]:
    """Measure another framework on some benchmark cases, with one thread per process.

    Returns:
        One record per case, with the fields `case` and `version`. `seconds` maps each kind of step
        to its median time in each repeat. `added` maps each kind of step to the time that it adds
        to the local step. `same_weights` tells whether all ranks end with equal weights.

    Raises:
        LabkitError: A process failed or did not end; the message contains the last line of the
            process's output.
    """
    with tempfile.TemporaryDirectory(prefix="labkit-peer-") as name:
        folder = Path(name)
        meeting = folder / "meeting"
        meeting.write_bytes(bytes(Meeting.size_of(workers)))
        task = Task(
            peer=peer.name,
            rank=None,
            size=workers,
            cases=list(cases),
            repeats=repeats,
            meeting=str(meeting),
            ports=free_ports(workers),
        )
        commands = _commands(peer, task)
        variables = _environment(peer)
        with ExitStack() as started:
            inside = started.enter_context(private_network(f"the processes of {peer.name}"))
            processes = [
                started.enter_context(
                    _process([*inside, *command], variables, folder / f"rank{number}")
                )
                for number, command in enumerate(commands)
            ]
            _finish(peer.name, processes, folder, START + CASE * len(cases))
        lines = (folder / "rank0.out").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def _commands(peer: Installation, task: Task) -> list[list[str]]:
    """Return one command per process, or one mpirun command for Horovod."""
    if peer.name != "horovod":
        return [
            [peer.python, *RANK, json.dumps(task | {"rank": rank})] for rank in range(task["size"])
        ]
    rank = [peer.python, *RANK, json.dumps(task)]
    # Horovod's background thread polls MPI, so MPI yields its core when idle. If there are enough
    # cores, each process is bound to a core.
    fits = task["size"] <= (os.cpu_count() or 1)
    place = ("--bind-to", "core") if fits else ("--bind-to", "none", "--oversubscribe")
    mca = ("--mca", "mpi_yield_when_idle", "1", "--mca", "btl", "^tcp")
    return [[_mpirun(peer.python), "-np", str(task["size"]), *place, *mca, *rank]]


def _mpirun(python: str) -> str:
    """Return the mpirun next to the framework's Python, or else on PATH; never labkit's own."""
    own = str(Path(sys.executable).parent)
    places = os.environ.get("PATH", "").split(os.pathsep)
    if python != sys.executable:
        places = [str(Path(python).parent), *(place for place in places if place != own)]
    found = shutil.which("mpirun", path=os.pathsep.join(places))
    if found is None:
        raise LabkitError(
            "no mpirun found: put the mpirun of the MPI that Horovod was built for on PATH"
        )
    return found


def _environment(peer: Installation) -> dict[str, str]:
    # The environment of a framework's ranks contains no MPI variables. MPI variables would connect
    # the framework's ranks to this process's MPI job. As on labkit's ranks, each process has one
    # thread that computes. A second thread of each process may wait for messages.
    return (
        outside_mpi(peer.python)
        | computing(1)
        | {
            # Without fusion of tensors, Horovod does not copy the gradients twice. A fusion
            # threshold of 0 is the fastest of the measured settings of Horovod.
            "HOROVOD_FUSION_THRESHOLD": "0",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            # The processes of the framework use huge pages, because labkit's ranks use huge pages,
            # too.
            **launcher.huge_pages(),
        }
    )


@contextmanager
def _process(
    command: list[str], variables: dict[str, str], files: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a new session; kill its process group at the end of the context."""
    with _file(files, "out") as out, _file(files, "err") as err:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # The launcher mpirun ends its ranks when it receives SIGTERM.
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _file(files: Path, ending: str) -> IO[bytes]:
    return files.with_suffix(f".{ending}").open("wb")


def _finish(
    name: str, processes: Sequence[subprocess.Popen[bytes]], folder: Path, limit: float
) -> None:
    """Wait until all processes succeed; raise LabkitError as soon as a process fails."""
    end = time.monotonic() + limit
    while any(process.poll() is None for process in processes):
        failed = [number for number, process in enumerate(processes) if process.poll()]
        # Waiting ends at the first failure, because the other processes would wait forever for the
        # failed process.
        if failed or time.monotonic() > end:
            break
        time.sleep(0.1)
    for number, process in enumerate(processes):
        if process.poll():
            lines = (folder / f"rank{number}.err").read_text(errors="replace").splitlines()
            # Lines without lower-case letters, such as lines of dashes, are not error messages.
            messages = [line for line in lines if re.search("[a-z]", line)]
            last = messages[-1].strip() if messages else f"exit code {process.returncode}"
            raise LabkitError(
                f"the process of {name} on rank {number} ended before its measurement was "
                f"complete: {last}"
            )
    if any(process.poll() is None for process in processes):
        raise LabkitError(f"the processes of {name} did not end within {limit:.0f} s")
