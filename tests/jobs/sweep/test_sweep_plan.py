"""Test that a sweep knows, names and checks its members before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from labkit.common.errors import InvalidInput
from labkit.jobs.sweep import manifest
from labkit.jobs.sweep import sweep_plan as plans
from labkit.jobs.sweep.grid import Draw
from labkit.jobs.sweep.sweep_plan import SweepPlan, SweepSpec, make, read_assignments, read_file

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SPEAKS = NOTEBOOKS / "says_its_parameters.ipynb"
SWEPT = NOTEBOOKS / "is_swept.ipynb"


def plan(notebook: Path, *assignments: str, **fields: Any) -> SweepPlan:
    return make(
        notebook, SweepSpec(read_assignments(assignments), fields.pop("fixed", {}), **fields)
    )


def test_values_are_read_as_the_notebook_declares_them() -> None:
    made = plan(SPEAKS, "count=1,2", "rate=1e-3", "word=5,a", fixed={"fast": "true"})
    assert [member.values for member in made.members] == [
        {"fast": True, "count": count, "rate": 0.001, "word": word}
        for count in (1, 2)
        for word in ("5", "a")
    ]


def test_zipped_parameters_change_together() -> None:
    made = plan(SPEAKS, "count=1,1,2", "word=x,y", "rate=1,2,1", zipped=[["count", "rate"]])
    assert [tuple(member.values.values()) for member in made.members] == [
        (1, 1.0, "x"),
        (1, 1.0, "y"),
        (1, 2.0, "x"),
        (1, 2.0, "y"),
        (2, 1.0, "x"),
        (2, 1.0, "y"),
    ]
    assert made.members[-1].folder == "006_count=2,rate=1.0,word=y"
    drawn = plan(SPEAKS, "count=1,2,3", "rate=1,2,3", zipped=[["count", "rate"]], random=2)
    assert [member.values["rate"] == member.values["count"] for member in drawn.members] == [
        True
    ] * 2


@pytest.mark.parametrize(
    ("zipped", "words"),
    [
        (
            ["count", "sizes"],
            "count has 2, sizes has 3 values; give all zipped parameters the same",
        ),
        (["count"], "--zip count names one parameter"),
        (["count", "fast"], "fast is not swept; list its values, such as fast=1,2,3"),
        (["count", "rate"], "rate is drawn from a distribution"),
        (["count", "count"], "--zip names count twice"),
        (["count", "word"], 'count,word has the value [1, "x"] twice'),
    ],
)
def test_parameters_that_cannot_be_zipped_are_refused(zipped: list[str], words: str) -> None:
    given = ("count=1,1", "sizes=[1],[2],[3]", "rate=uniform(0,1)", "word=x,x")
    with pytest.raises(InvalidInput) as refused:
        plan(SPEAKS, *given, zipped=[zipped])
    assert words in str(refused.value)


def test_a_folder_is_named_after_what_is_swept() -> None:
    made = plan(SPEAKS, "count=1,2", "rate=1", "sizes=[1,2],3", fixed={"fast": "true"})
    assert [member.folder for member in made.members] == [
        "001_count=1,sizes=_1,2",
        "002_count=1,sizes=_3",
        "003_count=2,sizes=_1,2",
        "004_count=2,sizes=_3",
    ]
    assert [member.folder for member in plan(SPEAKS, "count=1").members] == ["001"]


def test_repeats_count_up_the_seed_or_the_repeat() -> None:
    made = plan(SWEPT, "number=7,8", repeats=2, fixed={"seed": "5"})
    assert [(m.folder, m.values["seed"], m.repeat) for m in made.members] == [
        ("001_number=7,seed=5", 5, 0),
        ("002_number=7,seed=6", 6, 0),
        ("003_number=8,seed=5", 5, 0),
        ("004_number=8,seed=6", 6, 0),
    ]
    made = plan(SPEAKS, "count=1", repeats=2)
    assert [(m.folder, m.repeat) for m in made.members] == [
        ("001_repeat=0", 0),
        ("002_repeat=1", 1),
    ]
    assert len({made.content(member) for member in made.members}) == 2


def test_a_member_knows_the_cluster_that_it_needs() -> None:
    trains = NOTEBOOKS / "trains.ipynb"
    assert [m.shape for m in plan(trains, "workers=1,4").members] == [(1, 1), (4, 1)]
    assert [m.shape for m in plan(trains, "epochs=1,2").members] == [(2, 1)] * 2  # by default
    assert [m.cores for m in plan(trains, "workers=1,4").members] == [1, 4]
    assert plan(SPEAKS, "count=1").members[0].cores is None


def test_what_runs_is_the_notebook_as_it_was_when_the_sweep_began(tmp_path: Path) -> None:
    notebook = tmp_path / "says.ipynb"
    shutil.copy(SPEAKS, notebook)
    made = plan(notebook, "count=1,2")
    before = [made.content(member) for member in made.members]
    notebook.write_text(notebook.read_text().replace("count", "other"))
    assert manifest.save_notebook(tmp_path, made).read_bytes() == SPEAKS.read_bytes()
    assert [made.content(member) for member in made.members] == before


@pytest.mark.parametrize(
    ("assignments", "fields", "words"),
    [
        (["cuont=1"], {}, "has no parameter 'cuont' (did you mean 'count'?)"),
        (["count=1"], {"fixed": {"raet": 1}}, "has no parameter 'raet' (did you mean 'rate'?)"),
        (["count=1,two"], {}, "count = 'two' is not int"),
        (["mode=ring,star"], {}, "mode = 'star' is not a choice"),
        (["count=1.5,2"], {}, "count = '1.5' is not int"),
        (["count=uniform(1,2)"], {"random": 2}, "count = 1.0 is not int"),
        (["count=1,2,1"], {}, "count has the value 1 twice"),
        (["rate=1,1.0"], {}, "rate has the value 1.0 twice"),
        (["count=1"], {"fixed": {"count": 2}}, "count is both swept and fixed"),
        (["count=1"], {"repeats": 0}, "--repeats 0 is impossible"),
        (["count=range(9000)"], {"repeats": 2}, "exceed the maximum of a sweep"),
        (["count=range(200)", "rate=range(200)"], {}, "40,000 combinations exceed"),
        (["rate=uniform(1,2)"], {}, "--random N"),
    ],
)
def test_what_cannot_run_is_refused(
    assignments: list[str], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        plan(SPEAKS, *assignments, **fields)
    assert words in str(refused.value)


def test_a_seed_that_is_swept_is_not_counted_up() -> None:
    with pytest.raises(InvalidInput, match="also swept"):
        plan(SWEPT, "seed=1,2", repeats=2)


def test_a_value_that_the_experiment_refuses_is_refused_too() -> None:
    with pytest.raises(InvalidInput, match="workers=0 is impossible"):
        plan(NOTEBOOKS / "trains.ipynb", "workers=1,0")


@pytest.mark.parametrize("text", ["count", "=1", "1=2", "a b=1", "-p=1"])
def test_an_assignment_has_a_name_and_values(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not of the form name=a,b,c"):
        read_assignments((text,))


def test_a_name_is_given_once() -> None:
    with pytest.raises(InvalidInput, match="given twice"):
        read_assignments(("a=1", "a=2"))


def test_a_file_has_axes_and_what_to_draw() -> None:
    text = "count: [1, 2]\nrate: loguniform(1e-3, 1)\nword: x\nrandom: {samples: 3, seed: 4}\n"
    axes, drawn, zipped = read_file(text, "sweep.yaml")
    assert axes == {"count": (1, 2), "rate": Draw(1e-3, 1.0, log=True), "word": ("x",)}
    assert drawn == {"samples": 3, "seed": 4}
    assert read_file("random: 3", "sweep.yaml")[1] == {"samples": 3}
    assert read_file("", "sweep.yaml") == ({}, {}, [])
    assert zipped == []
    assert read_file("zip: [a, b]", "sweep.yaml")[2] == [["a", "b"]]
    assert read_file("zip: [[a, b], [c, d]]", "sweep.yaml")[2] == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    "text",
    [
        "- 1",
        "count: [1",
        "count: []",
        "1: 2",
        "count: range(5,1)",
        "random: many",
        "random: true",
        "random: {sample: 3}",
        "random: {samples: x}",
        "random: [3]",
        "zip: a,b",
        "zip: 3",
        "zip: [a, 1]",
        "zip: [[a, b], c]",
    ],
)
def test_a_malformed_file_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_file(text, "sweep.yaml")
    assert "\n" not in str(refused.value)


def test_what_a_member_computes_from_is_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads(SPEAKS.read_text())

    def content(value: int = 1) -> str:
        copy = tmp_path / "copy.ipynb"
        copy.write_text(json.dumps(record))
        made = plan(copy, f"count={value}")
        return made.content(made.members[0])

    first = content()
    assert content(2) != first
    record["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "x"}]
    record["cells"].append({"cell_type": "markdown", "metadata": {}, "source": "prose"})
    assert content() == first
    record["cells"][1]["source"] = ["print(2)"]
    assert content() != first
    changed = content()
    monkeypatch.setattr(plans, "fingerprint", lambda: "another labkit")
    assert content() != changed


def test_what_is_asked_has_a_name_whatever_the_code_is(monkeypatch: pytest.MonkeyPatch) -> None:
    name = plan(SPEAKS, "count=1,2").name
    assert plan(SPEAKS, "count=1,3").name != name
    monkeypatch.setattr(plans, "fingerprint", lambda: "another labkit")
    assert plan(SPEAKS, "count=range(1,3)").name == name
