"""Test that a given value reaches the kernel in its declared type, or is refused."""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from labkit.common.errors import InvalidInput
from labkit.jobs.annotation_types import UNTYPED
from labkit.jobs.parameters import NotebookParameter, parse

REFUSED = object()
DAY, NOON = datetime.date(2024, 2, 29), datetime.time(12, 30)
MOMENT = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
NUMBER = UUID("12345678123456781234567812345678")
# Each case has the declaration, the value from the command line or a file, and the kernel's value.
CASES: list[tuple[str, Any, Any]] = [
    ('x = float("inf")', "inf", math.inf),
    ('x = float("inf")', "3", 3.0),
    ("x: float = 1.0", "-inf", -math.inf),
    ("x = math.inf", ".inf", math.inf),
    ("x = -np.inf", "1e-3", 0.001),
    ("x: float | None = None", "inf", math.inf),
    ("x: float = 1.0", math.inf, math.inf),
    ("x: list[float] = []", "inf,1", REFUSED),  # a list cannot mix text and numbers
    ("x: list[float] = []", "[.inf, 1.0]", [math.inf, 1.0]),
    ("x: float | str = 1.0", ".inf", ".inf"),
    ("x = None", "inf", REFUSED),
    ("x = (28, 28)", "14,14", (14, 14)),
    ("x = (28, 28)", "(14, 14)", (14, 14)),
    ("x = (28, 28)", "[14]", (14,)),
    ("x: tuple[int, int] = (28, 28)", "(14, 'a')", REFUSED),
    ("x: Tuple[int, ...] = ()", "()", ()),
    ("x: list[tuple[str, int]] = []", "[[a, 1]]", [("a", 1)]),
    ("x = {1, 2}", "3", {3}),
    ("x: dict[int, float] = {}", "{1: 2.0}", {1: 2.0}),
    ("x: dict[int, float] = {}", '{"1": 2.0}', {1: 2.0}),
    ("x = datetime.date(2024, 1, 31)", "2024-02-29", DAY),
    ("x = date.today()", "2024-02-29", DAY),
    ("x: dt.date = dt.date(2024, 1, 31)", "2024-02-30", REFUSED),
    ("x = date(2024, 1, 31)", "5", REFUSED),
    ("x = date(2024, 1, 31)", DAY, DAY),
    ("x = datetime.datetime.now()", "2024-02-29T12:30:00+00:00", MOMENT),
    ("x = datetime.now()", "1700000000", REFUSED),
    ("x = datetime.time(8)", "12:30", NOON),
    ("x = timedelta(days=1)", "1 day, 01:00:00", datetime.timedelta(days=1, hours=1)),
    ('x = pathlib.Path("data")', "other", Path("other")),
    ('x = Path.home() / "data"', "5", Path("5")),
    ("x: Path | None = None", "a b/ü", Path("a b/ü")),
    ('x = Decimal("1.5")', "0.10", Decimal("0.10")),
    ("x = Fraction(1, 3)", "2/3", Fraction(2, 3)),
    ("x = uuid.uuid4()", str(NUMBER), NUMBER),
    ("x = Fraction(1, 3)", "1/0", REFUSED),
    ("x = date.today() - timedelta(days=1)", "2024-02-29", DAY),
    ("x = date.today() - date(2024, 1, 1)", "1 day", datetime.timedelta(days=1)),
    ("x = [0] * 3", "1,2", [1, 2]),
    ("x = {'a', 'b'}", "[a, b, c, d, e]", {*"abcde"}),
    ("x = 1j", "1+2j", 1 + 2j),
    ('x = b"a"', "b", REFUSED),
    ("x = Mode.A", "B", REFUSED),
    ("x = np.zeros(3)", "1,2", REFUSED),
    ('x = cfg["lr"]', "0.5", 0.5),
    ("x = np.random.randint(100)", "7", 7),
    ("x = MODELS[0]", "mlp", REFUSED),
    ("x = date.today().replace(day=1)", "2024-02-29", DAY),
    ("x: Any = np.zeros(3)", "1,2", "1,2"),
    ("x: Mode = Mode.A", "B", REFUSED),
    ("x = 1 / 3", "2", 2.0),
    ("x = 10 ** -3", "0.5", 0.5),
    ("x = 2 ** 10", "512", 512),
    ("x = 2 ** 10", "0.5", REFUSED),
    ("x = 60 * 60 * 1.5", "1", 1.0),
    ('x = f"{a}"', "5", "5"),
    ('x = "a" + "b"', "5", "5"),
    ('x = os.environ.get("X", "a")', "5", "5"),
    ('x = int(os.environ["X"])', "5", 5),
    ("x = [n for n in range(3)]", "1,2", [1, 2]),
    ("x = dict(a=1)", "{b: 2}", {"b": 2}),
    ("x = not True", "true", True),
    ("x = time.time()", "5", 5.0),
    ("x = 3 if fast else 5", "4", 4),
    ("x: Optional[int] = None", "null", None),
    ("x: typing.Literal['a'] = 'a'", "a", "a"),
    ("x: Annotated[int, Field(gt=0)] = 1", "2", 2),
    ("x: Final[int] = 1", "2", 2),
    ("x: Final = 1.0", "2", 2.0),
    ("x: Sequence[int] = ()", "1,2", [1, 2]),
    ("x = 0", "007", 7),
    ("x = None", "010", 10),
    ("x = 0", "-3", -3),
    ("x = 0", "1_000", 1000),
    ("x = 0", "9" * 40, int("9" * 40)),
    ("x: str = 'a'", "", ""),
    ("x: str | None = 'a'", "", ""),
    ("x: int | None = 1", "", None),
    ("x: int = 1", "", REFUSED),
    ("x: str = 'a'", "'\"\\\n\t{}", "'\"\\\n\t{}"),
    ("x = {}", "{a: {b: [1, null, true]}}", {"a": {"b": [1, None, True]}}),
]  # fmt: skip


def one(source: str) -> NotebookParameter:
    (parameter,) = parse(source).values()
    return parameter


@pytest.mark.parametrize(("declaration", "given", "meant"), CASES)
def test_a_value_arrives_as_it_is_declared(declaration: str, given: Any, meant: Any) -> None:
    parameter = one(declaration)
    if meant is REFUSED:
        with pytest.raises(
            InvalidInput, match=r"^(x = |the parameters cell |labkit cannot tell the type of x )"
        ):
            parameter.convert(given)
        return
    record = parameter.convert(given)
    record = json.loads(json.dumps(record, allow_nan=False))  # the JSON in params.yaml and records
    found = eval(parameter.source(record), {})
    assert (found, type(found)) == (meant, type(meant))
    assert parameter.convert(record) == record  # a resumed job converts the recorded value again


def test_a_number_that_is_none_arrives() -> None:
    assert math.isnan(eval(one("x: float = 0.0").source(one("x: float = 0.0").convert("nan"))))


def test_a_default_that_json_has_not_is_left_to_the_kernel() -> None:
    found = parse("a = {1, 2}\nb = b'a'\nc = 1e999\nd = (1, 2)\ne = ...\nf = {(1, 2): 3}")
    assert [name for name, each in found.items() if isinstance(each.default, tuple)] == ["d"]


def test_magics_and_shell_lines_are_no_parameters() -> None:
    source = "%autosave 0\n!echo hello\nn = 3  # samples\nfiles = !ls\nwhere?\nm = n * 2"
    found = parse(source)
    assert [(name, each.annotation) for name, each in found.items()] == [
        ("n", "int"), ("files", UNTYPED), ("m", "int"),
    ]  # fmt: skip
    assert found["n"].help == "samples"
    assert parse("%%time\nn = 3").keys() == {"n"}
    assert parse("%%bash\nn=3") == {}
