"""Test commands in a POSIX locale, in which Python encodes text as ASCII."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.common import terminal

POSIX = {
    "LC_ALL": "C",
    "LANG": "POSIX",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "ascii",
}
NOTEBOOK = """# %% tags=["parameters"]
text: str = "µ"
# %%
print(text, "× …")
# %%
raise ValueError("é is the cause")
"""


def labkit(*words: str) -> subprocess.CompletedProcess[bytes]:
    command = [str(Path(sys.executable).with_name("labkit")), *words]
    return subprocess.run(command, env=os.environ | POSIX, capture_output=True)


@pytest.mark.slow
def test_a_notebook_prints_and_fails_in_its_own_words() -> None:
    Path("greek.py").write_text(NOTEBOOK, encoding="utf-8")
    done = labkit("run", "greek.py", "-p", "text", "φ")
    assert "φ × …\n" in done.stdout.decode()
    assert "ValueError: é is the cause" in done.stderr.decode()
    assert b"Traceback" not in done.stdout + done.stderr
    assert "φ × …" in next(Path("runs").rglob("output.ipynb")).read_text("utf-8")
    listed = labkit("ls")
    assert "é is the cause" in listed.stdout.decode()
    assert listed.returncode == 0


@pytest.mark.parametrize(
    ("encoding", "output", "needed"),
    [
        ("UTF-8", "", False),
        ("utf8", "utf-8:replace", False),
        ("ANSI_X3.4-1968", "", True),
        ("ISO-8859-1", "utf-8", True),
        ("UTF-8", "ascii", True),
        ("UTF-8", "no such encoding", True),
    ],
)
def test_variables_are_set_where_text_is_not_utf8(
    monkeypatch: pytest.MonkeyPatch, encoding: str, output: str, needed: bool
) -> None:
    monkeypatch.setattr(terminal.locale, "getpreferredencoding", lambda _: encoding)
    monkeypatch.setenv("PYTHONIOENCODING", output)
    assert bool(terminal.utf8_variables()) == needed
