"""Test the parameters cell: the names, types and possible values of parameters."""

from __future__ import annotations

import json
import typing
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from labkit.common.errors import InvalidInput
from labkit.jobs import annotation_types
from labkit.jobs.parameters import (
    UNKNOWN,
    check_fields,
    declared,
    parse,
    read_yaml,
    validate_values,
)

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def one(source: str) -> Any:
    (parameter,) = parse(source).values()
    return parameter


def test_a_declaration_gives_name_type_default_and_help() -> None:
    parameter = one("workers: int = 2  # ranks")
    assert (parameter.name, parameter.annotation) == ("workers", "int")
    assert (parameter.default, parameter.help) == (2, "ranks")


def test_types_that_papermills_own_reader_does_not_see_are_seen() -> None:
    found = parse('network: str | None = None\nmode: Literal["a", "b"] = "a"\nx: "int" = 1')
    assert [found[name].annotation for name in found] == ["str | None", "Literal['a', 'b']", "int"]


def test_a_default_without_annotation_is_of_its_own_type() -> None:
    assert one("fast = True").annotation == "bool"
    assert one("network = None").annotation == "Any"


def test_a_default_that_only_the_kernel_can_compute_is_not_guessed() -> None:
    assert one("rate: float = 1 / 3").default is UNKNOWN


def test_a_declaration_over_several_lines_is_one_parameter() -> None:
    parameter = one("sizes: list[int] = [\n    1,\n    2,\n]  # many")
    assert (parameter.default, parameter.help) == ([1, 2], "many")


def test_imports_and_calls_in_the_cell_are_no_parameters() -> None:
    assert list(parse("from typing import Literal\nprint(1)\nx.y = 2\nz: int\nn: int = 1")) == ["n"]


@pytest.mark.parametrize(
    ("declaration", "given", "meant"),
    [
        ("x: int = 1", "2", 2),
        ("x: float = 1.0", "1e-3", 0.001),
        ("x: float = 1.0", 3, 3.0),
        ("x: bool = False", "true", True),
        ("x: bool = True", "False", False),
        ("x: str = ''", "true", "true"),
        ("x: str = ''", "5", "5"),
        ("x: str = ''", "a: b # c", "a: b # c"),
        ("x: str | None = None", "null", None),
        ("x: str | None = None", "None", None),
        ("x: str | None = None", "1GbE", "1GbE"),
        ("x: int | None = None", "4", 4),
        ("x: list[int] = []", "1,2,4", [1, 2, 4]),
        ("x: list[int] = []", "[1, 2]", [1, 2]),
        ("x: list[int] = []", "3", [3]),
        ("x: list[str] = []", "mnist,digits", ["mnist", "digits"]),
        ("x: tuple[int, ...] = ()", [1, 2], [1, 2]),
        ("x: Literal['a', 'b'] = 'a'", "b", "b"),
        ("x: Literal[1, 2] = 1", "2", 2),
        ("x: dict[str, float] = {}", "{momentum: 0.9}", {"momentum": 0.9}),
        ("x = None", "2", 2),
    ],
)
def test_a_given_value_means_what_the_declared_type_says(
    declaration: str, given: Any, meant: Any
) -> None:
    found = one(declaration).convert(given)
    assert (found, type(found)) == (meant, type(meant))


@pytest.mark.parametrize(
    ("declaration", "given"),
    [
        ("x: int = 1", "two"),
        ("x: int = 1", "true"),
        ("x: int = 1", True),
        ("x: int = 1", 2.5),
        ("x: bool = False", "2"),
        ("x: str = ''", 5),
        ("x: list[int] = []", "1,two"),
        ("x: Literal['a', 'b'] = 'a'", "c"),
        ("x: int = 1", None),
        ("x: int = 1", object()),
    ],
)
def test_a_wrong_type_is_refused_with_the_declaration(declaration: str, given: Any) -> None:
    with pytest.raises(InvalidInput) as refusal:
        one(declaration).convert(given)
    assert f"x = {given!r}" in str(refusal.value)
    assert declaration in str(refusal.value)


def test_an_annotation_that_is_no_type_is_the_notebooks_mistake() -> None:
    with pytest.raises(InvalidInput, match="Tensor is not a type made of"):
        one("x: Tensor = 1").convert(1)


@pytest.mark.parametrize(
    "annotation",
    [
        "open({target!r}, 'w')",
        "list[open({target!r}, 'w')]",
        "int | open({target!r}, 'w')",
        "Literal[open({target!r}, 'w')]",
        "[kind for kind in (int,) if kind.mro()[-1].__subclasses__()]",
        "int.__class__.__base__.__subclasses__(int.__class__)",
        "Any.__class__",
        "(lambda: int)()",
        "dict[int]",
        "list[...]",
    ],
)
def test_an_annotation_cannot_run_code(tmp_path: Path, annotation: str) -> None:
    target = tmp_path / "made"
    with pytest.raises(InvalidInput, match="is not a type made of"):
        one(f"x: {annotation.format(target=str(target))} = 1").convert(1)
    assert not target.exists()


def test_types_are_read_as_python_reads_them() -> None:
    for annotation in (
        "int", "list[int]", "tuple[int, ...]", "dict[str, list[float]]", "Optional[int]",
        "Union[int, str]", "float | None", "Literal['a', -1, True]", "List[int]", "Any",
    ):  # fmt: skip
        assert annotation_types.read(annotation) == eval(annotation, vars(typing))


def test_an_unknown_name_gets_the_nearest_one_and_all_that_are_allowed() -> None:
    with pytest.raises(InvalidInput) as refusal:
        validate_values(NOTEBOOKS / "trains.ipynb", {"wrkers": "2"})
    assert "did you mean 'workers'?" in str(refusal.value)
    assert "allowed: workers, dataset, model, epochs" in str(refusal.value)


def test_impossible_values_are_those_that_the_experiment_refuses() -> None:
    with pytest.raises(InvalidInput, match="workers=0 is impossible"):
        validate_values(NOTEBOOKS / "trains.ipynb", {"workers": "0"})
    with pytest.raises(InvalidInput, match="unknown data set 'mnits'"):
        validate_values(NOTEBOOKS / "trains.ipynb", {"dataset": "mnits"})


def test_each_item_of_a_list_must_be_possible() -> None:
    check_fields({"workers": [1, 2, 4], "dataset": ["digits", "synthetic"]})
    with pytest.raises(InvalidInput, match="workers=0"):
        check_fields({"workers": [1, 2, 0]})


def test_a_list_is_one_value_of_a_field_that_holds_lists() -> None:
    check_fields({"workers": 2, "batch_weights": [1.0, 2.0], "metrics": ["accuracy"]})
    with pytest.raises(InvalidInput, match="batch_weights has 3 numbers for workers=2"):
        check_fields({"workers": 2, "batch_weights": [1.0, 2.0, 3.0]})


def test_names_that_are_no_fields_are_the_notebooks_own() -> None:
    check_fields({"question": 0, "colour": "red"})


@pytest.mark.parametrize(
    ("declaration", "refused"),
    [
        ('strategy: Literal["ring", "servers"] = "ring"', False),
        ('strategy: Literal["AllReduce", "servers"] = "AllReduce"', True),
        ('strategy: str = "ring"', True),
    ],
)
def test_choices_of_a_notebook_may_have_names_of_its_own(declaration: str, refused: bool) -> None:
    known = parse(declaration)
    with pytest.raises(InvalidInput, match="unknown strategy") if refused else nullcontext():
        assert (
            validate_values(Path("own.ipynb"), {"strategy": "servers"}, known)["strategy"]
            == "servers"
        )


def test_a_data_set_that_cannot_be_had_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LABKIT_DATA", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # no network, wherever the test runs
    with pytest.raises(InvalidInput, match=r"dataset='adult': adult\.data is missing"):
        validate_values(NOTEBOOKS / "trains.ipynb", {"dataset": "adult"})


def test_a_file_that_is_no_notebook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no notebook"):
        declared(tmp_path / "nothing.ipynb")
    path = tmp_path / "other.ipynb"
    for content in ("{", "[]", "{}"):
        path.write_text(content)
        with pytest.raises(InvalidInput, match="is not a notebook"):
            declared(path)


def test_a_parameters_cell_that_is_not_python_is_refused(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": ["x: int = = 2"]}
    path = tmp_path / "broken.ipynb"
    path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4}))
    with pytest.raises(InvalidInput, match="is not Python"):
        declared(path)


def test_yaml_reads_numbers_as_people_write_them() -> None:
    record = read_yaml("rate: 1e-3\nmode: on\nday: 2020-01-01\nsizes: [1, 2]\nnetwork: None", "-y")
    assert record == {
        "rate": 0.001,
        "mode": "on",
        "day": "2020-01-01",
        "sizes": [1, 2],
        "network": None,
    }


@pytest.mark.parametrize("text", ["[1, 2]", "workers", "{a: ", "1: 2"])
def test_yaml_that_gives_no_names_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^p\.yaml "):
        read_yaml(text, "p.yaml")
