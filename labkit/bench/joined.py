"""Two processes at the ends of a real link, that answer lines with lines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from labkit.common.errors import LabkitError
from labkit.frameworks.namespaces import ADDRESSES, inside, rate_limited_link


class Ranks:
    """The two processes at the ends of the link; lines of JSON in and out."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self._lines()  # both are ready: rank 0 listens, so that rank 1 may call
        self._say("")

    def ask(self, cases: Sequence[object]) -> None:
        """Hand both the same cases."""
        self._say(json.dumps(cases))

    def answer(self) -> str:
        """What rank 0 answers, once both have. Raises: LabkitError, with what ranks said last."""
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
                first, second = self.end()
                raise LabkitError(
                    f"the real link's ranks ended early; rank 0 said: {first}; rank 1: {second}"
                )
        return lines


@contextmanager
def joined_at(bits: int, program: str, flows: int = 1) -> Iterator[Ranks]:
    """Two ranks of a module, at the ends of a link of so many bits/s; they end before it."""
    with rate_limited_link(bits, flows) as namespaces, ExitStack() as started:
        processes = []
        for rank, namespace in enumerate(namespaces):
            process = subprocess.Popen(
                [*inside(namespace), sys.executable, "-m", program, str(rank), ADDRESSES[0]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C reaches labkit, which ends them
            )
            started.enter_context(process)
            started.callback(process.kill)
            processes.append(process)
        yield Ranks(processes)
