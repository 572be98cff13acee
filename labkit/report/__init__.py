"""Reports of runs: one HTML file for offline use, with figures and commands that repeat runs."""

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
from labkit.figures import compression_stats, has_grid, search_history, summarize_comparison
from labkit.figures.kit.entries import RunEntry, clock_and_network, settings
from labkit.figures.runs.comparison import sheets
from labkit.figures.runs.parameter_effects import heat_sheet, parallel_sheet
from labkit.figures.runs.scatter_plot import pareto_sheet
from labkit.records import store
from labkit.records.analysis.curves import folders, search_results
from labkit.records.run import Run, flatten, load_runs
from labkit.records.verdict import completed_seeds
from labkit.report.embed import data_html, figure_html, policy, scripts, sheet_html, tables
from labkit.report.inert import render
from labkit.report.jobs import command, commands, jobs_without_runs, notebooks
from labkit.report.runs_table import table_of

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

Runs = Iterable[Run | Path | str] | Run | Path | str


def report(
    runs: Runs, path: Path | str = "report.html", notebook: Path | str | None = None
) -> Path:
    """Write a report of runs as one HTML file, which needs no other files and no network.

    If a folder contains a notebook job but no runs, the report shows the notebook of this job.

    Args:
        runs: One or several runs or folders of runs.
        path: HTML file to be written.
        notebook: Executed notebook that the report shows; by default, the notebook of the job that
            contains all runs. If the runs belong to several jobs, each notebook appears once,
            without outputs.

    Raises:
        LabkitError: If there are neither runs nor a notebook, or if the notebook cannot be read.
    """
    run_list = _runs(runs)
    if not run_list:
        return _without_runs(runs, Path(path), notebook)
    executed = {Path(notebook): True} if notebook is not None else notebooks(run_list)
    notebook_pages = _shown(executed, notebook is not None)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return store.write_atomically(path, _page(run_list, executed, notebook_pages))


def _without_runs(runs: Runs, path: Path, notebook: Path | str | None) -> Path:
    """Write a report of jobs without runs: their notebooks, and commands to rerun them."""
    items = [runs] if isinstance(runs, Run | Path | str) else list(runs)
    jobs = jobs_without_runs([Path(item) for item in items if not isinstance(item, Run)])
    paths = [Path(notebook)] if notebook is not None else [job / "output.ipynb" for job in jobs]
    if not paths:
        raise LabkitError(
            "no runs to report; give runs, or a folder that contains runs (usually runs/)"
        )
    lines = [line for job in jobs if (line := command(job))]
    return notebook_page(paths, path, lines, links=notebook is not None)


def notebook_page(
    executed: Sequence[Path],
    path: Path,
    commands: Sequence[str],
    about: str = "without runs",
    links: bool = False,
) -> Path:
    """Write executed notebooks as one HTML page, with commands that rerun them.

    Args:
        executed: Paths of the executed notebooks.
        path: HTML file to be written.
        commands: Shell commands that rerun the notebooks.
        about: Remark for the header of the page, for example the state of the job.
        links: Whether to follow symbolic links, which is safe only if the user has named the paths.

    Raises:
        LabkitError: If a notebook cannot be read.
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
        notebooks=[render(notebook, True, links) for notebook in executed],
        commands=commands,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return store.write_atomically(path, page)


def _runs(runs: Runs) -> list[Run]:
    items = [runs] if isinstance(runs, Run | Path | str) else list(runs)
    run_list = [
        run for item in items for run in ([item] if isinstance(item, Run) else load_runs(item))
    ]
    # Duplicate runs are removed, because a caller may pass a run, and also a folder that contains
    # it.
    return list(dict.fromkeys(run_list))


def _shown(executed: Mapping[Path, bool], is_named: bool) -> list[str]:
    """Return notebooks as HTML, and skip invalid notebooks that the user did not name."""
    pages = []
    for path, outputs in executed.items():
        try:
            pages.append(render(path, outputs, links=is_named))
        except LabkitError as error:
            if is_named:
                raise
            warnings.warn(f"left out: {error}", stacklevel=3)
    return pages


def _page(runs: Sequence[Run], executed: Mapping[Path, bool], notebooks: Sequence[str]) -> str:
    from jinja2 import Environment, PackageLoader

    entries = settings(runs)
    table = table_of(entries)
    code = scripts()
    module, styles = tables() if len(entries) > 1 else ("", "")
    # Jinja escapes HTML, because the names of runs and notebooks come from untrusted sources.
    environment = Environment(
        loader=PackageLoader("labkit.report", "."), autoescape=True, trim_blocks=True
    )
    shared = _shared(runs)
    return environment.get_template("page.html").render(
        title=_title(runs, executed),
        subtitle=f"{plural(len(runs), 'run')} · {clock_and_network(entries)}",
        date=datetime.now(UTC).date().isoformat(),
        policy=policy([*code, module]),
        style=styles + Path(__file__).with_name("page.css").read_text(),
        scripts=code,
        module=module,
        reading=_sentences(runs),
        figures=_figures(runs, entries),
        table=table,
        dashes=_DASHES,
        sends=any(entry.metrics.get("wire_bytes_per_step") for entry in entries),
        known=data_html(table.filter_data(), id="known"),
        shared=shared,
        whole=all(executed.values()),
        notebooks=notebooks,
        commands=commands(runs),
        details=[_details(entry, shared if len(runs) > 1 else {}) for entry in entries],
        environments=_environments(entries),
    )


def _figures(runs: Sequence[Run], entries: Sequence[RunEntry]) -> list[dict[str, str]]:
    """Return the HTML of all figures for which the runs have data, each with a heading."""
    with_metrics = [entry for entry in entries if entry.metrics]
    drawn = list(zip(("Learning", "Speed"), sheets(entries), strict=True))
    if any(entry.metrics.get("test_accuracy") is not None for entry in entries):
        drawn.append(("Accuracy, bytes and seconds", pareto_sheet(entries)))
    if len(with_metrics) > 1:
        drawn.append(("Parameters and results", parallel_sheet(with_metrics)))
    if with_metrics and has_grid([entry.run for entry in with_metrics]):
        drawn.append(("Two parameters", heat_sheet(with_metrics)))
    figures = [{"heading": heading, "html": sheet_html(sheet)} for heading, sheet in drawn]
    whole_figures = [("Search", figure) for figure in _searches(runs)]
    measured_runs = (
        run for run in runs if any(len(path.compression_stats) for path in completed_seeds(run))
    )
    # The report draws compression statistics only for the first four runs that have them. A figure
    # of compression statistics has five panels. A browser cannot open a page with fifty figures of
    # five panels.
    whole_figures += [
        ("Compression statistics", compression_stats(run)) for run in islice(measured_runs, 4)
    ]
    return figures + [
        {"heading": heading, "html": figure_html(json.loads(figure.to_json()))}
        for heading, figure in whole_figures
    ]


def _searches(runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield one figure per hyperparameter search, and warn if Optuna's journal cannot be read."""
    for folder in folders(runs):
        try:
            yield from map(search_history, search_results(folder))
        except LabkitError as error:
            warnings.warn(f"left out: {error}", stacklevel=3)


def _sentences(runs: Sequence[Run]) -> list[list[tuple[str, bool]]]:
    """Return the lines of a summary of runs, each as a list of (text, whether it is bold)."""
    lines = [line.removeprefix("- ") for line in summarize_comparison(runs).splitlines()]
    return [
        [(scrub(part), bool(index % 2)) for index, part in enumerate(line.split("**"))]
        for line in lines
    ]


def _title(runs: Sequence[Run], executed: Mapping[Path, bool]) -> str:
    with_outputs = [path for path, outputs in executed.items() if outputs]
    if with_outputs:
        job = with_outputs[0].parent
        name = job.parent.name if (job / "params.yaml").exists() else with_outputs[0].stem
        return scrub(name).replace("_", " ")
    return scrub(runs[0].name) if len(runs) == 1 else f"Comparison of {plural(len(runs), 'run')}"


def _shared(runs: Sequence[Run]) -> dict[str, str]:
    """Return a dict of the parameters with the same value in all runs, with the values as text."""
    rows = [flatten(run.experiment) for run in runs]
    common = {k: v for k, v in rows[0].items() if all(k in row and row[k] == v for row in rows)}
    return {key: _parameter(value) for key, value in common.items()}


# The dict `_DASHES` maps Plotly's dash styles to CSS border styles.
_DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "double"}


def _details(entry: RunEntry, shared: Mapping[str, str]) -> dict[str, JSON]:
    """Return the parameters that distinguish the runs of a table row, and how these runs ended."""
    own_parameters = {
        k: _parameter(v) for k, v in flatten(entry.run.experiment).items() if k not in shared
    }
    return {
        "label": entry.label,
        "lines": [_ended(run) for run in entry.members],
        "parameters": {
            k: v for k, v in own_parameters.items() if k != "seed" or len(entry.members) == 1
        },
    }


def _ended(run: Run) -> str:
    """Return a line with a run's end, its cause, and the reason for the equivalence verdict."""
    status, equivalence = run.status, run.metrics.get("equivalence") or {}
    started = str(status.get("started") or "—")[:19].replace("T", " ")
    cause = f": {status['cause']}" if status.get("cause") else ""
    reason = f" · equivalence check: {equivalence['reason']}" if equivalence.get("reason") else ""
    seed = f"seed {run.experiment.get('seed')}"
    return scrub(f"{run.name} · {seed} · {status['state']}{cause} · started {started} UTC{reason}")


def _parameter(value: JSON) -> str:
    return "none" if value is None else scrub(str(value))


def _environments(entries: Sequence[RunEntry]) -> list[dict[str, JSON]]:
    """Return each distinct environment (machine and software) with the labels of its runs."""
    labels: dict[str, list[str]] = {}
    for entry in entries:
        record = {k: _parameter(v) for k, v in flatten(entry.run.environment).items()}
        if record:
            # Environments are grouped by their JSON text, because a dict cannot be a key.
            labels.setdefault(json.dumps(record), []).append(entry.label)
    return [{"labels": _some(names), "values": json.loads(text)} for text, names in labels.items()]


def _some(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return f"{'; '.join(labels[:3])}{more}"
