"""One HTML file that a colleague opens offline: the runs, their figures, how to make them again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.common.units import plural
from labkit.figures import comparison_reading, has_grid, microscope, search_history
from labkit.figures.kit.entries import Entry, clock_and_network, settings
from labkit.figures.runs.comparison import sheets
from labkit.figures.runs.heat import heat_sheet
from labkit.figures.runs.parallel import parallel_sheet
from labkit.figures.runs.pareto import pareto_sheet
from labkit.records import store
from labkit.records.analysis.search_results import folders, searched
from labkit.records.run import Run, flatten, load_runs
from labkit.records.verdict import seeds_of
from labkit.report.embed import data_html, figure_html, policy, scripts, sheet_html, tables
from labkit.report.inert import render
from labkit.report.jobs import command, commands, notebooks, without_runs
from labkit.report.table import table_of

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

Runs = Iterable[Run | Path | str] | Run | Path | str


def report(
    runs: Runs, path: Path | str = "report.html", notebook: Path | str | None = None
) -> Path:
    """Write the report of some runs; the file needs no other and asks no host for anything.

    Args: runs, a list of Run, a folder of runs, or several; path, the file to write; notebook, an
    executed notebook to show (by default that of the job in which all of the runs lie; where they
    lie in several, each notebook once, without the outputs of any).

    A job that has trained nothing makes a page of its notebook.

    Raises: LabkitError where there is neither, or the notebook cannot be read.
    """
    found = _runs(runs)
    if not found:
        return _without_runs(runs, Path(path), notebook)
    executed = {Path(notebook): True} if notebook is not None else notebooks(found)
    shown = _shown(executed, notebook is not None)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return store.write_atomically(path, _page(found, executed, shown))


def _without_runs(runs: Runs, path: Path, notebook: Path | str | None) -> Path:
    """The report of notebooks that trained nothing: what they show, and how to make it again."""
    given = [runs] if isinstance(runs, Run | Path | str) else list(runs)
    jobs = without_runs([Path(each) for each in given if not isinstance(each, Run)])
    shown = [Path(notebook)] if notebook is not None else [job / "output.ipynb" for job in jobs]
    if not shown:
        raise LabkitError("no runs to report: give runs, or a folder that has some (usually runs/)")
    lines = [line for job in jobs if (line := command(job))]
    return notebook_page(shown, path, lines, links=notebook is not None)


def notebook_page(
    executed: Sequence[Path],
    path: Path,
    commands: Sequence[str],
    about: str = "without runs",
    links: bool = False,
) -> Path:
    """Write executed notebooks as one page, with what makes them again.

    Args: executed, the notebooks; path, the file to write; commands, lines for a shell; about, what
    there is to say of them; links, whether to follow them, as of paths that the user names.

    Raises: LabkitError, where one cannot be read.
    """
    from jinja2 import Environment, PackageLoader

    code = scripts()
    environment = Environment(
        loader=PackageLoader("labkit.report", "."), autoescape=True, trim_blocks=True
    )
    page = environment.get_template("notebooks.html").render(
        title=_title([], dict.fromkeys(executed, True)),
        about=scrub(about),
        date=datetime.now(UTC).date().isoformat(),
        policy=policy(code),
        style=Path(__file__).with_name("page.css").read_text(),
        scripts=code,
        notebooks=[render(each, True, links) for each in executed],
        commands=commands,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return store.write_atomically(path, page)


def _runs(runs: Runs) -> list[Run]:
    items = [runs] if isinstance(runs, Run | Path | str) else list(runs)
    found = [
        run for item in items for run in ([item] if isinstance(item, Run) else load_runs(item))
    ]
    # Each once: a run may be given, and lie in a folder that is given, too.
    return list(dict.fromkeys(found))


def _shown(executed: Mapping[Path, bool], named: bool) -> list[str]:
    """Return the HTML of notebooks; warn of an odd one that nobody has named, and go on."""
    found = []
    for path, outputs in executed.items():
        try:
            found.append(render(path, outputs, links=named))
        except LabkitError as error:
            if named:
                raise
            warnings.warn(f"left out: {error}", stacklevel=3)
    return found


def _page(runs: Sequence[Run], executed: Mapping[Path, bool], notebooks: Sequence[str]) -> str:
    from jinja2 import Environment, PackageLoader

    shown = settings(runs)
    table = table_of(shown)
    code = scripts()
    module, styles = tables() if len(shown) > 1 else ("", "")
    # With autoescape: names of runs and notebooks are anybody's text.
    environment = Environment(
        loader=PackageLoader("labkit.report", "."), autoescape=True, trim_blocks=True
    )
    shared = _shared(runs)
    return environment.get_template("page.html").render(
        title=_title(runs, executed),
        subtitle=f"{plural(len(runs), 'run')} · {clock_and_network(shown)}",
        date=datetime.now(UTC).date().isoformat(),
        policy=policy([*code, module]),
        style=styles + Path(__file__).with_name("page.css").read_text(),
        scripts=code,
        module=module,
        reading=_sentences(runs),
        figures=_figures(runs, shown),
        table=table,
        dashes=_DASHES,
        sends=any(entry.metrics.get("wire_bytes_per_step") for entry in shown),
        known=data_html(table.known(), id="known"),
        shared=shared,
        whole=all(executed.values()),
        notebooks=notebooks,
        commands=commands(runs),
        details=[_details(entry, shared if len(runs) > 1 else {}) for entry in shown],
        environments=_environments(shown),
    )


def _figures(runs: Sequence[Run], shown: Sequence[Entry]) -> list[dict[str, str]]:
    """The figures that a set of runs has something to show in, each with a heading."""
    done = [entry for entry in shown if entry.metrics]
    drawn = list(zip(("Learning", "Speed"), sheets(shown), strict=True))
    if any(entry.metrics.get("test_accuracy") is not None for entry in shown):
        drawn.append(("Accuracy, bytes and seconds", pareto_sheet(shown)))
    if len(done) > 1:
        drawn.append(("Parameters and results", parallel_sheet(done)))
    if done and has_grid([entry.run for entry in done]):
        drawn.append(("Two parameters", heat_sheet(done)))
    found = [{"heading": heading, "html": sheet_html(sheet)} for heading, sheet in drawn]
    whole = [("Search", figure) for figure in _searches(runs)]
    examined = (run for run in runs if any(len(each.microscope) for each in seeds_of(run)))
    # Four at most: such a figure has five panels, and a page of fifty would not open.
    whole += [("Compression under the microscope", microscope(run)) for run in islice(examined, 4)]
    return found + [
        {"heading": heading, "html": figure_html(json.loads(figure.to_json()))}
        for heading, figure in whole
    ]


def _searches(runs: Sequence[Run]) -> Iterator[Figure]:
    """The figures of searches; warn of one whose journal cannot be read, and go on."""
    for folder in folders(runs):
        try:
            yield search_history(searched(folder))
        except LabkitError as error:
            warnings.warn(f"left out: {error}", stacklevel=3)


def _sentences(runs: Sequence[Run]) -> list[list[tuple[str, bool]]]:
    """The reading as lines of (text, whether it is bold)."""
    lines = [line.removeprefix("- ") for line in comparison_reading(runs).splitlines()]
    return [
        [(scrub(part), bool(place % 2)) for place, part in enumerate(line.split("**"))]
        for line in lines
    ]


def _title(runs: Sequence[Run], executed: Mapping[Path, bool]) -> str:
    whole = [path for path, outputs in executed.items() if outputs]
    if whole:
        job = whole[0].parent
        name = job.parent.name if (job / "params.yaml").exists() else whole[0].stem
        return scrub(name).replace("_", " ")
    return scrub(runs[0].name) if len(runs) == 1 else f"Comparison of {plural(len(runs), 'run')}"


def _shared(runs: Sequence[Run]) -> dict[str, str]:
    """The parameters that all runs have in common, with their values."""
    rows = [flatten(run.experiment) for run in runs]
    same = {k: v for k, v in rows[0].items() if all(k in row and row[k] == v for row in rows)}
    return {key: _parameter(value) for key, value in same.items()}


# How CSS calls the dashes of lines.
_DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "double"}


def _details(entry: Entry, shared: Mapping[str, str]) -> dict[str, JSON]:
    """The parameters of a setting that others do not share, and how each of its runs ended."""
    own = {k: _parameter(v) for k, v in flatten(entry.run.experiment).items() if k not in shared}
    return {
        "label": entry.label,
        "lines": [_ended(run) for run in entry.members],
        "parameters": {k: v for k, v in own.items() if k != "seed" or len(entry.members) == 1},
    }


def _ended(run: Run) -> str:
    """A line of a run: its folder, seed, state and cause, and what its gate said."""
    status, gate = run.status, run.metrics.get("equivalence") or {}
    started = str(status.get("started") or "—")[:19].replace("T", " ")
    cause = f": {status['cause']}" if status.get("cause") else ""
    reason = f" · equivalence gate: {gate['reason']}" if gate.get("reason") else ""
    seed = f"seed {run.experiment.get('seed')}"
    return scrub(f"{run.name} · {seed} · {status['state']}{cause} · started {started} UTC{reason}")


def _parameter(value: JSON) -> str:
    return "none" if value is None else scrub(str(value))


def _environments(shown: Sequence[Entry]) -> list[dict[str, JSON]]:
    """Each distinct environment once, with the runs that ran in it."""
    labels: dict[str, list[str]] = {}
    for entry in shown:
        record = {k: _parameter(v) for k, v in flatten(entry.run.environment).items()}
        if record:
            # By its text, for a mapping has no hash.
            labels.setdefault(json.dumps(record), []).append(entry.label)
    return [{"labels": _some(names), "values": json.loads(text)} for text, names in labels.items()]


def _some(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return f"{'; '.join(labels[:3])}{more}"
