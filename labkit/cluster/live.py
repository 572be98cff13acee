"""Live: an experiment while it runs: its rows as they come, its end, and what is kept of it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from labkit import store
from labkit.cluster.calls import PATIENCE, Calls, Ranks
from labkit.cluster.progress import progress
from labkit.experiment import Experiment
from labkit.measure import summarise
from labkit.privacy import scrub
from labkit.run import Run
from labkit.worker import work

Rows = list[dict[str, float]]


class Live:
    """A running experiment; made by `Cluster.submit`.

    Attributes:
        rows: history rows that have come so far, of all ranks.
        directory: its run directory.
    """

    def __init__(self, cluster: Ranks, experiment: Experiment, directory: Path, show: bool) -> None:
        self.experiment, self.directory = experiment, directory
        self.rows: Rows = []
        self._stop = cluster.folder / f"stop-{secrets.token_hex(4)}"
        self._run: Run | None = None
        store.start(directory, experiment.to_json())
        try:
            self._calls = Calls(
                cluster,
                experiment.workers,
                work,
                [experiment],
                network=experiment.network,
                stop=str(self._stop),
            )
        except BaseException as error:  # such as a callable that cannot travel
            store.fail(directory, f"{type(error).__name__}: {error}")
            raise
        self._shown = progress(experiment) if show else None

    def stop(self) -> None:
        """Ask the ranks to end training after the same step; the run is kept as interrupted."""
        self._stop.touch()

    def done(self) -> bool:
        """Whether the ranks have ended."""
        return self._calls.done()

    def update(self) -> Rows:
        """Take in the rows that have come since the last call, and return them."""
        fresh = list(self._calls.published())
        self.rows += fresh
        return fresh

    def result(self) -> Run:
        """Wait for the end; write the record and return it.

        An interrupt (Ctrl-C, the notebook's stop button) stops the ranks and keeps what they did.

        Raises:
            RankError: a rank failed; the record keeps its cause and its output.
        """
        if self._run is not None:
            return self._run
        try:
            for _ in self._calls.watch():
                self._show()
            self._show()
            self._write(interrupted=False)
        except KeyboardInterrupt:
            self.stop()
            self._calls.wait(PATIENCE)
            self._write(interrupted=True)
            raise
        except BaseException as error:
            self._write_logs()
            store.fail(self.directory, str(error), getattr(error, "rank", None))
            raise
        finally:
            self._close()
        self._run = Run(self.directory)
        return self._run

    def _show(self) -> None:
        fresh = self.update()
        if fresh and self._shown:
            self._shown.update(fresh)

    def _write(self, interrupted: bool) -> None:
        self._write_logs()
        results = self._calls.results()
        if results is None:
            store.interrupt(self.directory, "interrupted before the ranks had a result")
            return
        first: dict[str, Any] = results[0]
        rows = [row | {"seed": self.experiment.seed} for part in results for row in part["rows"]]
        rows.sort(key=lambda row: (row["step"], row["rank"]))
        store.write_json(self.directory / "environment.json", first["environment"])
        store.write_table(self.directory / "timeline.parquet", _timeline(results))
        looks = [row for part in results for row in part["microscope"]]
        store.write_table(self.directory / "microscope.parquet", looks)
        layers = [{"rank": k} | row for k, part in enumerate(results) for row in part["layers"]]
        store.write_table(self.directory / "layers.parquet", layers)
        first["memory_by_rank"] = [
            {"rank": rank} | part["parts"] for rank, part in enumerate(results)
        ]
        first["memory"] = _most([part["memory"] for part in results])
        store.finish(self.directory, summarise(self.experiment, rows, first), rows, first["model"])
        if interrupted or first["stopped"]:
            store.interrupt(
                self.directory, f"stopped by the user after {rows[-1]['step'] + 1} steps"
            )

    def _write_logs(self) -> None:
        folder = self.directory / "logs"
        folder.mkdir(exist_ok=True)
        for rank, output in enumerate(self._calls.outputs()):
            store.write_atomically(folder / f"rank{rank}.log", scrub(output))

    def _close(self) -> None:
        self._calls.close()
        self._stop.unlink(missing_ok=True)
        if self._shown:
            self._shown.close()


def _most(memories: list[dict[str, int]]) -> dict[str, int]:
    """The bytes of the rank that needs most, of each kind."""
    return {kind: max(memory[kind] for memory in memories) for kind in memories[0]}


def _timeline(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events of all ranks as rows, from the begin of the first on."""
    events = [(rank, *event) for rank, part in enumerate(results) for event in part["timeline"]]
    begin = min((event[4] for event in events), default=0.0)
    names = ("rank", "kind", "step", "bucket", "start", "stop")
    return [
        dict(zip(names, (*event[:4], event[4] - begin, event[5] - begin), strict=True))
        for event in events
    ]
