"""Processes at the ends of a network link, which answer requests by lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from labkit.common.errors import LabkitError
from labkit.frameworks.namespaces import ADDRESSES, command_prefix, rate_limited_link

END = 5.0  # maximum seconds that a process may take to end before it is killed


class LinkedProcesses:
    """Cooperating processes that exchange lines of JSON with this process.

    Args:
        processes: The started processes: one process per rank, or one process that answers for all
            ranks. Each process writes one line when it is ready, and then waits for an input line.

    Attributes:
        ready: First output line of each process.
    """

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self.ready = self._read_lines()  # rank 0 listens now, so rank 1 may connect
        self._write("")

    def ask(self, cases: object) -> None:
        """Send the same cases to all ranks."""
        self._write(json.dumps(cases))

    def answer(self) -> str:
        """Wait for all ranks, and return rank 0's answer; raise LabkitError if a rank has ended."""
        return self._read_lines()[0]

    def end(self) -> list[str]:
        """Kill all ranks and return the last stderr line of each."""
        for process in self._processes:
            process.kill()
        errors = [process.communicate()[1].strip() for process in self._processes]
        return [text.splitlines()[-1] if text else "nothing" for text in errors]

    def _write(self, line: str) -> None:
        with suppress(BrokenPipeError):  # `_read_lines` reports a rank that has ended
            for process in self._processes:
                assert process.stdin is not None  # tells the type checker that stdin is a pipe
                process.stdin.write(line + "\n")
                process.stdin.flush()

    def _read_lines(self) -> list[str]:
        lines = []
        for process in self._processes:
            assert process.stdout is not None  # tells the type checker that stdout is a pipe
            lines.append(process.stdout.readline())
            if not lines[-1]:
                errors = "; ".join(f"rank {k}: {text}" for k, text in enumerate(self.end()))
                raise LabkitError(
                    "the processes of a benchmark ended before the measurement was complete; "
                    f"{errors}"
                )
        return lines


def _end(process: subprocess.Popen[str]) -> None:
    """End a process by closing stdin, so that mpiexec ends its ranks; kill it after a timeout."""
    assert process.stdin is not None  # tells the type checker that stdin is a pipe
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END)
    process.kill()


@contextmanager
def linked_ranks(bits: int, program: str, flows: int = 1) -> Iterator[LinkedProcesses]:
    """Start a module as two ranks at the ends of a new link; remove the link after their end."""
    with rate_limited_link(bits, flows) as namespaces:
        run = [sys.executable, "-P", "-m", program]
        commands = [
            [*command_prefix(namespace), *run, str(rank), ADDRESSES[0]]
            for rank, namespace in enumerate(namespaces)
        ]
        with started(commands) as ranks:
            yield ranks


@contextmanager
def started(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None
) -> Iterator[LinkedProcesses]:
    """Start one process per command; the processes end with this context.

    Args:
        commands: Command of each process.
        environment: Environment variables of the started processes; None: this process's variables.
    """
    with ExitStack() as opened:
        processes = []
        for command in commands:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                # Ctrl-C does not reach the processes, because labkit itself ends them.
                start_new_session=True,
            )
            opened.enter_context(process)
            opened.callback(_end, process)
            processes.append(process)
        yield LinkedProcesses(processes)
