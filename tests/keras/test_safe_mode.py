"""Test that code in a stranger's model file does not run."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
from sample_runs import write_run

from labkit.common.errors import LabkitError
from labkit.deployment import LowRank, read_sparse, write_sparse
from labkit.keras.safe_mode import load_model
from labkit.records.run import Run
from labkit.worker import inference


def with_lambda() -> keras.Model:
    code = lambda x: (__import__("pathlib").Path("mark").touch(), x)[1]  # noqa: E731
    model = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(code), keras.layers.Dense(1)])
    Path("mark").unlink()  # Keras called the lambda to build the model
    return model


def plain() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="relu")])


def in_run(path: Path) -> keras.Model:
    run = write_run(Path("runs") / "a")
    (run.path / "model.keras").write_bytes(path.read_bytes())
    return Run(run.path).model()


def from_bytes(path: Path) -> keras.Model:
    return inference.load(path.read_bytes())


def compressed(path: Path) -> keras.Model:
    return LowRank().read(path)


READERS = [load_model, in_run, inference.load, from_bytes, compressed]
Reader = Callable[[Path], keras.Model]


@pytest.fixture
def unsafe() -> Iterator[None]:
    """Allow unsafe loading, as a user may do for trusted files."""
    keras.config.enable_unsafe_deserialization()
    yield
    keras.src.backend.common.global_state.set_global_attribute("safe_mode_saving", None)


@pytest.mark.parametrize("read", READERS)
def test_a_lambda_layer_runs_nothing(read: Reader) -> None:
    with_lambda().save("model.keras")
    with pytest.raises(LabkitError, match=r"keras contains code, .*enable_unsafe_deserialization"):
        read(Path("model.keras"))
    assert not Path("mark").exists()


@pytest.mark.parametrize("suffix", ["h5", "lks"])
def test_neither_do_files_of_other_formats(suffix: str) -> None:
    path, model = Path(f"model.{suffix}"), with_lambda()
    if suffix == "h5":
        model.save(path)
    else:
        write_sparse(model, path)
    with pytest.raises(LabkitError, match=f"model.{suffix} contains code, such as a Lambda layer"):
        (load_model if suffix == "h5" else read_sparse)(path)
    assert not Path("mark").exists()


def test_whoever_trusts_a_file_says_so_to_keras(unsafe: None) -> None:
    with_lambda().save("model.keras")
    assert len(load_model("model.keras").layers) == 2
    assert Path("mark").exists()


def function(module: str, name: str) -> dict[str, Any]:
    return {"module": module, "class_name": "function", "config": name, "registered_name": name}


ODD: dict[str, Any] = {
    "a class of Python": {
        "module": "subprocess",
        "class_name": "Popen",
        "config": {"args": "touch mark", "shell": True},
        "registered_name": None,
    },
    "a class of labkit": {
        "module": "labkit.hosts.host_namespaces",
        "class_name": "HostNamespaces",
        "config": {"host": {"name": "a"}},
        "registered_name": "HostNamespaces",
    },
    "a saved model of others": {
        "module": "keras.layers",
        "class_name": "TFSMLayer",
        "config": {"filepath": "other"},
        "registered_name": None,
    },
    "a function of Python": function("os", "system"),
    "a builtin": function("builtins", "exec"),
    "a function that loads": function("keras.utils", "get_file"),
    "a lambda": {"class_name": "__lambda__", "config": {"value": "x"}},
    "nothing": None,
    "a number": 7,
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_class_of_kerass_runs_nothing(what: str) -> None:
    plain().save("model.keras")
    with zipfile.ZipFile("model.keras") as file:
        parts = {name: file.read(name) for name in file.namelist()}
    config = json.loads(parts["config.json"])
    layers = config["config"]["layers"]
    if "function" in what or what in ("a builtin", "a lambda"):
        layers[1]["config"]["activation"] = ODD[what]
    else:
        layers[1] = ODD[what]
    with zipfile.ZipFile("model.keras", "w") as file:
        for name, content in (parts | {"config.json": json.dumps(config).encode()}).items():
            file.writestr(name, content)
    with pytest.raises(LabkitError) as caught:
        load_model("model.keras")
    assert len(str(caught.value).splitlines()) == 1
    assert not Path("mark").exists()


def test_a_damaged_file_is_refused_by_name() -> None:
    for content in (b"", b"PK\3\4", b"no model", b"\x89HDF\r\n\x1a\n"):
        Path("model.keras").write_bytes(content)
        with pytest.raises(LabkitError, match=r"model\.keras is not a model of Keras classes"):
            load_model("model.keras")


@keras.saving.register_keras_serializable("tests")
class Doubled(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x + x


def test_a_registered_layer_of_ones_own_loads() -> None:
    keras.Sequential([keras.Input((2,)), Doubled()]).save("model.keras")
    assert isinstance(load_model("model.keras").layers[0], Doubled)
