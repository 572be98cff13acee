"""Test mutants: each is a valid program with one change, and a suitable test detects it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.acceptance.mutants import mirrors, verdict
from tests.acceptance.mutations import mutants

ROOT = Path(__file__).parents[2]
SOURCE = '''
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy

def share(rows: int | None, ranks: Literal[1, 2]) -> float:
    """One of 2 parts."""
    if rows is None or rows < 0:
        raise ValueError(f"{rows + 1}")
    total = rows + 1
    print(total)
    return total / ranks if ranks > 1 else total
'''


def test_operators_constants_comparisons_conditions_and_statements_change_one_at_a_time() -> None:
    found = mutants(Path("share.py"), SOURCE)
    assert [mutant.change for mutant in found] == [
        "if rows is None or rows < 0: -> if not (rows is None or rows < 0):",
        "rows is None or rows < 0 -> rows is None and rows < 0",
        "rows is None -> rows is not None",
        "rows < 0 -> rows <= 0",
        "0 -> 1",
        "rows + 1 -> rows - 1",
        "1 -> 2",
        "print(total) -> pass",
        "total / ranks if ranks > 1 else total -> total / ranks if not ranks > 1 else total",
        "ranks > 1 -> ranks >= 1",
        "1 -> 2",
        "total / ranks -> total * ranks",
    ]
    plain = ast.unparse(ast.parse(SOURCE))
    for mutant in found:
        lines = zip(plain.splitlines(), mutant.source.splitlines(), strict=True)
        assert sum(one != other for one, other in lines) == 1, mutant.change


def test_types_and_messages_are_left_alone() -> None:
    assert (
        mutants(Path("a.py"), "A: TypeAlias = 'int'\ndef f(a: Literal[1]) -> int | None: ...") == []
    )
    assert mutants(Path("a.py"), "raise ValueError(1 + 2)") == []


def test_a_module_is_held_against_its_mirror() -> None:
    found = mirrors(ROOT, Path("labkit/exchange/autotune.py"))
    assert found[0] == Path("tests/exchange/test_autotune.py")
    assert Path("tests/exchange/test_bucket_order.py") in found  # it names a definition
    found = mirrors(ROOT, Path("labkit/exchange/compressed.py"))  # no test file of this name
    assert Path("tests/exchange/test_compressed.py") in found


@pytest.mark.slow
@pytest.mark.heavy
def test_a_change_that_matters_is_noticed_and_no_change_survives() -> None:
    file = Path("labkit/common/units.py")
    tests = mirrors(ROOT, file)
    assert verdict(ROOT, tests, None).outcome == "survived"
    # The chosen change makes `bytes_text` count units wrongly.
    changes = mutants(file, (ROOT / file).read_text())
    found = verdict(ROOT, tests, next(one for one in changes if one.change.endswith(" * 10")))
    assert found.outcome == "noticed"
    assert Path(found.by.split("::")[0]) in tests
    assert verdict(ROOT, tests, None, limit=0.1) == ("ran too long", "", pytest.approx(0.1, abs=60))
