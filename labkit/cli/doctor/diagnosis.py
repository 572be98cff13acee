"""The class of the findings of `labkit doctor`, and functions that run external commands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from labkit.common.errors import LabkitError

# The constant LIMIT is a timeout in seconds. TensorFlow's first import from a slow disk takes most
# of a minute.
LIMIT = 120.0


@dataclass(frozen=True)
class Diagnosis:
    """A finding of `labkit doctor`, printed as one line.

    Attributes:
        state: "ok" if there is no problem, otherwise "note" or "broken". "note" means that runs
            work in spite of the problem. "broken" means that the problem prevents runs.
        what: A description of the finding.
        fix: A shell command or advice that solves the problem. An empty `fix` means that no problem
            or no fix exists.
    """

    state: Literal["ok", "note", "broken"]
    what: str
    fix: str = ""

    @property
    def broken(self) -> bool:
        """Whether the finding is a problem that prevents runs."""
        return self.state == "broken"

    @property
    def line(self) -> str:
        """The finding as a line: `ok      mpiexec: Open MPI 5.0.11` or `broken  … | fix: …`."""
        fix = f" | fix: {self.fix}" if self.fix else ""
        return f"{self.state:6}  {self.what}{fix}"


def output(
    command: list[str], variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its output; raise LabkitError after LIMIT seconds."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            # With stdin connected, a command that prompts for input would wait until the timeout.
            stdin=subprocess.DEVNULL,
            env=os.environ | (variables or {}),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        name = Path(command[0]).name
        raise LabkitError(f"{name} did not end within {LIMIT:.0f} s") from error


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command printed on stderr or, if stderr is empty, on stdout."""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip(" -*")]
    return lines[-1] if lines else f"ended with code {done.returncode} and no output"


def python() -> str:
    """Return a shell command for this Python interpreter, as a relative path if possible."""
    relative = os.path.relpath(sys.executable)
    return f"{shlex.quote(sys.executable if relative.startswith('..') else relative)} -P"
