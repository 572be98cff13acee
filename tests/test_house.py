"""The plan of the house: one road through the rooms, no circle, and nobody imports upwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import house
import pytest


@pytest.fixture(scope="module")
def pairs() -> dict[tuple[str, str], list[house.Arrow]]:
    return house.between_rooms(house.arrows())


def test_a_room_imports_only_what_stands_before_it(
    pairs: dict[tuple[str, str], list[house.Arrow]],
) -> None:
    assert house.upward(pairs) == []


def test_rooms_form_no_circle(pairs: dict[tuple[str, str], list[house.Arrow]]) -> None:
    assert house.circles(pairs) == []


def test_the_rooms_are_few_and_only_faces_stand_beside_them() -> None:
    assert len({house.room(name) for name in house.modules()} - {""}) <= 28
    assert [path.name for path in house.HOUSE.glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize(
    "line",
    [
        "from labkit.cluster import Cluster\n",
        "from ..cluster import Cluster\n",
        "def late() -> None:\n    import labkit.cluster.cluster\n",
        "import typing\nif typing.TYPE_CHECKING:\n    from labkit.cluster import live\n",
    ],
)
def test_an_import_that_runs_up_is_found_wherever_it_stands(tmp_path: Path, line: str) -> None:
    copy = tmp_path / "labkit"
    shutil.copytree(house.HOUSE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "schedules" / "breaks_the_order.py").write_text(line)
    broken = house.between_rooms(house.arrows(copy))
    assert house.upward(broken) == ["schedules -> cluster"]
    assert any({"schedules", "cluster"} <= set(ring) for ring in house.circles(broken))
