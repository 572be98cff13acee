"""Notebooks executed side by side, each once: what has completed is not executed again."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.jobs import parameters
from labkit.jobs.notebook import Job, JobResult, start
from labkit.jobs.sweep.plan import Member, Plan
from labkit.records import store
from labkit.records.endings import by_whom

MADE_FROM = "made-from.json"  # in a job's folder: the hash of the code and values that it ran
LOOK_EVERY = 0.1  # seconds
LONGEST = 100  # characters of values in a line that names them


@dataclass(frozen=True, eq=False)
class GallerySpec:
    """A notebook, and the values that its parameters get."""

    notebook: Path
    values: parameters.Values = field(default_factory=dict)

    @property
    def reads(self) -> bool:
        """Whether it reads runs instead of making some: it has a parameter `runs`."""
        return "runs" in parameters.declared(self.notebook)

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.values.items())
        said = said if len(said) <= LONGEST else f"{said[:LONGEST]}…"
        return f"{self.notebook.stem} ({said})" if said else self.notebook.stem

    def content(self) -> str:
        """The hash of what its results depend on, labkit's source included."""
        return Plan(self.notebook, []).content(Member("", dict(self.values), 0, 1, 1))

    def kept(self, root: Path) -> JobResult | None:
        """The last job that completed with just this, if there is one."""
        content = self.content()
        done = (each for each in _earlier(self.notebook, root) if each[0].state == "completed")
        return next((each for each, made_from in done if made_from == content), None)

    def start(self, root: Path) -> Job:
        """Execute it in a process of its own.

        Raises:
            InvalidInput: its values are refused.
        """
        # Of a notebook that reads runs, those that all the others have made.
        runs = {"runs": [str(root)]} if self.reads else {}
        values = parameters.check(self.notebook, {**runs, **self.values})
        job = start(self.notebook, values, root, shown=False)
        store.write_json(job.path / MADE_FROM, {"content": self.content()})
        return job


def latest(notebook: Path, root: Path) -> JobResult | None:
    """How its last job ended, whatever it computed from; None where it has none."""
    newest = next(_earlier(notebook, root), None)
    return newest[0] if newest else None


def _earlier(notebook: Path, root: Path) -> Iterator[tuple[JobResult, JSON]]:
    """Its jobs, the newest first, and what each was made from; damaged ones are left out."""
    folder = root / store.safe_name(notebook.stem)
    for path in sorted(folder.glob(f"*/{MADE_FROM}"), reverse=True):
        try:
            status, made_from = store.read_status(path.parent), store.read_json(path)
        except LabkitError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
            continue
        ended = JobResult(path.parent, status["state"], status.get("cause"), status.get("rank"))
        yield ended, made_from.get("content")


def execute_all(
    asked: Sequence[GallerySpec], root: Path, jobs: int, tell: Callable[[str], None]
) -> Iterator[tuple[GallerySpec, JobResult]]:
    """Each with its result as it ends; those that read runs come last, and always anew.

    Args:
        asked: what to execute.
        root: folder of all jobs.
        jobs: so many at a time.
        tell: is told what happens.
    """
    waiting = []
    for each in asked:
        kept = None if each.reads else each.kept(root)
        if kept is None:
            waiting.append(each)
        else:
            tell(f"{each}: kept")
            yield each, kept
    for reads in (False, True):
        yield from _abreast([each for each in waiting if each.reads is reads], root, jobs, tell)


def _abreast(
    waiting: list[GallerySpec], root: Path, jobs: int, tell: Callable[[str], None]
) -> Iterator[tuple[GallerySpec, JobResult]]:
    running: dict[GallerySpec, Job] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                each = waiting.pop(0)
                try:
                    running[each] = each.start(root)
                    tell(f"{each}: running")
                except InvalidInput as error:
                    yield each, JobResult(root / "nowhere", "failed", str(error))
            time.sleep(LOOK_EVERY)
            for each in [each for each, job in running.items() if job.done()]:
                result = running.pop(each).result()
                tell(f"{each}: {result.state}{f': {result.cause}' if result.cause else ''}")
                yield each, result
    except KeyboardInterrupt as error:
        for job in running.values():
            job.interrupt(by_whom(error))
        for job in running.values():
            job.result()
        raise
