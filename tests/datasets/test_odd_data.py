"""Test unusual data of users: labkit reads them correctly, or refuses them in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse

import labkit as lk
from labkit import datasets
from labkit.common.errors import InvalidInput

COUNT = 40
NUMBERS = np.linspace(-1, 1, COUNT)
CLASSES = np.arange(COUNT) % 2
X = np.random.default_rng(0).normal(size=(COUNT, 3)).astype(np.float32)


def csv(first: str, row: str, encoding: str = "utf-8") -> Callable[[], None]:
    """Return a writer of a CSV file; in a row, {n} is a number, {c} a class, {i} the row number."""

    def write() -> None:
        rows = [row.format(n=NUMBERS[i], c=CLASSES[i], i=i) for i in range(COUNT)]
        Path("set.csv").write_text("\n".join([first, *rows]) + "\n", encoding=encoding)

    return write


def with_line(line: str, **options: str) -> Callable[[], None]:
    def write() -> None:
        csv("a,label", "{n},{c}", **options)()
        with Path("set.csv").open("a") as file:
            file.write(line + "\n")

    return write


def german() -> None:
    frame = pd.DataFrame({"a": NUMBERS, "label": CLASSES})
    frame.to_csv("set.csv", sep=";", decimal=",", index=False)


def typed(**columns: Any) -> Callable[[], None]:
    return lambda: pd.DataFrame({"a": NUMBERS, **columns}).to_parquet("set.parquet")


def file_of(**arrays: Any) -> Callable[[], None]:
    return lambda: np.savez("set.npz", **arrays)


def pictures(*images: np.ndarray | str, mode: str | None = None) -> Callable[[], None]:
    """Return a function that writes folders of two classes, which contain these images in turn."""

    def write() -> None:
        from PIL import Image

        for number in range(10):
            folder = Path("set") / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            one = images[number // 2 % len(images)]
            file = folder / f"{number}.png"
            if isinstance(one, str):
                file.write_bytes(one.encode())
            else:
                image = Image.fromarray(one)
                image = image if mode is None else image.convert(mode)
                image.save(file.with_suffix(".tif") if mode in ("CMYK", "F") else file)

    return write


def found(name: str) -> np.ndarray:
    data = datasets.load(name)
    return np.concatenate([data.x_train, data.x_test])


TABLE = (-1.69, 1.74)  # extremes of evenly spaced, standardized numbers
DEEP = np.full((4, 4), 2**15, np.uint16)
RED = np.full((4, 4, 3), (255, 0, 0), np.uint8)
GREY = np.full((4, 4), 51, np.uint8)

# Each entry has the function that writes a data set, the set's path, and the minimum and maximum of
# its features.
READ: dict[str, tuple[Callable[[], None], str, tuple[float, float]]] = {
    "byte order mark": (csv("a,label", "{n},{c}", "utf-8-sig"), "set.csv", TABLE),
    "semicolons": (csv("a;label", "{n};{c}"), "set.csv", TABLE),
    "tabs": (csv("a\tlabel", "{n}\t{c}"), "set.csv", TABLE),
    "decimal commas": (german, "set.csv", TABLE),
    "quoted newlines": (csv("a,b,label", '{n},"x\ny",{c}'), "set.csv", TABLE),
    "missing values": (with_line(",1"), "set.csv", TABLE),
    "pandas's whole numbers": (
        typed(b=pd.array([None, *range(1, COUNT)], "Int64"), label=CLASSES),
        "./set.parquet",
        TABLE,
    ),
    "pandas's booleans": (
        typed(b=pd.array([None, *[True, False] * 19, True], "boolean"), label=CLASSES),
        "./set.parquet",
        TABLE,
    ),
    "text labels": (file_of(x=X, y=np.array(["no", "yes"])[CLASSES]), "set.npz", (-2.33, 2.0)),
    "16 bits": (pictures(DEEP), "./set", (0.5, 0.5)),
    "16 bits in a TIFF": (
        lambda: [pictures(DEEP)(), tiff()],
        "./set",
        (0.5, 0.5),
    ),
    "16 bits beside 8": (pictures(DEEP, GREY), "./set", (0.2, 0.5)),
    "grey before colour": (pictures(GREY, RED), "./set", (0, 1)),
    "transparent": (pictures(np.dstack([RED, GREY])), "./set", (0, 1)),
    "palette": (pictures(RED, mode="P"), "./set", (0, 1)),
    "printed colours": (pictures(RED, mode="CMYK"), "./set", (0, 1)),
}


def tiff() -> None:
    from PIL import Image

    for file in Path("set").glob("*/*.png"):
        Image.fromarray(DEEP).save(file.with_suffix(".tif"))
        file.unlink()


INFINITE = "infinite values in column 'a'"
DATES = pd.date_range("2020", periods=COUNT)
REFUSED: dict[str, tuple[Callable[[], None], str, str]] = {
    "one infinite number": (with_line("inf,1"), "set.csv", f"1 {INFINITE}"),
    "a text among numbers": (with_line("?,1"), "set.csv", r"numbers as texts .* such as '\?'"),
    "decimal commas in quotes": (csv("a,label", '"1,{i}",{c}'), "set.csv", "such as '1,0'"),
    "header alone": (lambda: Path("set.csv").write_text("a,label\n"), "set.csv", "0 training"),
    "nothing": (lambda: Path("set.csv").write_text(""), "set.csv", "cannot be read"),
    "no header": (csv("0.5,1", "{n},{c}"), "set.csv", "0.5 as a column name"),
    "longer rows": (csv("a,label", "{n},{n},{c}"), "set.csv", "cannot be read"),
    "other encoding": (csv("ä,label", "{n},{c}", "latin-1"), "set.csv", "cannot be read"),
    "names of rows": (csv("a,id,label", "{n},row {i},{c}"), "set.csv", "32 distinct texts"),
    "dates as texts": (csv("a,t,label", "{n},2020-01-01T{i},{c}"), "set.csv", "distinct texts"),
    "dates": (typed(t=DATES, label=CLASSES), "./set.parquet", "dates in column 't'"),
    "date labels": (typed(label=DATES), "./set.parquet", "contains dates"),
    "one class": (csv("a,label", "{n},7"), "set.csv", "one class, 7"),
    "whole labels as decimals": (csv("a,label", "{n},{c}.0"), "set.csv", "task=.classification"),
    "infinite features": (
        file_of(x=np.where(X > 0, X, np.inf), y=CLASSES),
        "set.npz",
        "infinite or NaN",
    ),
    "infinite labels": (
        file_of(x=X, y=np.where(NUMBERS > 0, NUMBERS, np.inf)),
        "set.npz",
        "infinite or NaN",
    ),
    "complex numbers": (file_of(x=X * 1j, y=CLASSES), "set.npz", "the type complex"),
    "other test rows": (
        file_of(x_train=X, y_train=CLASSES, x_test=X[:, :2], y_test=CLASSES),
        "set.npz",
        "rows of the same shape",
    ),
    "objects": (file_of(x=np.array([[1], [1, 2]], object), y=CLASSES[:2]), "set.npz", "Object arr"),
    "floats without a white": (
        pictures(GREY, mode="F"),
        "./set",
        "mode F does not define the value of white",
    ),
    "corrupt image": (pictures(RED, "no image"), "./set", r"2\.png cannot be read: .*; repair or"),
}


@pytest.mark.parametrize("case", READ)
def test_files_of_any_origin_are_read_as_they_are_meant(case: str) -> None:
    write, name, extremes = READ[case]
    write()
    x = found(name)
    assert np.isfinite(x).all()
    assert (x.min(), x.max()) == pytest.approx(extremes, abs=0.12)


def test_a_grey_image_among_coloured_ones_keeps_its_shade() -> None:
    pictures(GREY, RED)()
    assert {tuple(np.round(image[0, 0].astype(float), 2).tolist()) for image in found("./set")} == {
        (0.2, 0.2, 0.2),
        (1.0, 0.0, 0.0),
    }


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_mislead_are_refused_in_a_sentence(case: str) -> None:
    write, name, words = REFUSED[case]
    write()
    with pytest.raises(InvalidInput, match=words) as caught:
        lk.Experiment(dataset=name)
    assert "\n" not in str(caught.value).strip()


def test_decimals_are_classes_where_the_task_says_so() -> None:
    csv("a,label", "{n},{c}.0")()
    assert datasets.load("set.csv", task="classification").outputs == 2
    assert datasets.load("set.csv", task="regression").task == "regression"


# --- arrays and callables ------------------------------------------------------------------------


def rows() -> Any:
    yield X, CLASSES


def asks(seed: int) -> None:
    """A function that requires an argument."""


class Sequence:
    """An object that is neither arrays nor a name."""

    element_spec = None


ODD = X.copy()
ODD[3] = np.nan
ONE_HOT = np.eye(2)[CLASSES]
GIVEN: dict[str, tuple[Any, str]] = {
    "text labels": ((X, np.array(["no", "yes"])[CLASSES]), "y contains texts"),
    "text labels as objects": ((X, np.array(["a", "b"], object)[CLASSES]), "y contains texts"),
    "text features": ((X.astype(str), CLASSES), "x contains texts"),
    "not a number": ((ODD, CLASSES), "x has 3 values that are infinite or NaN"),
    "infinite labels": ((X, np.full(COUNT, np.inf)), "y has 40 values"),
    "objects": ((np.array([[1], [1, 2]], object), CLASSES[:2]), "rows have the same length"),
    "dates": ((np.array(DATES), CLASSES), "x contains dates"),
    "complex numbers": ((X * 1j, CLASSES), "the type complex64"),
    "masked": ((np.ma.masked_array(X, X > 1), CLASSES), "masked values: fill in these values"),
    "sparse matrix": ((scipy.sparse.csr_matrix(X), CLASSES), "x is a csr_matrix"),
    "lists": ((X.tolist(), CLASSES), "use numpy.asarray"),
    "uneven lists": (([[1, 2], [3]], CLASSES[:2]), "use numpy.asarray"),
    "no rows": ((X[:0], CLASSES[:0]), "at least 1"),
    "fewer labels": ((X, CLASSES[:9]), "the same number of rows"),
    "labels below 0": ((X, CLASSES * 2 - 1), "labels from -1 to 1"),
    "amounts": ((X, CLASSES + 250_000), "labels from 250000"),
    "decimals": ((X, CLASSES.astype(float)), "few distinct whole numbers"),
    "a column of classes": ((X, CLASSES[:, None]), "one class per row"),
    "one-hot": ((X, ONE_HOT), "y contains one-hot labels"),
    "frame without labels": (pd.DataFrame(X), "but it is a DataFrame"),
    "dataset itself": (Sequence(), "give a function that returns the data set"),
    "generator": (rows, "rows is a generator"),
    "function of a seed": (asks, "labkit calls asks without arguments"),
    "function for a named model": (
        lambda: None,
        "give model= a callable that returns a keras.Model",
    ),
}


@pytest.mark.parametrize("case", GIVEN)
def test_data_that_mislead_a_named_model_are_refused_before_ranks_start(case: str) -> None:
    data, words = GIVEN[case]
    with pytest.raises(InvalidInput, match=words) as caught:
        lk.Experiment(dataset=data)
    assert "\n" not in str(caught.value).strip()


def test_a_loss_says_whether_decimals_are_amounts() -> None:
    loss = "binary_crossentropy"
    assert lk.Experiment(dataset=(X, CLASSES.astype(float)), loss=loss).loss == loss


def test_arrays_of_pandas_and_numpy_are_taken_as_they_are() -> None:
    frame, series = pd.DataFrame(X), pd.Series(CLASSES)
    plain = lk.Experiment(dataset=(X, CLASSES))
    for data in (
        (frame, series),
        (np.ma.masked_array(X, False), CLASSES),
        [X, CLASSES],
    ):
        assert lk.Experiment(dataset=data).hash8 == plain.hash8
    file_of(x=X, y=CLASSES)()
    assert lk.Experiment(dataset=Path("set.npz")).dataset == "set.npz"


def test_validation_arrays_fit_the_training_arrays() -> None:
    with pytest.raises(InvalidInput, match="samples of shapes"):
        lk.Experiment(dataset=(X, CLASSES), validation=(X[:, :2], CLASSES))
    more = datasets.shapes_of((X, CLASSES), CLASSES + 2)
    assert more is not None
    assert more.outputs == 4  # a class that only the validation data contain counts, too


def test_a_loss_of_classes_wants_classes() -> None:
    amounts = X[:, 0].astype(float)
    with pytest.raises(InvalidInput, match="requires classes as whole numbers"):
        lk.Experiment(dataset=(X, amounts), loss="sparse_categorical_crossentropy")


# --- what ranks find out -------------------------------------------------------------------------


def small() -> Any:
    import keras

    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def slices() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, CLASSES))


def sparse_slices() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X), CLASSES))


def drawn_on_each_rank() -> Any:
    import tensorflow as tf

    order = np.random.default_rng().permutation(COUNT)
    return tf.data.Dataset.from_tensor_slices((X[order], CLASSES[order]))


def endless() -> Any:
    return slices().repeat()


def arrays() -> Any:
    return X, CLASSES


def labels_alone() -> Any:
    return slices().map(lambda x, y: y)


def texts() -> Any:
    import tensorflow as tf

    return slices().map(lambda x, y: (x, tf.strings.as_string(y)))


def nothing(x: Any, y: Any) -> Any:
    return y < 0


def of_sparse() -> Any:
    import keras

    made = keras.Sequential([keras.Input((3,), sparse=True), keras.layers.Dense(2)])
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def fixed() -> Any:
    import keras

    made = keras.Sequential([keras.Input(batch_shape=(8, 3)), keras.layers.Dense(2)])
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


ON_RANKS: dict[str, tuple[dict[str, Any], str | None]] = {
    "no end": ({"dataset": endless}, "dataset has no end"),
    "validation without end": ({"dataset": slices, "validation": endless}, "validation has no end"),
    "text labels": ({"dataset": texts}, "texts as labels"),
    "nothing": ({"dataset": lambda: slices().take(0)}, "dataset has no rows"),
    "nothing is left": ({"dataset": lambda: slices().filter(nothing)}, "dataset has no rows"),
    "sparse": ({"dataset": sparse_slices, "model": of_sparse}, None),
    "no end, with steps": ({"dataset": endless, "steps_per_epoch": 2}, None),
    "arrays of a callable": ({"dataset": arrays}, "returned a tuple; it must return a tf.data"),
    "no rows": ({"dataset": labels_alone}, "the model takes samples of 1 dimensions"),
    "another order on each rank": (
        {"dataset": drawn_on_each_rank, "verify": False},
        "read different batches",
    ),
    "fixed batch": ({"dataset": slices, "model": fixed}, None),
    "unseeded shuffle, seeded by the run": (
        {"dataset": lambda: slices().shuffle(COUNT)},
        None,
    ),
}


@pytest.mark.battery(4, 4)
@pytest.mark.heavy
@pytest.mark.parametrize("case", ON_RANKS)
def test_what_a_callable_returns_trains_or_is_refused(cluster: lk.Cluster, case: str) -> None:
    fields, words = ON_RANKS[case]
    experiment = lk.Experiment(**({"model": small, "workers": 2, "batch_size": 8} | fields))
    if words is None:
        assert cluster.run(experiment).metrics["equivalence"]["verdict"] == "passed"
    else:
        with pytest.raises(Exception, match=words):
            cluster.run(experiment)
