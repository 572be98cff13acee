"""Cluster: starts or attaches to MPI engines, and runs experiments on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from labkit import store
from labkit.cluster.calls import Calls
from labkit.cluster.lease import HOLD, Lease, Lock, hold, locked, wait_until_free
from labkit.cluster.live import Live
from labkit.cluster.prediction import ask, check_rows, together
from labkit.errors import InvalidInput, LabkitError
from labkit.experiment import Experiment, digest
from labkit.network import Network
from labkit.places import fingerprint, runtime_folder
from labkit.run import Run, aggregate
from labkit.strategies import Strategy
from labkit.worker import infer

if TYPE_CHECKING:
    import ipyparallel

START_LIMIT = 180.0  # seconds


class Cluster:
    """MPI ranks in ipyparallel engines, for as long as somebody holds a lease on them.

    A cluster of the same name that is up is attached to; otherwise one is started. It ends when
    the last process that uses it closes it or ends, in whatever way it ends.

    Args:
        workers: ranks.
        threads: TensorFlow's threads in each rank; fixed when an engine starts.
        name: default: one name for each shape, interpreter and version of labkit; members of a
            sweep share one that is theirs.
        limit: seconds after which a rank's wait for another raises an error.

    Raises:
        InvalidInput: a number below 1, or a cluster of this name that is smaller.
        LabkitError: the engines did not start; the message ends with what they said.
    """

    def __init__(
        self, workers: int = 2, threads: int = 1, name: str | None = None, limit: float = 600.0
    ) -> None:
        for field, value in (("workers", workers), ("threads", threads)):
            if not isinstance(value, int) or value < 1:
                raise InvalidInput(f"{field}={value!r} is impossible; give a whole number from 1")
        own = digest([sys.executable, fingerprint()])[:8]
        held = Path(os.environ.get(HOLD, "")).name
        self.name = name or "-".join(filter(None, [f"{workers}x{threads}", own, held]))
        self.workers, self.threads, self.limit = workers, threads, limit
        self.folder = runtime_folder("clusters") / store.safe_name(self.name)
        self._lease: Lease | None = None
        self._client: ipyparallel.Client | None = None
        self.start()

    def start(self) -> None:
        """Attach to the engines, starting them where they are not up."""
        self.folder.mkdir(exist_ok=True, mode=0o700)
        with locked(self.folder / "start.lock"):
            self._lease = Lease(self.folder)
            hold(self.folder)
            try:
                if not self._is_up():
                    self._launch()
                self._check_shape()
                self._connect()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End this process's use of the cluster; the last one to do so ends the engines."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def restart(self) -> None:
        """End the engines, also stuck ones, and start them again at the next use."""
        pid = self.state().get("pid")
        self.close()
        if pid is not None and self._is_up():
            os.kill(pid, signal.SIGTERM)
            wait_until_free(self.folder / "keeper.lock", 30)

    @property
    def client(self) -> ipyparallel.Client:
        """The ipyparallel client; a cluster that has ended is started again."""
        if self._client is None or not self._is_up():
            self.close()
            self.start()
        return self._client

    @property
    def view(self) -> ipyparallel.DirectView:
        """All engines in rank order: `view.apply_sync(f)[k]` is what rank k returned."""
        return self.client.direct_view(self.engines)

    def run(self, experiment: Experiment, show: bool = True) -> Run:
        """Run an experiment to its end and return its record.

        Args:
            experiment: what to run, on at most as many workers as there are ranks.
            show: a progress line in a terminal, a growing figure in JupyterLab.

        Raises:
            InvalidInput: the experiment does not fit this cluster, or its model not its strategy.
            RankError: a rank failed; the record is kept with its cause.
        """
        self._check_fits(experiment)
        if experiment.repeats == 1:
            return self.submit(experiment, show=show).result()
        top = store.new_run_directory(_job_folder(), _directory_name(experiment))
        store.start(top, experiment.to_json())
        try:
            seeds = [
                self._submit(one, partial(_made, top / f"seed{one.seed}"), show).result()
                for one in _one_by_one(experiment)
            ]
        except KeyboardInterrupt:
            store.interrupt(top)
            raise
        except BaseException as error:
            store.fail(top, f"{type(error).__name__}: {error}", getattr(error, "rank", None))
            raise
        store.finish(top, aggregate(seeds), _together(seeds))
        return Run(top)

    def submit(self, experiment: Experiment, show: bool = False) -> Live:
        """Start an experiment and return at once; `result()` waits for it, `stop()` ends it."""
        if experiment.repeats > 1:
            raise InvalidInput(f"repeats={experiment.repeats} wants run(), which waits for all")
        self._check_fits(experiment)
        name = _directory_name(experiment)
        made = partial(store.new_run_directory, _job_folder(), name)
        return self._submit(experiment, made, show)

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int | None = None,
        network: str | Network | None = None,
    ) -> list[Any]:
        """Call `function(communicator, *arguments)` on every rank; a list in rank order.

        Args:
            function: may come from a cell; what it needs is imported inside it.
            arguments: the same on every rank.
            ranks: call it on so many of them; default: all.
            network: a network that the communicator emulates.

        Raises:
            RankError: a rank failed; those that waited for it have ended too.
        """
        count = self.workers if ranks is None else ranks
        if not 1 <= count <= self.workers:
            raise InvalidInput(f"ranks={ranks} is impossible; allowed: 1 to {self.workers}")
        calls = Calls(self, count, function, arguments, network)
        try:
            for _ in calls.watch():
                pass
            return calls.results() or []
        finally:
            calls.close()

    def predict(
        self,
        run: Run | Path | str,
        x: Any,
        strategy: Strategy | str | None = None,
        workers: int | None = None,
        batch_size: int = 256,
    ) -> Any:
        """What a trained model says of rows, computed by ranks together: `run.model().predict(x)`.

        Ranks with the whole model divide the rows. Stages pass them on in micro-batches: each has
        the next one while the one behind works on the last. Slices compute on all rows together.
        Every rank reads the whole model first.

        Args:
            run: a completed run, or a .keras file.
            x: an array (rows, …), or a nest of them; taken in the type of the model's input.
            strategy: how the ranks share the work; None: as in the run's training, for a file
                `AllReduce`.
            workers: ranks; None: as many as the run had where it brings the strategy, else all.
            batch_size: rows that go through the model, or a stage of it, at a time.

        Returns:
            Outputs (rows, …), a NumPy array or a nest of them.

        Raises:
            InvalidInput: the strategy cannot divide this model by so many ranks, or x is not what
                the model takes.
            RankError: a rank failed.
        """
        asked = ask(run, strategy, workers, self.workers)
        check_rows(x, batch_size)
        arguments = (asked.file, asked.strategy, x, batch_size)
        return together(self.call(infer, *arguments, ranks=asked.workers))

    def _submit(self, experiment: Experiment, directory: Callable[[], Path], show: bool) -> Live:
        if isinstance(experiment.dataset, str):
            from labkit import datasets

            datasets.ensure(experiment.dataset)
        return Live(self, experiment, directory(), show=show)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "up" if self._client is not None else "closed"
        return f"<Cluster {self.name}: {self.workers} ranks of {self.threads} threads, {state}>"

    # --- starting ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the cluster's keeper says: its state, a message, workers, threads."""
        path = self.folder / "cluster.json"
        return store.read_json(path) if path.exists() else {"state": "ended", "message": ""}

    def _is_up(self) -> bool:
        lock = Lock(self.folder / "keeper.lock")
        try:
            return lock.is_held() and self.state()["state"] == "ready"
        finally:
            lock.release()

    def _launch(self) -> None:
        # A keeper that is just ending must be through before its place is taken.
        if not wait_until_free(self.folder / "keeper.lock", 30):
            raise LabkitError(f"cluster {self.name!r} is ending but does not end")
        (self.folder / "cluster.json").unlink(missing_ok=True)
        with (self.folder / "keeper.log").open("wb") as log:
            keeper = subprocess.Popen(
                [
                    *(sys.executable, "-m", "labkit.cluster.keeper", str(self.folder)),
                    *(str(self.workers), str(self.threads)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal is not meant for the engines
            )
        begin, shown = time.monotonic(), _Ticker(f"starting {self.workers} MPI engines")
        while (state := self.state())["state"] != "ready":
            shown.tick()
            if keeper.poll() is not None or time.monotonic() - begin > START_LIMIT:
                raise LabkitError(
                    "the engines did not start: "
                    f"{state['message'] or _last_line(self.folder / 'keeper.log')}"
                )
            time.sleep(0.05)
        shown.done()

    def _connect(self) -> None:
        import ipyparallel as ipp

        file = self.folder / "profile" / "security" / "ipcontroller-labkit-client.json"
        self._client = ipp.Client(str(file))
        self._client.wait_for_engines(self.workers, interactive=False, timeout=30)
        self._order: list[int] | None = None
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
            view = self._client.direct_view(self.engines)
            view.block = True
            view.activate()  # %%px runs on all ranks, in rank order

    @property
    def engines(self) -> list[int]:
        """Engine ids in rank order."""
        client = self.client
        if self._order is None:
            ranks = client[:].apply_sync(_world_rank)
            self._order = [engine for _, engine in sorted(zip(ranks, client.ids, strict=True))]
        return self._order

    def _check_shape(self) -> None:
        state = self.state()
        for field in ("workers", "threads"):
            up, wanted = state[field], getattr(self, field)
            if up < wanted or (field == "threads" and up != wanted):
                raise InvalidInput(
                    f"cluster {self.name!r} is up with {field}={up}, {wanted} are asked for; "
                    "give another name, or close that one"
                )

    def _check_fits(self, experiment: Experiment) -> None:
        if experiment.workers > self.workers:
            raise InvalidInput(
                f"workers={experiment.workers} on a cluster of {self.workers}; "
                f"use Cluster(workers={experiment.workers})"
            )
        if experiment.threads != self.threads:
            raise InvalidInput(
                f"threads={experiment.threads} on a cluster whose engines have {self.threads}; "
                f"TensorFlow fixes them at its start: use Cluster(threads={experiment.threads})"
            )


def run(experiment: Experiment, show: bool = True) -> Run:
    """Run an experiment on a cluster of its own shape, started for it or already up."""
    with Cluster(workers=experiment.workers, threads=experiment.threads) as cluster:
        return cluster.run(experiment, show=show)


def predict(run: Run, x: Any, strategy: Strategy | str | None = None, batch_size: int = 256) -> Any:
    """What a run's model says of rows, on a cluster of its shape; see `Cluster.predict`."""
    workers, threads = run.experiment["workers"], run.experiment["threads"]
    with Cluster(workers=workers, threads=threads) as cluster:
        return cluster.predict(run, x, strategy, workers, batch_size)


def leftovers() -> list[str]:
    """Names of clusters on this machine whose keeper runs."""
    found = []
    for folder in sorted(runtime_folder("clusters").glob("*")):
        lock = Lock(folder / "keeper.lock")
        if lock.is_held():
            found.append(folder.name)
        lock.release()
    return found


class _Ticker:
    """Says what is going on while nothing else does: to a person, not into a file."""

    def __init__(self, what: str) -> None:
        self.what, self.begin = what, time.monotonic()
        self.visible = sys.stderr.isatty()

    def tick(self) -> None:
        if self.visible:
            seconds = time.monotonic() - self.begin
            print(f"\r{self.what} … {seconds:.0f} s ", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        seconds = time.monotonic() - self.begin
        lead = "\r" if self.visible else ""
        print(f"{lead}{self.what}: ready after {seconds:.1f} s", file=sys.stderr, flush=True)


def _world_rank() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.rank)


def _directory_name(experiment: Experiment) -> str:
    return f"{experiment.label}-{experiment.hash8}"


def _job_folder() -> Path:
    """Where this process's runs go: its job's folder, else the interactive ones."""
    interactive = Path(os.environ.get("LABKIT_RUNS", "runs")) / "interactive"
    folder = Path(os.environ.get("LABKIT_JOB", interactive))
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()  # a Run is found also when the notebook has changed its folder


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _one_by_one(experiment: Experiment) -> Sequence[Experiment]:
    return [
        experiment.replace(repeats=1, seed=experiment.seed + k) for k in range(experiment.repeats)
    ]


def _together(seeds: Sequence[Run]) -> Any:
    import pandas as pd

    return pd.concat([seed.history for seed in seeds], ignore_index=True)


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
