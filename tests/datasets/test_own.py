"""Test users' own data sets: by path, by address, or as arrays, equal on all ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import labkit as lk
from labkit import datasets
from labkit.common.errors import InvalidInput
from labkit.datasets.user_data import held_out

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(100, 4)).astype(np.float32)
Y = RANDOM.integers(0, 3, 100)


def table() -> pd.DataFrame:
    return pd.DataFrame(
        {"age": range(100), "city": ["ulm", "bonn"] * 50, "label": ["yes", "no", "no", "no"] * 25}
    )


def pictures(folder: Path, count: int = 10) -> Path:
    from PIL import Image

    for name, shade in (("cat", 0), ("dog", 255)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (6, 4), (shade, shade, shade)).save(folder / name / f"{number}.png")
    return folder


def test_arrays_in_a_file_are_split_the_same_way_each_time(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", x=X, y=Y)
    found = datasets.load("./set.npz")
    assert (found.x_train.shape, found.x_test.shape) == ((80, 4), (20, 4))
    out = held_out(100, 0.2)
    np.testing.assert_array_equal(found.x_test, X[out])
    np.testing.assert_array_equal(found.y_train, Y[~out])
    assert datasets.check("set.npz", {}) == datasets.Shapes((4,), 3, "classification")
    assert datasets.count("set.npz", {"test": 0.5}) == 50


def test_test_rows_in_a_file_stay_test_rows_and_pixels_are_scaled(tmp_path: Path) -> None:
    x = np.full((10, 2, 2, 1), 255, np.uint8)
    np.savez("set.npz", x_train=x, y_train=np.zeros(10, int), x_test=x[:3], y_test=np.ones(3, int))
    found = datasets.load("set.npz")
    assert (len(found.x_train), len(found.x_test), found.outputs) == (10, 3, 2)
    assert found.x_train.max() == 1.0


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_has_numbers_standardised_and_texts_one_hot(kind: str) -> None:
    name = f"people.{kind}"
    table().to_csv(name, index=False) if kind == "csv" else table().to_parquet(name)
    found = datasets.load(name)
    assert (found.x_train.shape, found.task, found.outputs) == ((80, 3), "classification", 2)
    assert found.x_train[:, 0].mean() == pytest.approx(0, abs=1e-6)
    assert set(np.unique(found.x_train[:, 1:])) == {0.0, 1.0}
    years = datasets.load(name, label="age", task="regression")
    assert (years.task, years.y_train.shape) == ("regression", (80, 1))
    with pytest.raises(InvalidInput, match=r"no column 'wage' .*it has: age, city, label"):
        datasets.load(name, label="wage")


def test_images_in_folders_by_class(tmp_path: Path) -> None:
    pictures(tmp_path / "pets")
    found = datasets.load(str(tmp_path / "pets"))
    assert (found.x_train.shape, found.outputs) == ((16, 4, 6, 3), 2)
    np.testing.assert_array_equal(found.x_train[:, 0, 0, 0], found.y_train)
    assert datasets.check("./pets", {"size": 8}).input_shape == (8, 8, 3)
    pictures(tmp_path / "split" / "train")
    pictures(tmp_path / "split" / "test", 2)
    assert datasets.load("./split").x_test.shape == (4, 4, 6, 3)


def test_a_folder_of_hugging_face() -> None:
    hub = pytest.importorskip("datasets")
    part = hub.Dataset.from_pandas(table())
    hub.DatasetDict({"train": part, "test": part.select(range(30))}).save_to_disk("people")
    found = datasets.load("./people")
    assert (found.x_train.shape, found.x_test.shape, found.outputs) == ((100, 3), (30, 3), 2)


def test_images_of_hugging_face() -> None:
    hub = pytest.importorskip("datasets")
    pixels = [np.full((4, 6, 3), 255 * (n % 2), np.uint8) for n in range(20)]
    features = hub.Features({"image": hub.Image(), "label": hub.ClassLabel(names=["cat", "dog"])})
    rows = {"image": pixels, "label": [n % 2 for n in range(20)]}
    hub.Dataset.from_dict(rows, features=features).save_to_disk("pets")
    found = datasets.load("./pets")
    assert (found.x_train.shape, found.outputs) == ((16, 4, 6, 3), 2)
    np.testing.assert_array_equal(found.x_train[:, 0, 0, 0], found.y_train)


def test_an_image_that_is_added_to_a_class_is_read(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "pets")
    assert datasets.count(str(folder), {}) == 16
    (folder / "cat" / "0.png").rename(tmp_path / "kept.png")
    (tmp_path / "kept.png").rename(folder / "cat" / "10.png")
    (folder / "dog" / "10.png").write_bytes((folder / "dog" / "9.png").read_bytes())
    found = datasets.load(str(folder))
    assert len(found.x_train) + len(found.x_test) == 21
    (folder / "dog" / "9.png").write_text("no image")
    with pytest.raises(InvalidInput, match=r"9\.png cannot be read: .*; repair or remove it"):
        datasets.load(str(folder))


@pytest.mark.parametrize("labels", [[-1, 1], [3, 7], [False, True], ["b", "a"]])
def test_labels_of_any_kind_are_classes_from_0(labels: list[int]) -> None:
    np.savez("set.npz", x=X, y=np.array(labels * 50))
    found = datasets.load("set.npz")
    assert found.outputs == 2
    expected = np.searchsorted(sorted(labels), labels * 50)[~held_out(100, 0.2)]
    np.testing.assert_array_equal(found.y_train, expected)


def test_many_whole_numbers_are_amounts_or_classes_as_one_says() -> None:
    np.savez("set.npz", x=X, y=1000 + np.arange(100))
    words = (
        '100 distinct labels in 100 rows: if labels are amounts, give task="regression", if '
        "labels are classes"
    )
    with pytest.raises(InvalidInput, match=words):
        datasets.load("set.npz")
    prices = datasets.load("set.npz", task="regression")
    assert (prices.task, prices.outputs, prices.y_train.max()) == ("regression", 1, 1098)
    assert datasets.load("set.npz", task="classification").outputs == 100


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"label": [0, 1] * 50},
            "0 columns besides 'label': give at least one row and one column of features",
        ),
        ({"x": [], "label": []}, "0 training rows"),
        ({"x": range(4), "label": ["a", None, "b", "a"]}, "1 rows without a label"),
        ({"x": range(4), "label": [0.5, None, 1.5, None]}, "2 rows without a label"),
        (
            {"name": [f"n{k}" for k in range(2000)], "label": [0, 1] * 1000},
            "1,600 distinct texts in column 'name', and each text would become a feature; "
            "allowed are at most 1,000",
        ),
        ({"x": range(50), "label": [f"n{k}" for k in range(50)]}, "50 distinct labels in 50 rows"),
    ],
)
def test_a_table_that_teaches_nothing_is_refused_in_a_sentence(
    columns: dict[str, list[object]], words: str
) -> None:
    pd.DataFrame(columns).to_csv("set.csv", index=False)
    with pytest.raises(InvalidInput, match=words):
        lk.Experiment(dataset="set.csv")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": X, "y": Y[:99]}, "100 rows of x and 99 labels"),
        ({"x": X.astype(str).astype("U9")[:, :1].astype("U1") + "a", "y": Y}, "not numbers"),
        ({"x": X, "y": np.where(Y == 1, np.nan, 0.5)}, "rows without a label"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_in_a_sentence(
    arrays: dict[str, np.ndarray], words: str
) -> None:
    np.savez("set.npz", **arrays)
    with pytest.raises(InvalidInput, match=words):
        datasets.load("set.npz")


def test_a_column_without_a_number_is_nought_and_shapes_of_arrays_are_the_same() -> None:
    frame = pd.DataFrame({"x": [np.nan] * 20, "z": range(20), "label": [0, 1] * 10})
    frame.to_csv("set.csv", index=False)
    assert not datasets.load("set.csv").x_train[:, 0].any()
    uneven = [np.zeros(2 + k % 2) for k in range(20)]
    pd.DataFrame({"x": uneven, "label": [0, 1] * 10}).to_parquet("set.parquet")
    with pytest.raises(InvalidInput, match="arrays of different shapes"):
        datasets.load("set.parquet")


def test_a_configuration_of_a_hubs_set_stands_behind_a_colon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = pytest.importorskip("datasets")
    asked: list[tuple[str, ...]] = []

    def load(*names: str) -> object:
        asked.append(names)
        if len(names) < 2:
            raise ValueError("Config name is missing. Please pick one among: ['mrpc']")
        return hub.Dataset.from_pandas(table())

    monkeypatch.setattr(hub, "load_dataset", load)
    assert datasets.load("hf:somebody/glue:mrpc").outputs == 2
    assert asked == [("somebody/glue", "mrpc")]
    with pytest.raises(InvalidInput, match="pick one among"):
        datasets.load("hf:somebody/glue")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/such.npz", "the data set no/such.npz cannot be read"),
        ("./", "contains no images"),
        ("notes/a.txt", "is not a data set"),
        ("empty.npz", "no x, only z"),
        ("mnits", "did you mean 'mnist'"),
    ],
)
def test_what_is_no_data_set_is_refused_before_a_rank_starts(name: str, words: str) -> None:
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("a")
    np.savez("empty.npz", z=X)
    with pytest.raises(InvalidInput, match=words):
        lk.Experiment(dataset=name)


def test_a_record_names_no_folder_and_holds_the_rows_against_their_checksum(
    tmp_path: Path,
) -> None:
    np.savez(tmp_path / "set.npz", x=X, y=Y)
    one = lk.Experiment(dataset=str(tmp_path / "set.npz"))
    record = one.to_json()
    assert str(tmp_path) not in f"{record}{one.label}"
    assert record["dataset"] == "set.npz"
    again = lk.Experiment(**{k: v for k, v in record.items() if k != "schema"})
    assert again.hash8 == one.hash8
    np.savez(tmp_path / "set.npz", x=2 * X, y=Y)
    assert lk.Experiment(dataset="set.npz").hash8 != one.hash8
    with pytest.raises(InvalidInput, match=r"set\.npz have changed"):
        again.replace(epochs=2)


@pytest.mark.heavy
def test_ranks_shard_a_file_without_a_line_of_the_users(cluster: lk.Cluster) -> None:
    np.savez("set.npz", x=X, y=Y)
    run = cluster.run(lk.Experiment(dataset="set.npz", workers=2, batch_size=40, epochs=2))
    rows = run.history.groupby("rank")["samples"].sum()
    assert list(rows) == [80, 80]
    assert run.metrics["equivalence"]["verdict"] == "passed"
