"""Processes at the ends of a link, which answer each line of JSON with another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from labkit.common.errors import LabkitError
from labkit.frameworks.namespaces import ADDRESSES, inside, rate_limited_link

END = 5.0  # seconds that a process has to end by itself


class Ranks:
    """Processes that work together, and exchange lines of JSON with this one.

    Args:
        processes: one a rank, or one that speaks for all ranks. Each writes a line when it is
            ready, and waits for one.

    Attributes:
        ready: the first line of each.
    """

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self.ready = self._lines()  # rank 0 listens now, so that rank 1 may connect
        self._say("")

    def ask(self, cases: object) -> None:
        """Send the same cases to all ranks."""
        self._say(json.dumps(cases))

    def answer(self) -> str:
        """Return rank 0's answer when all have answered. Raises: LabkitError, with their output."""
        return self._lines()[0]

    def end(self) -> list[str]:
        """Kill all ranks; return the last line that each wrote to stderr."""
        for process in self._processes:
            process.kill()
        said = [process.communicate()[1].strip() for process in self._processes]
        return [text.splitlines()[-1] if text else "nothing" for text in said]

    def _say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # `_lines` reports a rank that has ended
            for process in self._processes:
                assert process.stdin is not None  # for the type checker: a pipe was asked for
                process.stdin.write(line + "\n")
                process.stdin.flush()

    def _lines(self) -> list[str]:
        lines = []
        for process in self._processes:
            assert process.stdout is not None  # as above
            lines.append(process.stdout.readline())
            if not lines[-1]:
                said = "; ".join(f"rank {k} said: {text}" for k, text in enumerate(self.end()))
                raise LabkitError(f"the ranks of a benchmark ended early; {said}")
        return lines


def _end(process: subprocess.Popen[str]) -> None:
    """Close stdin, wait, then kill: the ranks of a killed mpiexec would outlive it."""
    assert process.stdin is not None  # for the type checker: a pipe was asked for
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END)
    process.kill()


@contextmanager
def joined_at(bits: int, program: str, flows: int = 1) -> Iterator[Ranks]:
    """Start two ranks of a module at the ends of a link of some bits/s; the link ends last."""
    with rate_limited_link(bits, flows) as namespaces:
        run = [sys.executable, "-P", "-m", program]
        commands = [
            [*inside(namespace), *run, str(rank), ADDRESSES[0]]
            for rank, namespace in enumerate(namespaces)
        ]
        with started(commands) as ranks:
            yield ranks


@contextmanager
def started(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None
) -> Iterator[Ranks]:
    """Start the processes of these commands; they end with this context.

    Args:
        commands: of each.
        environment: variables of all of them; None: this process's.
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
                start_new_session=True,  # Ctrl-C reaches labkit, which ends them
            )
            opened.enter_context(process)
            opened.callback(_end, process)
            processes.append(process)
        yield Ranks(processes)
