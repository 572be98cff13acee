"""Test a report's table: a row per setting, units in heads, and equal values above the table."""

from __future__ import annotations

from pathlib import Path

from sample_runs import FAILED_GATE, write_run

from labkit.figures.kit.entries import clock_and_network, settings
from labkit.jobs.log import RunLog, experiment
from labkit.records import store
from labkit.records.run import Run
from labkit.report.runs_table import ReportTable, TableCell, table_of


def cells(table: ReportTable, name: str) -> list[str]:
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
    assert heads["payload_bytes_per_step"] == "payload, MiB per step"
    assert cells(table, "payload_bytes_per_step") == ["15.05"] * 2
    assert heads["test_accuracy"] == "test accuracy, %"
    assert cells(table, "test_accuracy") == ["80.50"] * 2
    (accuracy,) = [column for column in table.columns if column.name == "test_accuracy"]
    assert accuracy.cells[0].hint == "2 seeds, 80.00 to 81.00"


def test_what_is_the_same_in_all_rows_stands_once_above_them(tmp_path: Path) -> None:
    table = table_of(settings([write_run(tmp_path, workers=workers) for workers in (1, 2)]))
    assert "state" not in [column.name for column in table.differing_columns]
    same = dict(table.shared_cells)
    assert same["state"].text == "completed"
    assert same["dataset"].text == "digits"
    assert same["equivalence"] == TableCell("passed", hint="passed (max |Δ| 3.1e-16)")
    assert table.parameters == ["workers"]


def test_the_gate_is_one_word_and_its_detail_under_the_pointer(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path),
        write_run(tmp_path, workers=4, measured={"equivalence": FAILED_GATE}),
    ]
    table = table_of(settings(runs))
    (gate,) = [column for column in table.columns if column.name == "equivalence"]
    assert [cell.text for cell in gate.cells] == ["passed", "failed"]
    assert gate.cells[1].hint == "failed (max |Δ| 0.25)"
    assert cells(table, "samples_per_second")[1] == "—"


def test_what_was_asked_of_the_gate_and_options_that_are_none_are_no_columns(
    tmp_path: Path,
) -> None:
    runs = [
        write_run(tmp_path, verify=gate, model_options=options)
        for gate, options in ((True, {"widths": [64]}), (False, {}))
    ]
    names = [column.name for column in table_of(settings(runs)).columns]
    assert names.count("equivalence") == 1
    assert "model_options" not in names
    assert "widths" in names


def test_a_filter_knows_parameters_results_and_what_all_share(tmp_path: Path) -> None:
    shown = settings([write_run(tmp_path, workers=workers) for workers in (1, 2)])
    known = table_of(shown).filter_data()
    assert known["shared"]["dataset"] == "digits"
    assert [row["values"]["workers"] for row in known["runs"].values()] == [1, 2]
    assert list(known["runs"]) == [entry.key for entry in shown]


def logged(root: Path, fields: dict[str, object], **values: object) -> Run:
    log = RunLog(store.new_run_directory(root, "mine"), experiment("mine.ipynb", fields))
    log.add(values)
    store.complete(log.run.path)
    return log.run


def test_results_of_ones_own_are_columns_whatever_their_names(tmp_path: Path) -> None:
    runs = [
        logged(
            tmp_path,
            {"rate": rate, "label": f"try {rate}", "f1": "macro" if rate > 0.1 else "micro"},
            **{"f1": rate, "auc.test": 2 * rate, "note": f"n{rate}", "sent_bytes": "many"},
            balanced_accuracy=90 + rate,
        )
        for rate in (0.1, 0.2)
    ]
    table = table_of(settings(runs))
    heads = {column.name: column.head for column in table.columns}
    assert cells(table, "f1") == ["0.100", "0.200"]
    assert cells(table, "auc.test") == ["0.200", "0.400"]
    assert cells(table, "note") == ["n0.1", "n0.2"]
    assert heads["balanced_accuracy"] == "balanced accuracy"  # this unit is in per cent already
    assert cells(table, "f1 (parameter)") == ["micro", "macro"]
    values = [row["values"] for row in table.filter_data()["runs"].values()]
    assert [row["f1"] for row in values] == [0.1, 0.2]
    assert [row["note"] for row in values] == ["n0.1", "n0.2"]
    assert [row["label (parameter)"] for row in values] == ["try 0.1", "try 0.2"]
    many = {f"own_{place}": place for place in range(40)}
    table = table_of(settings([logged(tmp_path / "many", {}, **many)]))
    assert (len(table.columns), table.more) == (3 + 24, 16)
    assert table.values[0]["own_39"] == 39


def test_a_filter_and_a_column_of_one_name_mean_the_same_parameter(tmp_path: Path) -> None:
    def run(outer: float, label: str) -> Run:
        strategy = {"name": "ParameterAveraging", "outer": {"learning_rate": outer}}
        return write_run(tmp_path, strategy=strategy, dataset_options={"label": label})

    shown = settings([run(0.7, "wage"), run(0.9, "age")])
    table = table_of(shown)
    assert table.parameters == ["outer.learning_rate", "dataset_options.label"]
    known = table.filter_data()
    assert known["shared"]["learning_rate"] == 0.1
    found = [row["values"] for row in known["runs"].values()]
    assert [row["outer.learning_rate"] for row in found] == [0.7, 0.9]
    assert [row["dataset_options.label"] for row in found] == ["wage", "age"]
    assert [row["label"] for row in found] == [entry.label for entry in shown]


def test_a_compressor_is_spoken(tmp_path: Path) -> None:
    methods = (None, {"name": "TopK", "ratio": 0.01})
    strategies = [{"name": "AllReduce", "compressor": method} for method in methods]
    table = table_of(settings([write_run(tmp_path, strategy=strategy) for strategy in strategies]))
    assert cells(table, "compressor")[1] == "TopK 1 %"


def test_a_filter_asks_in_the_units_that_are_seen(tmp_path: Path) -> None:
    measured = {"test_accuracy": 0.805, "payload_bytes_per_step": 3 * 1024**2}
    table = table_of(settings([write_run(tmp_path, measured=measured)]))
    shared = table.filter_data()["shared"]
    assert (shared["test_accuracy"], shared["payload_bytes_per_step"]) == (80.5, 3.0)


def test_a_job_that_failed_before_its_experiment_makes_no_columns(tmp_path: Path) -> None:
    """Ignore what the failed job lacks, and parameters that only this job has."""
    runs = [write_run(tmp_path, workers=workers) for workers in (1, 2)]
    directory = store.new_run_directory(tmp_path, "failed")
    store.start(directory, {"notebook": "own.ipynb", "method": "typo", "workers": 2}, {})
    store.fail(directory, "cell In [3]: KeyError: 'typo'")
    shown = settings([*runs, Run(directory)])
    table = table_of(shown)
    assert table.parameters == ["workers"]
    assert {"dataset", "epochs"} <= dict(table.shared_cells).keys()
    assert cells(table, "state") == ["completed", "completed", "failed"]
    assert clock_and_network(shown) == clock_and_network(shown[:2])
    assert table.shared_by == "all but 1 job that failed before an experiment began"
    assert table_of(shown[:2]).shared_by == "all"
