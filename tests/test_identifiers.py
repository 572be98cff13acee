"""Test names and docstrings: terms of the field, one per thing, and informative."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "labkit"

# These words are participles, adverbs and pronouns. A name must not consist of these words only.
VAGUE = frozenset(
    [
        "afar",
        "ahead",
        "alone",
        "anew",
        "anybody",
        "apart",
        "asked",
        "aside",
        "begun",
        "beside",
        "beyond",
        "brought",
        "each",
        "else",
        "elsewhere",
        "everybody",
        "everyone",
        "everything",
        "found",
        "given",
        "gone",
        "heard",
        "held",
        "here",
        "how",
        "it",
        "kept",
        "known",
        "left",
        "lost",
        "made",
        "meant",
        "meanwhile",
        "met",
        "nobody",
        "none",
        "nothing",
        "others",
        "own",
        "said",
        "seen",
        "seldom",
        "shown",
        "somebody",
        "something",
        "taken",
        "that",
        "them",
        "there",
        "they",
        "thing",
        "things",
        "this",
        "together",
        "told",
        "what",
        "when",
        "where",
        "which",
        "who",
        "whoever",
        "whole",
        "whom",
        "whose",
        "why",
    ]
)
# These subjects have a module in several packages: a strategy, its forecast, its figure, its
# benchmark.
FAMILIES = frozenset(
    [
        "allreduce",
        "averaging",
        "collectives",
        "compression",
        "exchange",
        "exported",
        "forecast",
        "frameworks",
        "inference",
        "input_pipeline",
        "jax",
        "links",
        "machine",
        "pipeline",
        "placement",
        "programs",
        "replicas",
        "scaling",
        "servers",
        "serving",
        "stages",
        "start",
        "taxonomy",
        "testbed",
        "torch",
    ]
)
# A docstring may begin with these names in lower case.
FIRST_WORDS = frozenset(("labkit", "ipyparallel", "speedup", "x", "y", "a"))


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def words(name: str) -> list[str]:
    """Split a name into its words, in lower case.

    >>> words("ParameterServer"), words("_on_nonfinite")
    (['parameter', 'server'], ['on', 'nonfinite'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]


def is_vague(name: str) -> bool:
    return bool(words(name)) and set(words(name)) <= VAGUE


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield public classes and functions, but none that are defined inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield child
            yield from _definitions(child)
        elif isinstance(child, ast.FunctionDef):
            yield child


def public_names() -> Iterator[tuple[str, str]]:
    """Yield modules, classes, public functions and their arguments, each with its place."""
    for path, tree in trees().items():
        place = str(path.relative_to(PACKAGE))
        yield place, path.stem
        for node in _definitions(tree):
            if isinstance(node, ast.ClassDef):
                yield f"{place}:{node.lineno}", node.name
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{place}:{node.lineno}", node.name
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                yield from ((f"{place}:{each.lineno}", each.arg) for each in arguments)


def test_no_public_name_is_a_participle_an_adverb_or_a_pronoun() -> None:
    assert [f"{place} {name}" for place, name in public_names() if is_vague(name)] == []


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(set)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                # Modules of one folder may implement the same interface, each for one framework.
                places[node.name].add(str(path.parent.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_modules_have_one_name_but_in_families() -> None:
    places = defaultdict(list)
    for path in trees():
        if path.stem != "__init__":
            places[path.stem].append(str(path.relative_to(PACKAGE)))
    repeated = {stem for stem, found in places.items() if len(found) > 1}
    assert repeated - FAMILIES == set()
    assert FAMILIES - repeated == set()  # the list contains only names that stand several times


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Yield the place, the name and the docstring of everything that has a docstring."""
    for path, tree in trees().items():
        place = str(path.relative_to(PACKAGE))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    name = path.stem if isinstance(node, ast.Module) else node.name
                    yield f"{place}:{getattr(node, 'lineno', 1)}", name, text


def test_docstrings_are_sentences() -> None:
    wrong = []
    for place, _, text in docstrings():
        first = text.split("\n\n")[0].strip()
        begins = re.match(r"[^a-z]", first) or re.split(r"\W", first)[0] in FIRST_WORDS
        if not begins or not re.search(r"[.:?!)`…]$", first):
            wrong.append(f"{place} {first[:60]!r}")
    assert wrong == []


def test_a_docstring_says_more_than_its_name() -> None:
    wrong = []
    for place, name, text in docstrings():
        said = re.findall(r"[^\W\d_]+|⌊|⌈", text.lower())
        known = {*words(name), "the", "a", "an", "of", "its", "for", "to", "return", "this"}
        if all(word in known or word.rstrip("s") in known for word in said):
            wrong.append(f"{place} {name}: {text[:60]!r}")
    assert wrong == []
