"""The Markdown page that lists all methods with papers, parameters and notebooks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from labkit.cli.methods.method import Family, Method, families
from labkit.cli.methods.places import placed
from labkit.cli.methods.taxonomy import taxonomy
from labkit.cli.methods.trying import sources, trying

_ARXIV = re.compile(r"\barXiv (\d{4}\.\d{4,5})")


def page(notebooks: Path, folder: Path | None = None) -> str:
    """Return the Markdown page of all methods, which links each method to notebooks that use it.

    Args:
        notebooks: Folder of the notebooks that use the methods.
        folder: Folder of the page, to which links to notebooks are relative; default: the
            notebooks' folder.

    Raises:
        InvalidInput: A notebook in the folder cannot be read.
    """
    code = sources(notebooks)
    place = os.path.relpath(notebooks, folder or notebooks)
    lines = [
        "# Methods, papers, parameters, notebooks",
        "",
        "Made from the docstrings by `labkit methods -o notebooks/METHODS.md`.",
        *taxonomy(placed(code), place),
    ]
    for family in families():
        lines += ["", f"## {family.title}", "", family.question, ""]
        tried = {m.name: trying(family, m, code) for m in family.methods()}
        lines += _table(family, tried, place)
        for method in family.methods():
            lines += ["", *_details(method)]
    return "\n".join(lines) + "\n"


def _table(family: Family, tried: Mapping[str, Sequence[Path]], place: str) -> Iterator[str]:
    yield "| method | paper | parameters | notebooks |"
    yield "|---|---|---|---|"
    for method in family.methods():
        names = ", ".join(f"`{parameter.name}`" for parameter in method.parameters)
        # Links are relative to the page, so that the folder with page and notebooks can be moved.
        links = [(path.stem, Path(place, path.name).as_posix()) for path in tried[method.name]]
        paths = ", ".join(f"[{name}]({link})" for name, link in links)
        yield f"| {method.name} | {method.cited} | {names or 'none'} | {paths or 'none yet'} |"


def _details(method: Method) -> Iterator[str]:
    yield f"### {method.name}"
    yield ""
    yield f"`{method.expression}`"
    yield ""
    yield method.summary
    yield ""
    for parameter in method.parameters:
        default = f" = {parameter.default}" if parameter.default else ""
        yield f"- `{parameter.name}{default}`: {parameter.help}"
    if method.axes:
        places = {axis: _either([*where]) for axis, where in method.axes.items()}
        yield f"- {'; '.join(f'{axis}: {where}' for axis, where in places.items())}"
    source = _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", method.source)
    yield f"- Source: {source}"
    if method.differs:
        yield f"- Differs from it: {method.differs}"


def _either(places: Sequence[str]) -> str:
    """Return names as text, such as `synchronous` or `none, quantization or sparsification`."""
    *first, last = places
    return f"{', '.join(first)} or {last}" if first else last
