"""Notebooks executed, a page each, and an index of their questions, pictures and answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.privacy import scrub
from labkit.common.units import duration_text
from labkit.gallery.execution import GallerySpec, execute_all, latest
from labkit.gallery.index_entry import IndexEntry
from labkit.jobs.listing import elapsed
from labkit.jobs.notebook import JobResult
from labkit.records import store
from labkit.report import embed, notebook_page
from labkit.report.embed import figure_html, policy, scripts
from labkit.report.jobs import command

RUNS = "runs"  # the folder of the site in which jobs lie


def gallery(
    notebooks: Sequence[Path],
    site: Path,
    jobs: int = 1,
    tell: Callable[[str], None] = print,
    others: Sequence[Path] = (),
) -> list[JobResult]:
    """Execute notebooks with their defaults and write the site; what has completed is kept.

    The site is whole after each notebook, failed ones are in it, and it asks no host for anything.

    Args:
        notebooks: .ipynb files.
        site: the folder.
        jobs: so many at a time.
        tell: is told what happens.
        others: notebooks that stay in the index where they have been executed before.
    """
    before = [(path, latest(path, site / RUNS)) for path in others if path not in notebooks]
    ended = {path: result for path, result in before if result is not None}
    for each, result in execute_all(
        [GallerySpec(path) for path in notebooks], site / RUNS, jobs, tell
    ):
        ended[each.notebook] = result
        write_page(result, site / f"{each.notebook.stem}.html")
        write_index(sorted(ended.items()), site)
    return [ended[path] for path in notebooks]


def chosen(folder: Path, only: str) -> list[Path]:
    """The notebooks of a folder, or those that are named.

    Args:
        folder: with .ipynb files.
        only: names without ending, separated by commas; all where it is empty.

    Raises:
        InvalidInput: there are none, or not one of this name.
    """
    found = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    names = [name.strip() for name in only.split(",") if name.strip()] or list(found)
    missing = [name for name in names if name not in found]
    if missing or not names:
        raise InvalidInput(
            f"no notebook {', '.join(missing) or '*.ipynb'} in {folder}; there are: "
            f"{', '.join(found) or 'none'}"
        )
    return [found[name] for name in names]


def write_page(result: JobResult, path: Path) -> None:
    """The page of one notebook: what its job gave, and how it ended."""
    executed = result.path / "output.ipynb"
    if executed.exists():
        about = result.state + (f": {result.cause}" if result.cause else "")
        try:
            notebook_page([executed], path, [command(result.path)], about)
        except LabkitError as error:  # the index has its answer all the same
            warnings.warn(f"no page of {result.path.name}: {error}", stacklevel=2)
            path.unlink(missing_ok=True)
    else:  # it was refused before anything ran: the index says why
        path.unlink(missing_ok=True)


def write_index(ended: Sequence[tuple[Path, JobResult]], site: Path) -> None:
    """The index over notebooks and how they ended."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader

    code = scripts()
    # The head is that of a report.
    places = [PackageLoader(f"labkit.{room}", ".") for room in ("gallery", "report")]
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
    took = _took(result.path)
    return {
        "name": notebook.stem,
        "page": page.name if page.exists() else None,
        "question": scrub(shown.question),
        "answer": [(scrub(part), bool(n % 2)) for n, part in enumerate(shown.answer.split("**"))],
        "picture": figure_html(shown.picture) if shown.picture else "",
        "failed": "" if result.state == "completed" else scrub(f"{result.state}: {result.cause}"),
        "took": "" if took is None else duration_text(took),
    }


def _took(job: Path) -> float | None:
    """Return how long a job took, s; None where its record does not say."""
    try:
        return elapsed(store.read_status(job))
    except LabkitError:  # `labkit ls` says what is wrong with it
        return None
