"""Test `labkit bench compression`: measurement in a new process, table, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from labkit.bench import compression
from labkit.bench.compression import layers, measure, without_fields
from labkit.cli.app import app
from labkit.common.errors import InvalidInput
from labkit.compression import Int8, TopK

KEYS = {
    *("bench", "case", "what", "workers", "network", "clock", "median_ms", "min_ms", "p90_ms"),
    *("repeats", "bytes", "ratio", "to_copy", "error"),
}


@pytest.mark.slow
def test_codecs_and_whole_reductions_are_measured_in_a_process_of_their_own() -> None:
    feedback = {"name": "ErrorFeedback", "inner": "OneBit"}
    rows = measure(["Float16", "SignSGD", "PowerSGD", feedback], elements=4000, repeats=2)
    assert all(set(row) >= KEYS for row in rows)
    found = {(row["case"].partition("(")[0], row["what"]): row for row in rows}
    assert list(found) == [
        ("Float16", "encode"),
        ("Float16", "decode"),
        ("SignSGD", "encode"),
        ("SignSGD", "decode"),
        ("PowerSGD", "reduce"),
        ("ErrorFeedback", "reduce"),
    ]
    for row in rows:
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["to_copy"] > 0
    half = found["Float16", "encode"]
    assert (half["bytes"], half["ratio"]) == (8004, 16000 / 8004)
    assert 0 < half["error"] < 2**-11
    assert found["SignSGD", "encode"]["error"] is None
    assert found["ErrorFeedback", "reduce"]["bytes"] == 4 + 500 + 4 + 8 + 4 + 4
    assert 0 < found["PowerSGD", "reduce"]["error"] < 1


def test_those_that_need_fields_are_left_out_of_all() -> None:
    names = [type(each).__name__ for each in without_fields()]
    assert "Float16" in names
    assert "ErrorFeedback" not in names


@pytest.mark.parametrize("elements", [4000, 100_000, 5_800_000])
def test_layers_have_about_as_many_elements(elements: int) -> None:
    shapes = layers(elements)
    total = sum(rows * (columns[0] if columns else 1) for rows, *columns in shapes)
    assert total == pytest.approx(elements, rel=0.15)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InvalidInput, match="elements=0"):
        measure(["Float16"], elements=0)
    with pytest.raises(InvalidInput, match="Float17"):
        measure(["Float17"])


def test_the_command_prints_a_table_and_writes_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = {"case": "Int8", "what": "encode", "median_ms": 3.25, "to_copy": 3.5, "error": 0.011}
    asked = []
    monkeypatch.setattr(compression, "measure", lambda *given: asked.append(given) or [row])
    file = tmp_path / "rows.jsonl"
    given = "Int8, {name: TopK, threshold: exact}"
    options = ["--compressors", given, "--elements", "9", "--repeats", "2"]
    done = CliRunner().invoke(app, ["bench", "compression", *options, "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert asked == [([Int8(), TopK(threshold="exact")], 9, 2)]
    for cell in ("compressor", "copy time", "3.25", "3.5", "1.10%"):
        assert cell in done.output
    assert json.loads(file.read_text()) == row


def test_compressors_that_are_no_yaml_are_told_with_the_option() -> None:
    done = CliRunner().invoke(app, ["bench", "compression", "--compressors", "QSGD,{name: TopK"])
    assert done.exit_code == 2
    assert "--compressors" in done.output
    assert "is not YAML" in done.output
