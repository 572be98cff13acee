"""The table of a report: a row a setting, units in heads, what is the same in all above it."""

from __future__ import annotations

from pathlib import Path

from sample_runs import FAILED_GATE, write_run

from labkit.figures.kit.entries import settings
from labkit.report.table import Cell, Table, table_of


def cells(table: Table, name: str) -> list[str]:
    (column,) = [column for column in table.columns if column.name == name]
    return [cell.text for cell in column.cells]


def test_a_row_a_setting_in_units_that_stand_in_the_heads(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path,
            workers=workers,
            seed=seed,
            measured={"payload_bytes_per_step": 15780904.0, "test_accuracy": 0.8 + seed / 100},
        )
        for workers in (1, 2)
        for seed in (0, 1)
    ]
    table = table_of(settings(runs))
    heads = {column.name: column.head for column in table.columns}
    assert cells(table, "workers") == ["1", "2"]
    assert cells(table, "seeds") == ["2", "2"]
    assert heads["payload_bytes_per_step"] == "payload, MiB a step"
    assert cells(table, "payload_bytes_per_step") == ["15.05"] * 2
    assert heads["test_accuracy"] == "test accuracy, %"
    assert cells(table, "test_accuracy") == ["80.50"] * 2
    (accuracy,) = [column for column in table.columns if column.name == "test_accuracy"]
    assert accuracy.cells[0].hint == "2 seeds, 80.00 to 81.00"


def test_what_is_the_same_in_all_rows_stands_once_above_them(tmp_path: Path) -> None:
    table = table_of(settings([write_run(tmp_path, workers=workers) for workers in (1, 2)]))
    assert "state" not in [column.name for column in table.told]
    same = dict(table.same)
    assert same["state"].text == "completed"
    assert same["dataset"].text == "digits"
    assert same["gate"] == Cell("passed", hint="passed (max |Δ| 3.1e-16)")
    assert table.parameters == ["workers"]


def test_the_gate_is_one_word_and_its_detail_under_the_pointer(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path),
        write_run(tmp_path, workers=4, measured={"equivalence": FAILED_GATE}),
    ]
    table = table_of(settings(runs))
    (gate,) = [column for column in table.columns if column.name == "gate"]
    assert [cell.text for cell in gate.cells] == ["passed", "failed"]
    assert gate.cells[1].hint == "failed (max |Δ| 0.25)"
    assert cells(table, "samples_per_second")[1] == "—"


def test_what_was_asked_of_the_gate_and_options_that_are_none_are_no_columns(
    tmp_path: Path,
) -> None:
    runs = [
        write_run(tmp_path, gate=gate, model_options=options)
        for gate, options in ((True, {"widths": [64]}), (False, {}))
    ]
    names = [column.name for column in table_of(settings(runs)).columns]
    assert names.count("gate") == 1
    assert "model_options" not in names
    assert "widths" in names


def test_a_filter_knows_parameters_results_and_what_all_share(tmp_path: Path) -> None:
    shown = settings([write_run(tmp_path, workers=workers) for workers in (1, 2)])
    known = table_of(shown).known()
    assert known["shared"]["dataset"] == "digits"
    assert [row["values"]["workers"] for row in known["runs"].values()] == [1, 2]
    assert list(known["runs"]) == [entry.key for entry in shown]
