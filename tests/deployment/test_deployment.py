"""Test that the deployment table contains measurements of files; figure and summary follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_runs import write_run

from labkit import datasets, models
from labkit.common.errors import InvalidInput, LabkitError
from labkit.deployment import LowRank, Prune, Quantize, compare, read_sparse
from labkit.deployment.method_comparison import chance, inference_ms
from labkit.figures.runs.inference import deployment, summarize_deployment
from labkit.records.run import Run

DATA = datasets.load("digits", rows=512, test_rows=200)
METHODS = [
    Quantize(mode="int8"),
    Prune(sparsity=0.98, scope="layer"),
    LowRank(approximation_rank=8, epochs=1),
    LowRank(approximation_rank=99),
]


@pytest.fixture(scope="module")
def trained() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    model = models.build("mlp", DATA, widths=[64])
    model.compile("adam", models.task_loss(DATA.task), jit_compile=False)
    model.fit(DATA.x_train, DATA.y_train, epochs=12, verbose=0)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deployment")


@pytest.fixture(scope="module")
def table(trained: Any, folder: Path) -> Any:
    return compare(trained, METHODS, DATA, batch_size=32, repeats=3, calls=4, folder=folder)


@pytest.mark.slow
def test_a_row_a_method_with_the_figures_of_its_file(
    trained: Any, folder: Path, table: Any
) -> None:
    assert list(table.index) == ["original", *(method.label for method in METHODS)]
    original, pruned = table.loc["original"], table.loc["prune 98%, layer"]
    right = np.asarray(trained(DATA.x_test)).argmax(axis=1) == DATA.y_test
    assert original["accuracy"] == right.mean() > 0.7
    for row in table.dropna(subset="bytes").itertuples():
        assert row.bytes == (folder / row.file).stat().st_size
        assert row.smaller == original["bytes"] / row.bytes
        assert row.right - original["right"] == row.gained - row.lost
        assert row.time_ratio_low <= row.time_ratio <= row.time_ratio_high
    back = np.asarray(read_sparse(folder / pruned["file"])(DATA.x_test)).argmax(axis=1)
    assert pruned["accuracy"] == (back == DATA.y_test).mean()
    assert len(list(folder.iterdir())) == 4  # no other files remain


def test_no_optimizer_state_is_counted(table: Any) -> None:
    weights = 4 * table.loc["original", "parameters"]
    assert weights < table.loc["original", "bytes"] < 2 * weights + 20_000


def test_a_method_that_can_do_nothing_is_said_and_has_no_figures(table: Any) -> None:
    row = table.loc["low rank 99"]
    assert np.isnan(row["bytes"])
    assert "makes no Dense layer smaller" in row["what"]
    said = summarize_deployment(table)
    assert "**low rank 99**: this method cannot compress the model. approximation_rank=99" in said
    figure = deployment(table)
    assert (
        "methods that cannot compress this model: low rank 99" in figure.layout.title.subtitle.text
    )


def test_the_figure_shows_each_method_in_both_panels_and_in_words(table: Any) -> None:
    figure = deployment(table)
    drawn = [trace for trace in figure.data if trace.x[0] is not None]
    assert len(drawn) == 2 * 4
    for trace in drawn[:4]:
        assert [trace.x[0], trace.y[0]] == list(table.loc[trace.name, ["bytes", "accuracy"]])
        row = table.loc[trace.name]
        assert f"{trace.name}: test accuracy {row['accuracy']:.1%}" in figure.alt
    looks = {(trace.marker.color, trace.marker.symbol) for trace in drawn}
    assert len(looks) == 4
    assert "wall clock" in figure.layout.title.text


def test_the_reading_follows_from_the_table(table: Any) -> None:
    changed = table.copy()
    pruned, low = "prune 98%, layer", "low rank 8 + 1 epoch"
    names = ["lost", "gained", "chance", "time_ratio", "time_ratio_low", "time_ratio_high"]
    changed.loc["int8", names] = [0, 0, 1, 1.5, 1.2, 1.9]
    changed.loc[pruned, names] = [30, 2, chance(30, 2), 1.0, 0.9, 1.1]
    changed.loc[low, names] = [3, 1, chance(3, 1), 0.7, 0.6, 0.9]
    changed.loc[["int8", low], "bytes"] = [5000, 6000]
    changed.loc[pruned, ["bytes", "keras_gzip_bytes"]] = [2000, 1000]
    changed["smaller"] = [1.0, 3.0, 20.0, 2.5, np.nan]
    lines = {line[2:].partition(":")[0]: line for line in summarize_deployment(changed).split("\n")}
    assert "correct on the same samples as the original" in lines["**int8**"]
    assert lines["**int8**"].endswith(": slower.")
    assert "30 correct answers lost and 2 gained, worse beyond" in lines[f"**{pruned}**"]
    assert "; for comparison, its .keras file compressed by gzip: 1000 B" in lines[f"**{pruned}**"]
    assert "no difference beyond the spread" in lines[f"**{pruned}**"]
    assert "a difference that chance may explain (p = 0.62)" in lines[f"**{low}**"]
    smallest = lines["Method with the smallest file that has no significant loss of accuracy"]
    assert "**int8** (0 correct answers lost, 0 gained), 3x smaller" in smallest
    assert lines["Methods with faster inference than the original, beyond the spread"].endswith(
        f" {low}."
    )
    assert f"{low}. Longer" in lines["Methods that trained longer than the original"]
    changed.loc[["int8", low], ["lost", "chance"]] = [40, 1e-9]
    # The last line answers the notebook's question, and can be understood alone.
    assert summarize_deployment(changed).endswith(
        "- Every method with a smaller file has lost more accuracy than chance explains."
    )


def test_the_sign_test_is_exact() -> None:
    assert chance(0, 0) == 1
    assert chance(5, 0) == chance(0, 5) == 2 / 32
    assert chance(3, 1) == 2 * 5 / 16
    assert chance(4, 4) == 1


def test_inference_takes_turns_and_waits_for_the_values() -> None:
    import tensorflow as tf

    def slow(x: Any, training: bool) -> Any:
        for _ in range(40):
            x = tf.linalg.matmul(x, x)
        return x

    models_ = {"quick": lambda x, training: tf.reduce_sum(x), "slow": slow}
    times = inference_ms(models_, np.eye(200, dtype=np.float32), repeats=3, calls=5)
    assert times["quick"].shape == (3,)
    assert np.median(times["slow"]) > 2 * np.median(times["quick"])


def test_a_run_brings_its_model_its_data_and_a_place_for_the_files(
    trained: Any, tmp_path: Path
) -> None:
    options = {"rows": 64, "test_rows": 32}
    run = write_run(tmp_path, dataset="digits", dataset_options=options)
    trained.save(run.path / "model.keras")
    found = compare(Run(run.path), [Quantize()], repeats=1, calls=1)
    assert found.loc["original", "test_answers"] == 32
    assert (run.path / "deployment" / "int8.keras").is_file()


def test_bad_input_is_refused(trained: Any) -> None:
    with pytest.raises(InvalidInput, match="the list of methods contains int8 twice"):
        compare(trained, [Quantize(), Quantize()], DATA)
    with pytest.raises(InvalidInput, match="contains no methods"):
        compare(trained, [], DATA)
    with pytest.raises(InvalidInput, match="repeats=0 is impossible"):
        compare(trained, [Quantize()], DATA, repeats=0)
    with pytest.raises(LabkitError, match="give data="):
        compare(trained, [Quantize()])
    regression = datasets.load("synthetic", shape=[8], rows=8, test_rows=8, task="regression")
    with pytest.raises(InvalidInput, match="accuracy is not defined"):
        compare(models.build("linear", regression), [Quantize()], regression)


def test_methods_of_other_fields_have_other_names() -> None:
    methods = [
        *(Quantize(), Quantize(mode="int4"), Prune(), Prune(scope="layer"), Prune(epochs=1)),
        *(Prune(epochs=2), Prune(epochs=2, schedule="gradual"), Prune(epochs=2, batch_size=64)),
        *(Prune(epochs=2, learning_rate=0.01), LowRank(), LowRank(epochs=1), Prune(sparsity=0.99)),
    ]
    assert len({method.label for method in methods}) == len(methods)
