"""Test that texts written by others cannot control the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from sample_runs import write_run

import labkit
from labkit.cli.app import app
from labkit.common.terminal import plain
from labkit.records.store import JSON

STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
TITLE, CLIPBOARD = "\x1b]0;owned\x07", "\x9b2J\x1b]52;c;b3duZWQ=\x07\u202egnp.exe"


@given(st.text())
@example(TITLE + CLIPBOARD)
def test_no_control_character_is_left_and_other_text_stays(text: str) -> None:
    assert not STEERING.search(plain(text))
    if not STEERING.search(text):
        assert plain(text) == text


def planted(value: JSON) -> JSON:
    """Return a copy of a record in which each text ends with terminal control sequences."""
    if isinstance(value, dict):
        return {name: planted(item) for name, item in value.items()}
    if isinstance(value, list):
        return [planted(item) for item in value]
    return value + TITLE + CLIPBOARD if isinstance(value, str) else value


@pytest.mark.parametrize("file", ["experiment.json", "status.json", "metrics.json"])
@pytest.mark.parametrize("command", ["ls", "compare", "report", "stop"])
def test_records_of_a_stranger_steer_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, file: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "runs", f"mlp{TITLE}", model="mlp")
    record = run.path / file
    record.write_text(json.dumps(planted(json.loads(record.read_text()))))
    done = CliRunner().invoke(app, [command, "runs"])
    said = done.stdout + done.stderr
    assert said
    assert not STEERING.search(said)


def test_commands_speak_through_one_function() -> None:
    for path in Path(labkit.__file__).parent.rglob("*.py"):
        assert path.name == "terminal.py" or "click.echo" not in path.read_text(), path
