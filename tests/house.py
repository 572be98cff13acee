"""The structure of labkit in figures: `uv run python tests/house.py [ROOM …]`.

It prints packages (rooms), levels (floors), upward imports (arrows), cycles, lines, untyped code
and repeated names. `tests/test_house.py` fixes the order of the packages; this script shows how a
change affects the figures.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HOUSE = Path(__file__).parents[1] / "labkit"

# The order of the packages from the bottom up: a package imports only packages listed before it.
ORDER = (
    *("common", "schedules", "network", "simulate"),
    *("communicator", "frameworks", "compression", "exchange", "datasets", "models"),
    *("model_parallel",),
    *(
        "programs",
        "keras",
        "forecast",
        "strategies",
        "experiment",
        "records",
        "deployment",
        "worker",
    ),
    *("figures", "report", "hosts", "cluster", "jobs", "bench", "cli"),
)
COLUMNS = ("modules", "lines", "code", "untyped", "ignores", "comments")
FRAGMENT = 60  # a shorter module with one importer belongs into its importer


@dataclass(frozen=True)
class Arrow:
    """One import of a labkit module by another, also inside a function or for types only."""

    importer: str
    imported: str


def modules(house: Path = HOUSE) -> dict[str, Path]:
    """Return the path of each module by its dotted name."""
    found = {}
    for path in sorted(house.rglob("*.py")):
        parts = path.relative_to(house.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def arrows(house: Path = HOUSE) -> set[Arrow]:
    """Return every import between labkit's own modules."""
    known = modules(house)
    return {
        Arrow(name, other)
        for name, path in known.items()
        for other in _imported(path, name, known)
        if other != name
    }


def _imported(path: Path, name: str, known: dict[str, Path]) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    root = name.split(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == root)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base.split(".")[0] == root:
                for alias in node.names:
                    whole = f"{base}.{alias.name}"
                    yield whole if whole in known else base


def room(module: str) -> str:
    """Return the top-level package (room) of a module; `labkit/__init__.py` is in none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def between_rooms(found: Iterable[Arrow]) -> dict[tuple[str, str], list[Arrow]]:
    """Return the imports from one package to another, without those of `labkit/__init__.py`."""
    rooms = defaultdict(list)
    for arrow in found:
        pair = room(arrow.importer), room(arrow.imported)
        if all(pair) and pair[0] != pair[1]:
            rooms[pair].append(arrow)
    return dict(rooms)


def upward(pairs: Iterable[tuple[str, str]], order: tuple[str, ...] = ORDER) -> list[str]:
    """Return pairs of packages that break the order or that the order does not name."""
    floor = {name: place for place, name in enumerate(order)}
    return sorted(
        f"{one} -> {other}"
        for one, other in pairs
        if one not in floor or other not in floor or floor[one] < floor[other]
    )


def circles(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return sets of packages or modules that import each other in a cycle."""
    reach: dict[str, set[str]] = defaultdict(set)
    for one, other in pairs:
        reach[one].add(other)
    grew = True
    while grew:
        grew = False
        for one in list(reach):
            more = set().union(*(reach.get(other, set()) for other in reach[one])) - reach[one]
            grew |= bool(more)
            reach[one] |= more
    rings = {tuple(sorted(o for o in reach[one] if one in reach.get(o, ()))) for one in reach}
    return [list(ring) for ring in sorted(rings) if ring]


def floors(pairs: Iterable[tuple[str, str]]) -> int:
    """Return the length of the longest chain of imports through the packages."""
    below: dict[str, set[str]] = defaultdict(set)
    for one, other in pairs:
        below[one].add(other)

    def height(name: str, seen: frozenset[str] = frozenset()) -> int:
        others = below.get(name, set()) - seen
        return 1 + max((height(other, seen | {name}) for other in others), default=0)

    return max(map(height, list(below)), default=1)


def code_lines(source: str) -> int:
    """Count lines that hold code: neither blank, nor comment, nor docstring."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            first = body[0].value
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                held -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(held)


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def untyped(source: str) -> int:
    """Count annotations of `Any` or something as imprecise; text in strings does not count."""
    return sum(map(_says_little, ast.walk(ast.parse(source))))


def _says_little(node: ast.AST) -> int:
    if isinstance(node, ast.Name):
        return node.id in {"Any", "object"}
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") == "cast"
    if isinstance(node, ast.ImportFrom) and node.module == "typing":
        return sum(alias.name in {"Any", "cast"} for alias in node.names)
    if isinstance(node, ast.arg | ast.AnnAssign):
        return sum(getattr(each, "id", "") == "Mapping" for each in _bare(node.annotation))
    if isinstance(node, ast.FunctionDef):
        return sum(getattr(each, "id", "") == "Mapping" for each in _bare(node.returns))
    return 0


def _bare(annotation: ast.expr | None) -> Iterator[ast.expr]:
    """Yield the members of a union annotation, or the annotation itself."""
    if isinstance(annotation, ast.BinOp):
        yield from _bare(annotation.left)
        yield from _bare(annotation.right)
    elif annotation is not None:
        yield annotation


def comments(source: str) -> int:
    """Count the lines that are a comment or end in one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def fragments(house: Path = HOUSE) -> list[str]:
    """Return small modules that only one other module imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for arrow in arrows(house):
        importers[arrow.imported].add(arrow.importer)
    return [
        f"{name} ({len(path.read_text().splitlines())} lines) <- {next(iter(importers[name]))}"
        for name, path in modules(house).items()
        if path.name != "__init__.py"
        and len(path.read_text().splitlines()) < FRAGMENT
        and len(importers[name]) == 1
    ]


def repeated(house: Path = HOUSE) -> dict[str, list[str]]:
    """Return file names that occur in more than one package or folder."""
    places = defaultdict(list)
    for name, path in modules(house).items():
        if path.name != "__init__.py":
            places[path.stem].append(name)
    return {stem: names for stem, names in sorted(places.items()) if len(names) > 1}


def main(rooms: list[str]) -> None:
    """Print the figures of all packages or of the given ones."""
    every = {name: path for name, path in modules().items() if not rooms or room(name) in rooms}
    pairs = between_rooms(arrows())
    print(f"rooms {len({room(name) for name in modules()} - {''})}, floors {floors(pairs)}")
    print(f"arrows that run up {upward(pairs)}, circles {circles(pairs)}")
    inside = [(arrow.importer, arrow.imported) for arrow in arrows()]
    print(f"circles of modules {circles(inside)}")
    print(f"{'room':16}" + "".join(f"{name:>9}" for name in COLUMNS))
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for name, path in every.items():
        source = path.read_text()
        counted = {
            "modules": 1,
            "lines": len(source.splitlines()),
            "code": code_lines(source),
            "untyped": untyped(source),
            "ignores": source.count("type: ignore"),
            "comments": comments(source),
        }
        for key in (room(name) or "(face)", "in all"):
            sums[key].update(counted)
    for key in [*(each for each in ("(face)", *ORDER) if each in sums), "in all"]:
        row = sums[key]
        print(f"{key:16}" + "".join(f"{row[name]:9}" for name in COLUMNS))
    total = sums["in all"]
    print(f"untyped a thousand lines {1000 * total['untyped'] / total['lines']:.1f}")
    print(f"basenames that stand twice or more: {len(repeated())}")
    for stem, names in repeated().items():
        if not rooms or any(room(name) in rooms for name in names):
            print(f"  {stem}: {', '.join(name.removeprefix('labkit.') for name in names)}")
    small = [line for line in fragments() if not rooms or room(line.split(" ")[0]) in rooms]
    print(f"fragments with one importer: {len(small)}", *small, sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
