"""Processes at the ends of a link, that answer lines with lines."""

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
    """Processes that work together; lines of JSON in and out.

    Args:
        processes: each says a line when it is ready, and waits for one; or one process for all,
            which speaks for them.

    Attributes:
        ready: what each said first.
    """

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self.ready = self._lines()  # what each said: rank 0 listens, so that rank 1 may call
        self._say("")

    def ask(self, cases: object) -> None:
        """Hand all the same question."""
        self._say(json.dumps(cases))

    def answer(self) -> str:
        """What rank 0 answers, once all have. Raises: LabkitError, with what ranks said last."""
        return self._lines()[0]

    def end(self) -> list[str]:
        """End both; the last line that each wrote about an error."""
        for process in self._processes:
            process.kill()
        said = [process.communicate()[1].strip() for process in self._processes]
        return [text.splitlines()[-1] if text else "nothing" for text in said]

    def _say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # a rank that has ended is noticed when it should answer
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
    """Let it end, and end it if it does not: what mpiexec has started would outlive it."""
    assert process.stdin is not None  # for the type checker: a pipe was asked for
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END)
    process.kill()


@contextmanager
def joined_at(bits: int, program: str, flows: int = 1) -> Iterator[Ranks]:
    """Two ranks of a module, at the ends of a link of so many bits/s; they end before it."""
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
    """Processes of these commands; they end with this context.

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
