"""The map of methods as an HTML page that opens offline, with grids, empty cells and axes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from labkit.cli.methods.places import Placed, axes, placed
from labkit.cli.methods.trying import sources
from labkit.common.canonical_json import JSON
from labkit.common.units import plural
from labkit.figures.taxonomy import COLUMNS, MethodInCell, Row, empty, grid

TITLE = "Map of labkit's methods"
MENUS = ("compression", "scheduling")  # axes of the taxonomy that have a menu on the page
# For one cell of the grid, `_Here` maps the name of each method to all entries of the method in the
# cell.
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
    # The page uses the same HTML head and style sheet as reports.
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
