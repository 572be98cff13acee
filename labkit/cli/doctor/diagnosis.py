"""One line of the examination, and how a tool of this machine is asked."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from labkit.common.errors import LabkitError

LIMIT = 120.0  # seconds; TensorFlow's first import from a cold disk takes most of a minute


@dataclass(frozen=True)
class Finding:
    """One line of the examination: "note" is good to know, "broken" stops runs."""

    state: Literal["ok", "note", "broken"]
    what: str
    fix: str = ""

    @property
    def broken(self) -> bool:
        """Whether runs cannot work."""
        return self.state == "broken"

    @property
    def line(self) -> str:
        """`ok      mpiexec: Open MPI 5.0.11` or `broken  … | fix: …`."""
        fix = f" | fix: {self.fix}" if self.fix else ""
        return f"{self.state:6}  {self.what}{fix}"


def output(
    command: list[str], variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or to the limit; the end by the limit is a LabkitError."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            # A tool that asks something would wait for an answer until the limit.
            stdin=subprocess.DEVNULL,
            env=os.environ | (variables or {}),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        name = Path(command[0]).name
        raise LabkitError(f"{name} did not end within {LIMIT:.0f} s") from error


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last thing that a command has said, on stderr where it has said something there."""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip(" -*")]
    return lines[-1] if lines else f"ended with code {done.returncode} and said nothing"


def python() -> str:
    """This interpreter, as it may be pasted in any folder."""
    relative = os.path.relpath(sys.executable)
    return f"{shlex.quote(sys.executable if relative.startswith('..') else relative)} -P"
