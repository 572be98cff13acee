"""A site of executed notebooks: a page per notebook, and an index of questions and answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.privacy import scrub
from labkit.common.units import duration_text
from labkit.jobs.gallery.index_entry import GallerySpec, IndexEntry, execute_all, latest_result
from labkit.jobs.listing import elapsed
from labkit.jobs.notebook import JobResult
from labkit.records import store
from labkit.report import embed, notebook_page
from labkit.report.embed import figure_html, policy, scripts
from labkit.report.jobs import command

RUNS = "runs"  # The gallery stores all notebook jobs in the site's folder `runs`.


def gallery(
    notebooks: Sequence[Path],
    site: Path,
    jobs: int = 1,
    tell: Callable[[str], None] = print,
    more_notebooks: Sequence[Path] = (),
) -> list[JobResult]:
    """Execute notebooks with default parameters and write a site; reuse completed results.

    The site is usable after each executed notebook, not only at the end. The site includes failed
    notebooks, and makes no network requests.

    Args:
        notebooks: Notebook files (.ipynb).
        site: Folder to which the site is written.
        jobs: Greatest number of notebooks that run at the same time.
        tell: Function that is called with the text of each progress line.
        more_notebooks: Further notebooks, which are not executed; the index shows the results of
            their earlier jobs.

    Returns:
        The result of each notebook, in the order of `notebooks`.
    """
    before = [
        (path, latest_result(path, site / RUNS)) for path in more_notebooks if path not in notebooks
    ]
    ended = {path: result for path, result in before if result is not None}
    for spec, result in execute_all(
        [GallerySpec(path) for path in notebooks], site / RUNS, jobs, tell
    ):
        ended[spec.notebook] = result
        write_page(result, site / f"{spec.notebook.stem}.html")
        write_index(sorted(ended.items()), site)
    return [ended[path] for path in notebooks]


def select_notebooks(folder: Path, only: str) -> list[Path]:
    """Return the paths of all notebooks in a folder, or only of the notebooks named by `only`.

    Args:
        folder: Folder with notebook files (.ipynb).
        only: Names of notebooks without file ending, separated by commas; "" selects all.

    Raises:
        InvalidInput: The folder contains no notebooks, or a name in `only` has no notebook.
    """
    paths = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    names = [name.strip() for name in only.split(",") if name.strip()] or list(paths)
    missing = [name for name in names if name not in paths]
    if missing or not names:
        raise InvalidInput(
            f"{folder} has no notebook {', '.join(missing) or '*.ipynb'}; its notebooks: "
            f"{', '.join(paths) or 'none (labkit examples notebooks copies those of labkit)'}"
        )
    return [paths[name] for name in names]


def write_page(result: JobResult, path: Path) -> None:
    """Write the page of one notebook: the outputs of its job, and the job's final state."""
    executed = result.path / "output.ipynb"
    if executed.exists():
        about = result.state + (f": {result.cause}" if result.cause else "")
        try:
            notebook_page([executed], path, [command(result.path)], about)
        except LabkitError as error:  # without a page, the index still shows the notebook's answer
            warnings.warn(f"no page of {result.path.name}: {error}", stacklevel=2)
            path.unlink(missing_ok=True)
    else:  # A job without output did not start; the gallery's index states the reason.
        path.unlink(missing_ok=True)


def write_index(ended: Sequence[tuple[Path, JobResult]], site: Path) -> None:
    """Write the index page of the site, with each notebook's answer and final state."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader

    code = scripts()
    # The index template includes the HTML head of reports, so templates come from the packages
    # `jobs.gallery` and `report`.
    places = [PackageLoader(f"labkit.{package}", ".") for package in ("jobs.gallery", "report")]
    environment = Environment(loader=ChoiceLoader(places), autoescape=True, trim_blocks=True)
    style = Path(embed.__file__).with_name("page.css").read_text()
    page = environment.get_template("index.html").render(
        title="Questions and answers",
        date=datetime.now(UTC).date().isoformat(),
        policy=policy(code),
        style=style + Path(__file__).with_name("index.css").read_text(),
        scripts=code,
        entries=[_entry(notebook, result, site) for notebook, result in ended],
    )
    store.write_atomically(site / "index.html", page)


def _entry(notebook: Path, result: JobResult, site: Path) -> dict[str, object]:
    shown = IndexEntry.of(notebook, result.path / "output.ipynb")
    page = site / f"{notebook.stem}.html"
    duration = _duration(result.path)
    return {
        "name": notebook.stem,
        "page": page.name if page.exists() else None,
        "question": scrub(shown.question),
        "answer": [(scrub(part), bool(n % 2)) for n, part in enumerate(shown.answer.split("**"))],
        "picture": figure_html(shown.picture) if shown.picture else "",
        "failed": "" if result.state == "completed" else scrub(f"{result.state}: {result.cause}"),
        "took": "" if duration is None else duration_text(duration),
    }


def _duration(job: Path) -> float | None:
    """Return the duration of a job in seconds; None if its record is unreadable."""
    try:
        return elapsed(store.read_status(job))
    except LabkitError:  # the command `labkit ls` reports damaged records
        return None
