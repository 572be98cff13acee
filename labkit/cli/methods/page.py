"""The Markdown page that lists all methods with papers, parameters and notebooks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from labkit.cli.methods.method import (
    Family,
    Method,
    Placed,
    axes,
    families,
    placed,
    sources,
    trying,
)
from labkit.common.canonical_json import JSON
from labkit.common.nearest import refuse_unknown
from labkit.common.units import plural
from labkit.figures.taxonomy import COLUMNS, ROWS, MethodInCell, Row, empty, grid
from labkit.strategies import AXES

EMPTY = "—"


def taxonomy(every: Sequence[Placed], place: str) -> Iterator[str]:
    """Yield the Markdown lines of the map.

    Args:
        every: All strategies, as the function `placed` returns them.
        place: Path of the notebooks' folder, relative to the page with the map.
    """
    standings = [standing for each in every for standing in each.standings()]
    known = {each.method.name: each for each in every}
    yield from [
        "",
        "## Map of the strategies",
        "",
        "Table rows are architecture and parallelism, and columns are synchronization. "
        "Each entry names a strategy, its paper and the notebook that uses it most. A strategy "
        "is listed in every cell that its fields allow. For an interactive page, run `labkit "
        "methods --map map.html`.",
        "",
    ]
    yield from _by_architecture(standings, known, place)
    yield from ["", "Cells without a method:", ""]
    yield from (f"- {line}" for line in empty(standings))
    yield from [
        "",
        "Table rows are synchronization and compression, and columns are scheduling of "
        "the messages:",
        "",
    ]
    yield from _by_compression(standings)
    yield from [
        "",
        "Values of each axis of the taxonomy, with the methods that have each value:",
        "",
    ]
    for axis, places in axes():
        for name, description, members in places:
            yield f"- {axis}, **{name}**: {description} ({', '.join(members) or 'none'})"


def _by_architecture(
    standings: Iterable[MethodInCell], known: Mapping[str, Placed], place: str
) -> Iterator[str]:
    cells = grid(standings)
    yield from _head("architecture × parallelism", COLUMNS)
    for row in ROWS:
        entries = (
            [_entry(known[name], place) for name in cells[row, column]] for column in COLUMNS
        )
        yield _row(" × ".join(row), entries)


def _by_compression(standings: Sequence[MethodInCell]) -> Iterator[str]:
    columns = list(AXES["scheduling"])
    yield from _head("synchronization × compression", columns)
    for row in product(AXES["synchronization"], AXES["compression"]):
        here = [s for s in standings if (s.cell.synchronization, s.cell.compression) == row]
        entries = (
            dict.fromkeys(_link(s.method) for s in here if s.cell.scheduling == column)
            for column in columns
        )
        yield _row(" × ".join(row), entries)


def _head(corner: str, columns: Sequence[str]) -> Iterator[str]:
    yield f"| {corner} | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"


def _row(head: str, cells: Iterable[Iterable[str]]) -> str:
    return f"| {head} | {' | '.join('<br>'.join(cell) or EMPTY for cell in cells)} |"


def _entry(each: Placed, place: str) -> str:
    """Return a strategy's Markdown entry with links, such as `AllReduce, Vishnu 2016, tour`."""
    first = each.notebooks[:1]  # The first notebook mentions the strategy most often.
    links = [f"[{path.stem}]({Path(place, path.name).as_posix()})" for path in first]
    return ", ".join([_link(each.method.name), each.method.cited, *links])


def _link(name: str) -> str:
    """Return a link to the section about a method on the page of methods."""
    return f"[{name}](#{name.lower()})"


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


def entries(name: str, notebooks: Path) -> str:
    """Return the Markdown entries of all methods whose names contain `name`, in any case.

    Raises:
        InvalidInput: No method has such a name.
    """
    code = sources(notebooks)
    every = [(family, method) for family in families() for method in family.methods()]
    found = [each for each in every if name.lower() in each[1].name.lower()]
    if not found:
        refuse_unknown("NAME", [name], [method.name for _, method in every])
    lines: list[str] = []
    for family, method in found:
        used_by = ", ".join(path.stem for path in trying(family, method, code))
        lines += [*_details(method), f"- Notebooks: {used_by or 'none yet'}", ""]
    return "\n".join(lines[:-1]) + "\n"


def _table(family: Family, tried: Mapping[str, Sequence[Path]], place: str) -> Iterator[str]:
    yield "| method | paper | parameters | notebooks |"
    yield "|---|---|---|---|"
    for method in family.methods():
        names = ", ".join(f"`{parameter.name}`" for parameter in method.parameters)
        # The page uses relative links to notebooks, so that the folder with page and notebooks can
        # be moved.
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
        yield f"- Difference from the paper: {method.differs}"


def _either(places: Sequence[str]) -> str:
    """Return names as text, such as `synchronous` or `none, quantization or sparsification`."""
    *first, last = places
    return f"{', '.join(first)} or {last}" if first else last


TITLE = "Map of labkit's methods"
# The constant MENUS names the axes of the strategy taxonomy that have a menu on the page.
MENUS = ("compression", "scheduling")
# A dictionary of the type `_Here` describes one grid cell. The dictionary maps each method's name
# to the method's entries in the cell.
_Here = Mapping[str, Sequence[MethodInCell]]


def map_page(notebooks: Path, folder: Path) -> str:
    """Return the HTML page with the map of all methods.

    Args:
        notebooks: Folder of the notebooks that use the methods.
        folder: Folder of the page; links to notebooks are relative to this folder.

    Raises:
        InvalidInput: A notebook in the folder cannot be read.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader

    from labkit.figures import taxonomy_map
    from labkit.report import embed
    from labkit.report.embed import data_html, figure_html, policy

    own = Path(__file__).parent
    every = placed(sources(notebooks))
    standings = [standing for each in every for standing in each.standings()]
    laid, code = grid(standings), [*embed.scripts(), (own / "map.js").read_text()]
    filled = sum(map(bool, laid.values()))
    places = [PackageLoader(f"labkit.{room}", ".") for room in ("cli.methods", "report")]
    environment = Environment(loader=ChoiceLoader(places), autoescape=True, trim_blocks=True)
    style = Path(embed.__file__).with_name("page.css").read_text() + (own / "map.css").read_text()
    link = Path(os.path.relpath(notebooks, folder))
    known = axes()
    return environment.get_template("map.html").render(
        title=TITLE,
        count=f"{plural(len(every), 'method')} in {filled} of {plural(len(laid), 'cell')}",
        policy=policy(code),
        style=style,
        scripts=code,
        menus=[(axis, [place for place, *_ in own]) for axis, own in known if axis in MENUS],
        names=figure_html(taxonomy_map(standings).content),
        numbers=figure_html(taxonomy_map(standings, numbers=True).content),
        cells=list(_cells(laid, {each.method.name: each for each in every}, link)),
        empty=empty(standings),
        axes=known,
        data=data_html(_data(laid), id="standings"),
    )


def _cells(
    laid: Mapping[tuple[Row, str], _Here], every: Mapping[str, Placed], link: Path
) -> Iterator[dict[str, object]]:
    for number, ((row, column), methods) in enumerate(laid.items()):
        if methods:
            lines = [_line(every[name], here, link) for name, here in methods.items()]
            yield {"place": number, "title": f"{' × '.join(row)}, {column}", "methods": lines}


def _line(each: Placed, here: Sequence[MethodInCell], link: Path) -> dict[str, object]:
    return {
        "name": each.method.name,
        "papers": each.method.papers,
        "notebooks": [(path.stem, (link / path.name).as_posix()) for path in each.notebooks],
        **{axis: _distinct(here, axis) for axis in MENUS},
    }


def _distinct(here: Sequence[MethodInCell], axis: str) -> str:
    return ", ".join(dict.fromkeys(getattr(each.cell, axis) for each in here))


def _data(laid: Mapping[tuple[Row, str], _Here]) -> JSON:
    """Return the grid's cells with their methods, as data for the script of the page."""
    from labkit.figures.taxonomy import method_text, title

    places: list[JSON] = [
        {"title": title(row, column), "row": " × ".join(row), "column": column}
        for row, column in laid
    ]
    standings: list[JSON] = [
        {
            "method": name,
            "place": number,
            "said": method_text(here),
            "at": [[getattr(each.cell, axis) for axis in MENUS] for each in here],
        }
        for number, methods in enumerate(laid.values())
        for name, here in methods.items()
    ]
    return {"columns": list(COLUMNS), "places": places, "standings": standings}
