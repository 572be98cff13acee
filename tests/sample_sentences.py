"""Print random sentences of labkit by kind, for a reader who rates their clarity.

uv run python tests/sample_sentences.py --seed 1
"""

from __future__ import annotations

import ast
import io
import json
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
PACKAGE, NOTEBOOKS = ROOT / "labkit", ROOT / "notebooks"
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "labkit/README.md",
)
SHORTEST = 3  # fewest words of a sentence
_DIAGRAM = re.compile(r"(?m)^ +\S.*(?:\S {2,}\S| -> .* -> ).*$|^ +->.*$")  # also aligned columns
# Regular expressions, markup, command-line options and shell scripts are no sentences.
_CODE = re.compile(r"\.\*|\(\?|\\[sdwSb(]|^--|</|=\"|&&|\bexec\b|\$\{?#")
_WORD = re.compile(r"(?<!\S)[^\sA-Za-z]*[A-Za-z]{2,}")  # identifiers and checksums are one word
_END = re.compile(r"(?<=[.!?])(?:\*\*)?\s+(?=[A-Z`\"(*\[]|labkit|macOS|\d+\. )")


def sentences(text: str) -> list[str]:
    """Split a text into sentences; each entry of a list is a separate sentence."""
    lines = re.sub(r"(?m)^\s*(?:>>>|\.\.\.).*$", "", text)
    lines = _DIAGRAM.sub("", lines)
    lines = lines.replace("<br>", "\f")  # a line break of a figure's text
    lines = re.sub(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\w+(?:, \w+)*: ))", "\f", lines)
    parts = [" ".join(part.split()) for part in lines.split("\f")]
    found = [sentence for part in parts for sentence in _END.split(part)]
    # A text that begins with punctuation is the end of a sentence that another text begins.
    whole = [each for each in found if each and each[0] not in ",;:.)"]
    return [each for each in whole if len(_WORD.findall(each)) >= SHORTEST]


def words(sentence: str) -> int:
    """Return the number of words of a sentence; code counts as one word."""
    return len(_WORD.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", " code ", sentence)))


def documented(tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a module and of its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def comments(source: str) -> Iterator[str]:
    """Yield comments; comments on consecutive lines form one text."""
    block: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text, row = token.string.lstrip("#").strip(), token.start[0]
        if token.line[: token.start[1]].strip():  # a comment beside code is a separate text
            yield text
            continue
        if block and row != last + 1:
            yield " ".join(block)
            block = []
        block.append(text)
        last = row
    if block:
        yield " ".join(block)


def strings(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the texts of errors and other strings of several words, each with its kind."""
    errors = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        for part in ast.walk(node)
    }
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    documents = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if id(node) in inside or id(node) in documents:
            continue
        text = _text(node)
        if text and len(re.findall(r"[a-z]{2,}", text)) > SHORTEST and not _CODE.search(text):
            yield ("error" if id(node) in errors else "message"), text


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{…}" for part in node.values
        )
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return str(node.value) if is_text and isinstance(node, ast.Constant) else ""


def collect() -> dict[str, list[str]]:
    """Return all sentences by kind, each with its file."""
    found: dict[str, list[str]] = {}

    def add(kind: str, path: Path, text: str) -> None:
        where = path.relative_to(ROOT)
        found.setdefault(kind, []).extend(f"{each}  [{where}]" for each in sentences(text))

    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        for text in documented(tree):
            add("docstring", path, text)
        for text in comments(source):
            add("comment", path, text)
        for kind, text in strings(tree):
            add(kind, path, text)
    for path, text in prose():
        add("notebook" if path.suffix == ".ipynb" else "page", path, text)
    return found


def prose() -> Iterator[tuple[Path, str]]:
    """Yield the text of notebooks and of pages, each with its file."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                yield path, "".join(cell["source"])
    guide = sorted((NOTEBOOKS / "guide").rglob("*.md"))
    for path in (*(ROOT / page for page in PAGES), *guide):
        if path.exists():
            yield path, re.sub(r"(?s)```.*?```", "", path.read_text())


@click.command()
@click.option("--seed", default=0, show_default=True)
@click.option("--count", default=100, show_default=True, help="Sentences, in all.")
def main(seed: int, count: int) -> None:
    """Print a random sample of all sentences, so that frequent kinds occur more often."""
    rows = [(kind, text) for kind, texts in collect().items() for text in texts]
    chosen = random.Random(seed).sample(rows, min(count, len(rows)))
    for number, (kind, text) in enumerate(sorted(chosen), 1):
        click.echo(f"{number:3} {kind}: {text}")


if __name__ == "__main__":
    main()
