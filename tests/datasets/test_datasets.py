"""Test data sets: readers of the real file formats, real files if they exist, and errors."""

from __future__ import annotations

import gzip
import hashlib
import io
import socket
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from labkit import datasets
from labkit.common.errors import InvalidInput, LabkitError
from labkit.datasets import DATASETS, Dataset, Shapes
from labkit.datasets.catalogue import TextOptions, read_shakespeare
from labkit.datasets.dataset import DataFile, Rows, fetch
from labkit.datasets.images import read_cifar10, read_idx
from labkit.datasets.tabular_files import read_adult

ROOT = Path(__file__).parents[2]


@pytest.fixture
def real() -> Callable[..., Dataset]:
    """Return a function that loads a real data set, or skips the test if files are missing."""

    def load(name: str, **options: object) -> Dataset:
        if "is missing" in (datasets.available(name) or ""):  # a damaged file must fail, not skip
            pytest.skip(f"LABKIT_DATA has no {name}")
        return datasets.load(name, **options)

    return load


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], DataFile]:
    """Return a function that makes `shakespeare` a set of one small file at an address."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LABKIT_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def publish(address: str) -> DataFile:
        checksum = hashlib.sha256(TEXT).hexdigest()
        file = DataFile("tinyshakespeare", "input.txt", f"{address}/input.txt", checksum)
        spec = replace(DATASETS["shakespeare"], files=(file,))
        monkeypatch.setitem(DATASETS, "shakespeare", spec)
        return file

    return publish


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Serve a folder over HTTP on this machine; yield the address and the folder."""
    folder = tmp_path / "published"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


TEXT = b"to be, or not to be\n" * 20


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _put(folder: Path, content: bytes) -> Path:
    path = folder / "tinyshakespeare" / "input.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# Every set ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DATASETS)
def test_every_set_has_the_shapes_it_declares_and_the_same_rows_each_time(
    name: str, real: Callable[..., Dataset]
) -> None:
    first, again = (real(name, rows=50, test_rows=20) for _ in range(2))
    assert first.shapes == datasets.check(name, {})
    assert (len(first.x_train), len(first.y_train)) == (50, 50)
    assert (len(first.x_test), len(first.y_test)) == (20, 20)
    text = first.task == "next_character"
    assert {first.x_train.dtype, first.x_test.dtype} == {np.dtype("int32" if text else "float32")}
    assert {first.y_train.dtype, first.y_test.dtype} == {np.dtype("int32")}
    assert 0 <= first.y_train.min() <= first.y_train.max() < first.outputs
    for part in ("x_train", "y_train", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(first, part), getattr(again, part))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("digits", {}),
        ("mnist", {}),
        ("adult", {}),
        ("shakespeare", {}),
        ("shakespeare", {"sequence_length": 37}),
        ("synthetic", {}),
        ("synthetic", {"rows": 2000}),
    ],
)
def test_the_number_of_rows_is_known_without_reading(
    name: str, options: dict[str, object], real: Callable[..., Dataset]
) -> None:
    expected = datasets.count(name, options)
    assert datasets.count(name, options | {"rows": 50}) == 50
    if name != "synthetic":
        assert datasets.count(name, options | {"rows": 10**7}) == expected
    assert len(real(name, **options).x_train) == expected


@pytest.mark.parametrize("name", DATASETS)
def test_every_option_says_what_is_allowed(name: str) -> None:
    for option, field in DATASETS[name].options.model_fields.items():
        assert field.description, option


@pytest.mark.parametrize("name", DATASETS)
def test_the_readme_beside_the_data_names_every_file_and_checksum(name: str) -> None:
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    assert f"`{name}`" in readme
    for file in DATASETS[name].files:
        assert f"{file.folder}/{file.name}" in readme
        assert file.sha256 in readme
        assert file.url.removesuffix(file.name) in readme


def test_more_rows_than_there_are_is_impossible() -> None:
    with pytest.raises(InvalidInput, match=r"'digits': test_rows=361 is impossible; .*1 to 360"):
        datasets.load("digits", test_rows=361)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mnits", {}, "did you mean 'mnist'"),
        ("digits", {"row": 5}, "did you mean 'rows'"),
        ("digits", {"rows": 0}, "rows=0 is impossible; allowed: number of training rows, 1"),
        ("synthetic", {"shape": [75, 0, 3]}, r"shape=\[75, 0, 3\] is impossible"),
        ("synthetic", {"shape": []}, "shape of an example, such as"),
        ("synthetic", {"classes": 1}, "2 or more"),
        ("synthetic", {"task": "ranking"}, '"classification" or "regression"'),
        ("shakespeare", {"sequence_length": 200_000}, "1 to 100000"),
    ],
)
def test_impossible_options_are_refused_with_what_is_allowed(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        datasets.check(name, options)


def test_the_summary_is_one_line_with_rows_shape_and_task() -> None:
    assert datasets.load("digits").summary == (
        "digits: 1,437 training and 360 test rows of shape 8x8x1, classification, 10 classes"
    )


def test_digits_are_those_that_scikit_learn_loads() -> None:
    from sklearn.datasets import load_digits

    digits, bunch = datasets.load("digits"), load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    x = np.concatenate([digits.x_test, digits.x_train])[..., 0]
    assert np.array_equal(16 * x, bunch.images[order])
    assert np.array_equal(np.concatenate([digits.y_test, digits.y_train]), bunch.target[order])


def test_digits_lie_between_0_and_1_and_both_parts_hold_all_ten() -> None:
    digits = datasets.load("digits")
    assert (digits.x_train.min(), digits.x_train.max()) == (0, 1)
    assert np.bincount(digits.y_train).min() > 100
    assert np.bincount(digits.y_test).min() > 20


# Synthetic ----------------------------------------------------------------------------------------


def test_synthetic_images_have_the_shape_asked_for() -> None:
    made = datasets.load("synthetic", shape=[75, 75, 3], rows=8, test_rows=4, classes=1000)
    assert made.shapes == Shapes((75, 75, 3), 1000, "classification")
    assert made.x_train.shape == (8, 75, 75, 3)


def test_synthetic_targets_are_standardised_floats() -> None:
    made = datasets.load("synthetic", task="regression", targets=2, rows=900, test_rows=100)
    y = np.concatenate([made.y_train, made.y_test])
    assert made.shapes == Shapes((32,), 2, "regression")
    assert y.dtype == np.float32
    np.testing.assert_allclose(y.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(y.std(axis=0), 1, atol=1e-5)


def test_another_seed_makes_other_data() -> None:
    first, other = (datasets.load("synthetic", seed=seed, rows=9) for seed in (0, 1))
    assert not np.array_equal(first.x_train, other.x_train)


def test_synthetic_labels_follow_from_the_features() -> None:
    made = datasets.load("synthetic", rows=2000, test_rows=500)
    scores = np.linalg.lstsq(made.x_train, np.eye(10)[made.y_train], rcond=None)[0]
    right = (made.x_test @ scores).argmax(axis=1) == made.y_test
    assert right.mean() > 2 * np.bincount(made.y_test).max() / 500  # twice as good as a blind guess


# Readers ------------------------------------------------------------------------------------------


def test_idx_header_gives_the_shape_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    header = b"\0\0\x08\x03" + struct.pack(">iii", 2, 3, 4)
    path.write_bytes(gzip.compress(header + bytes(range(24))))
    np.testing.assert_array_equal(read_idx(path), np.arange(24).reshape(2, 3, 4))


def test_a_file_that_is_no_idx_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "page.gz"
    path.write_bytes(gzip.compress(b"<html>"))
    with pytest.raises(LabkitError, match=r"page\.gz is not a file in the IDX format"):
        read_idx(path)


def test_cifar_planes_become_the_last_axis(tmp_path: Path) -> None:
    path = tmp_path / "cifar.tar.gz"
    pixels = np.repeat(np.array([10, 20, 30], np.uint8), 1024)  # red, green and blue planes
    with tarfile.open(path, "w:gz") as archive:
        for label, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
            content = bytes([label, *pixels, 9, *pixels])
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    found = read_cifar10(Rows(), [path])
    assert found.x_train.shape == (10, 32, 32, 3)
    assert found.x_train[0, 5, 7].tolist() == [10, 20, 30]
    assert found.y_train.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert found.y_test.tolist() == [5, 9]


ADULT = "{}, {}, 7, HS-grad, 9, Married, Sales, Wife, White, Female, 0, 0, 40, {}, {}\n"


def test_adult_is_standardised_and_one_hot_by_the_training_file_alone(tmp_path: Path) -> None:
    train, test = tmp_path / "adult.data", tmp_path / "adult.test"
    train.write_text(
        ADULT.format(20, "Private", "Cuba", "<=50K") + ADULT.format(40, "?", "Peru", ">50K") + "\n"
    )
    test.write_text("|a remark\n" + ADULT.format(50, "Private", "France", ">50K."))
    found = read_adult(Rows(), [train, test])
    # The columns are age, (?, Private), weight, HS-grad, years, Married, Sales, Wife, White,
    # Female, gain, loss, hours, and (Cuba, Peru). Constant columns stay 0, and France is not in the
    # training file.
    assert found.x_train.tolist() == [
        [-1, 0, 1, 0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1],
    ]
    assert found.x_test.tolist() == [[2, 0, 1, 0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]]
    assert (found.y_train.tolist(), found.y_test.tolist()) == ([0, 1], [1])


def test_the_label_of_a_character_is_the_one_that_follows(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_bytes(b"abcdefghijklmnopqrstuvwxyz" + b"abcd")  # 27 train, 3 test
    found = read_shakespeare(TextOptions(sequence_length=2), [path])
    assert found.x_train.tolist() == [[2 * k, 2 * k + 1] for k in range(13)]
    assert found.y_train[:12].tolist() == [[2 * k + 1, 2 * k + 2] for k in range(12)]
    assert found.y_train[12].tolist() == [25, 0]
    assert (found.x_test.tolist(), found.y_test.tolist()) == ([[1, 2]], [[2, 3]])


# The real sets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [("mnist", 0.130660, 0.308108), ("fashion_mnist", 0.286041, 0.353024)],
)
def test_pixels_have_the_published_mean_and_deviation(
    name: str, mean: float, deviation: float, real: Callable[..., Dataset]
) -> None:
    found = real(name)
    assert found.x_train.shape == (60000, 28, 28, 1)
    assert found.x_train.mean(dtype=float) == pytest.approx(mean, abs=1e-6)
    assert found.x_train.std(dtype=float) == pytest.approx(deviation, abs=1e-6)
    assert np.bincount(found.y_test, minlength=10).sum() == 10000


def test_adult_has_the_rows_and_incomes_that_are_published(real: Callable[..., Dataset]) -> None:
    adult = real("adult")
    assert (adult.x_train.shape, adult.x_test.shape) == ((32561, 108), (16281, 108))
    assert (adult.y_train.sum(), adult.y_test.sum()) == (7841, 3846)
    np.testing.assert_allclose(adult.x_train[:, 0].mean(dtype=float), 0, atol=1e-6)


def test_shakespeare_begins_with_the_first_citizen(real: Callable[..., Dataset]) -> None:
    text = real("shakespeare", sequence_length=13)
    characters = np.array(
        sorted("\n !$&',-.3:;?" + "".join(map(chr, [*range(65, 91), *range(97, 123)])))
    )
    assert "".join(characters[text.x_train[0]]) == "First Citizen"
    assert "".join(characters[text.y_train[0]]) == "irst Citizen:"


# Found, fetched, refused --------------------------------------------------------------------------


def test_labkit_data_comes_before_data_and_both_before_the_network(
    tmp_path: Path, fake: Callable[[str], DataFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(f"http://127.0.0.1:{_closed_port()}")
    here = _put(tmp_path / "data", TEXT)
    assert [path.resolve() for path in datasets.locate("shakespeare")] == [here]
    named = _put(tmp_path / "shelf", TEXT)
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "shelf"))
    assert datasets.locate("shakespeare") == (named,)
    named.unlink()
    assert [path.resolve() for path in datasets.locate("shakespeare")] == [here]


def test_a_labkit_data_that_is_no_folder_is_an_error_and_not_a_download(
    tmp_path: Path, fake: Callable[[str], DataFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(f"http://127.0.0.1:{_closed_port()}")
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "shlef"))
    with pytest.raises(LabkitError, match=r"LABKIT_DATA=.*shlef is not a folder"):
        datasets.locate("shakespeare")


def test_another_file_than_published_is_named_with_both_checksums(
    tmp_path: Path, fake: Callable[[str], DataFile]
) -> None:
    file = fake(f"http://127.0.0.1:{_closed_port()}")
    _put(tmp_path / "data", b"to be")
    found = hashlib.sha256(b"to be").hexdigest()
    with pytest.raises(LabkitError) as caught:
        datasets.load("shakespeare")
    for part in ("data/tinyshakespeare/input.txt", file.sha256, found):
        assert part in str(caught.value)
    assert datasets.available("shakespeare") == str(caught.value)


def test_a_file_is_read_again_once_it_has_changed(
    tmp_path: Path, fake: Callable[[str], DataFile]
) -> None:
    fake(f"http://127.0.0.1:{_closed_port()}")
    path = _put(tmp_path / "data", TEXT)
    assert datasets.available("shakespeare") is None
    path.write_bytes(b"to be")
    assert "is not the published file" in str(datasets.available("shakespeare"))


def test_without_a_network_the_error_names_folder_file_and_address(
    fake: Callable[[str], DataFile],
) -> None:
    file = fake(f"http://127.0.0.1:{_closed_port()}")
    missing = (
        f"input.txt is missing: download it from {file.url}, and put it into data/tinyshakespeare"
    )
    assert datasets.available("shakespeare") == missing
    with pytest.raises(LabkitError) as caught:
        datasets.ensure("shakespeare")
    assert str(caught.value).startswith(f"{missing}; the download failed: ")
    assert "refused" in str(caught.value)


def test_a_missing_file_is_fetched_once_into_data(
    tmp_path: Path, fake: Callable[[str], DataFile], publisher: tuple[str, Path]
) -> None:
    address, folder = publisher
    (folder / "input.txt").write_bytes(TEXT)
    fake(address)
    datasets.ensure("shakespeare")
    (folder / "input.txt").unlink()
    assert datasets.load("shakespeare", sequence_length=5).x_train.shape == (71, 5)
    kept = [path.name for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert kept == ["input.txt"]  # no incomplete download remains


def test_a_file_is_fetched_into_the_named_folder_where_that_can_be_written(
    tmp_path: Path,
    fake: Callable[[str], DataFile],
    publisher: tuple[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A notebook in JupyterLab runs in its own folder, but uses the data folder of the lab."""
    address, folder = publisher
    (folder / "input.txt").write_bytes(TEXT)
    fake(address)
    (tmp_path / "shelf").mkdir()
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "shelf"))
    datasets.ensure("shakespeare")
    assert (tmp_path / "shelf" / "tinyshakespeare" / "input.txt").read_bytes() == TEXT
    assert not (tmp_path / "data").exists()


def test_processes_that_fetch_at_once_all_find_the_whole_file(
    tmp_path: Path, fake: Callable[[str], DataFile], publisher: tuple[str, Path]
) -> None:
    address, folder = publisher
    (folder / "input.txt").write_bytes(TEXT)
    fake(address)
    code = (
        "from labkit.datasets.dataset import DataFile, fetch;"
        f"fetch({DATASETS['shakespeare'].files[0]!r})"
    )
    fetching = [subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) for _ in range(3)]
    assert [process.wait(60) for process in fetching] == [0, 0, 0]
    kept = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in kept] == [TEXT]


def test_a_publisher_that_serves_another_file_leaves_nothing_behind(
    tmp_path: Path, fake: Callable[[str], DataFile], publisher: tuple[str, Path]
) -> None:
    address, folder = publisher
    (folder / "input.txt").write_bytes(b"a login page")
    file = fake(address)
    with pytest.raises(LabkitError, match=f"{file.url} is not the published file"):
        datasets.ensure("shakespeare")
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]


def test_a_download_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LABKIT_DATA", raising=False)
    nobody = DataFile("letters", "a.txt", "http://127.0.0.1:9/a.txt", "0" * 64)
    with pytest.raises(LabkitError, match="the download failed"):
        fetch(nobody)
    assert list(tmp_path.rglob("*")) == []


def test_sets_without_files_are_always_available() -> None:
    assert [datasets.available(name) for name in ("digits", "synthetic")] == [None, None]
