"""Test the structure of labkit: packages in one order, no cycle, and no import upwards."""

from __future__ import annotations

import ast
import re
from collections import Counter
from itertools import pairwise
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


def test_no_two_files_of_tests_have_one_name() -> None:
    """Test file names: pytest refuses two test modules of one name outside of packages."""
    named = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in named.items() if count > 1] == []


@pytest.mark.parametrize(
    "line",
    [
        "from labkit.cluster import Cluster\n",
        "from ..cluster import Cluster\n",
        "def late() -> None:\n    import labkit.cluster.cluster\n",
        "import typing\nif typing.TYPE_CHECKING:\n    from labkit.cluster import run_handle\n",
    ],
)
def test_an_import_that_runs_up_is_found_wherever_it_stands(tmp_path: Path, line: str) -> None:
    files = {
        "cluster/__init__.py": "from labkit.cluster.cluster import Cluster\n",
        "cluster/cluster.py": "from labkit.schedules import ring\n",
        "cluster/live.py": "",
        "schedules/__init__.py": "from labkit.schedules import breaks_the_order\n",
        "schedules/breaks_the_order.py": line,
        "schedules/collectives.py": "",
    }
    for name, source in files.items():
        path = tmp_path / "labkit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    broken = house.between_rooms(house.arrows(tmp_path / "labkit"))
    assert house.upward(broken) == ["schedules -> cluster"]
    assert house.circles(broken) == [["cluster", "schedules"]]


def unsafe_commands(source: str) -> list[int]:
    """Return lines that start this Python without an option that ignores the current folder."""
    found = []
    for node in ast.walk(ast.parse(source)):
        words = node.elts if isinstance(node, ast.List | ast.Tuple) else []
        for word, option in pairwise(words):
            is_command = isinstance(option, ast.Constant | ast.Starred | ast.Name)
            if ast.unparse(word) == "sys.executable" and is_command:
                safe = ast.unparse(option) in ("'-P'", "'-I'", "'--version'")
                found += [] if safe else [node.lineno]
    return found


CAMPAIGNS = Path(__file__).with_name("acceptance")  # campaigns are outside of labkit and import it


def test_the_package_imports_no_campaign() -> None:
    imports = re.compile(r"^\s*(?:from|import) tests\b", re.MULTILINE)
    assert [
        name for name, path in house.modules().items() if imports.search(path.read_text())
    ] == []
    assert all(
        imports.search((CAMPAIGNS / f"{name}.py").read_text()) for name in ("fuzz", "attack")
    )


def test_every_python_that_labkit_starts_imports_nothing_from_the_current_folder() -> None:
    unsafe = {
        f"{path}:{line}"
        for path in (*house.modules().values(), *CAMPAIGNS.rglob("*.py"))
        for line in unsafe_commands(path.read_text())
    }
    assert unsafe == set()
    assert unsafe_commands('run([sys.executable, "-m", "labkit"])') == [1]
    assert unsafe_commands("run([*words, *(sys.executable, *more)])") == [1]


# Packages whose code runs on a rank.
ON_RANKS = (
    *("communicator", "compression", "exchange", "model_parallel"),
    *("programs", "keras", "strategies", "worker"),
)
CLOCKS = {"time", "datetime", "asyncio", "sched"}  # modules that give the time


def readers_of_time(root: Path) -> list[str]:
    """Return modules of these packages that import a clock, also inside functions."""
    return [
        name
        for name, path in house.modules(root).items()
        if house.room(name) in ON_RANKS
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and CLOCKS & {a.name for a in node.names})
        or (isinstance(node, ast.ImportFrom) and not node.level and node.module in CLOCKS)
    ]


def test_on_a_rank_only_the_clock_tells_the_time() -> None:
    assert readers_of_time(house.HOUSE) == ["labkit.communicator.clock"]


@pytest.mark.parametrize(
    "line", ["import time\n", "def late() -> None:\n    from time import sleep\n"]
)
def test_another_clock_on_a_rank_is_found(tmp_path: Path, line: str) -> None:
    copy = tmp_path / "labkit" / "strategies"
    copy.mkdir(parents=True)
    (copy / "sleeps.py").write_text(line)
    assert readers_of_time(copy.parent) == ["labkit.strategies.sleeps"]
