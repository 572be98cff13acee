"""Cluster: starts or attaches to MPI engines, and runs experiments on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, TypeVarTuple
from weakref import WeakSet

from labkit.cluster import fault_magic, last_experiment, launch, magic
from labkit.cluster.calls import Calls, RankError
from labkit.cluster.cluster_name import folder_of, usual_name
from labkit.cluster.lease import is_held
from labkit.cluster.live import Live
from labkit.cluster.local_engines import Connection, LocalEngines
from labkit.cluster.namespace_transfer import Carried, give, take
from labkit.cluster.prediction import ask, check_rows, together
from labkit.cluster.remote_engines import Visited
from labkit.cluster.resume import Resumed, checked, earlier, keeping, path_of
from labkit.cluster.start import Start
from labkit.cluster.submission import Submitted, run_seeds
from labkit.cluster.warm import take_over
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.paths import runtime_folder
from labkit.common.timeouts import Limits
from labkit.common.units import plural
from labkit.communicator import Communicator
from labkit.communicator.status_table import ENDED
from labkit.experiment.experiment import Experiment
from labkit.network import Network
from labkit.records import store
from labkit.records.checkpoints import Checkpoint, CheckpointContext
from labkit.records.endings import End
from labkit.records.run import Run
from labkit.strategies import Batch, Strategy
from labkit.worker.work import infer, prepare

if TYPE_CHECKING:
    import ipyparallel

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Cluster:
    """MPI ranks in ipyparallel engines, for as long as somebody holds a lease on them.

    A cluster of the same name that is up is attached to; otherwise one is started. It ends when
    the last process that uses it closes it or ends, in whatever way it ends.

    Ranks are processes of this machine, or of hosts:

        Cluster(hosts=["a:2", "b:2"])              mpiexec, through ssh or another agent
        Cluster(workers=4, nodes=2)                a job of Slurm, from a login node or inside one

    There the controller listens on the one address that hosts reach, with CurveZMQ; Python and
    labkit must be at the same place on all. The folder of who calls need not be shared: modules and
    packages in it travel with each call, data do not. What is not said here is taken from the
    environment (LABKIT_LAUNCHER, LABKIT_HOSTS, LABKIT_NODES, LABKIT_AGENT, LABKIT_SLURM), so that a
    notebook goes from one machine to many as it is.

    Args:
        workers: ranks; default: 2, or one for each slot of hosts.
        threads: TensorFlow's threads in each rank; fixed when an engine starts.
        name: default: one name for each shape, interpreter, version of labkit and of TensorFlow,
            and what engines read of the environment; members of a sweep share one that is theirs.
            Engines that `labkit warm` keeps under it are taken as they would have been started.
        limit: seconds after which a rank's wait for another raises an error, which tells of each
            rank what it is doing; all other deadlines follow from it, see
            `labkit.common.timeouts`.
        hosts: names with the ranks that each takes, or the path of a host file.
        launcher: "local", "hosts" or "slurm"; default: by what else is given.
        nodes: how many nodes Slurm gives.
        fault_tolerant: no single death loses a run. Synchronous data parallel training goes on
            with those that live. Where that cannot be, in what comes before and behind training
            and with all other strategies, engines start anew: the run goes on from its newest
            checkpoint, or begins again where it has none. It ends by deaths in three
            calls in a row, of which the later two come no further and leave no newer checkpoint.
            Every other call, and a cell of `%%ranks`, ends with the first death; the next one
            finds all ranks again.
        spares: further ranks, which wait to take the places of those that die while an experiment
            is trained: replicas then stay as many, and a model that is cut over ranks goes on
            from copies in the memory of neighbours.
        trusted_network: mpiexec may listen on every interface of this machine, unencrypted and
            without a key, so that whoever reaches the machine may start programs as you. Needed
            where the system does not let labkit bind mpiexec to loopback: macOS, containers
            without pidfd_getfd. The environment says so by LABKIT_TRUSTED_NETWORK=1.
        oversubscribe: start more ranks on this machine than 8 for each core, or than its free
            memory holds at 0.7 GiB each; all its memory is a limit that nothing lifts.
        more: of `labkit.cluster.start.Start`: `step` ("mpiexec" or "srun", what starts ranks in a
            job), `place` ("core" fills one host after the other, "node" deals out in turn),
            `options` (further words for salloc or srun), `agent` (in place of ssh), `interface`
            (the address of this machine that hosts reach).

    Raises:
        InvalidInput: a value that cannot work, more ranks than this machine has cores and memory
            for, or a cluster of this name that is smaller.
        LabkitError: the engines did not start, or are not one MPI world on the hosts that were
            asked for; the message ends with what they said.
    """

    def __init__(
        self,
        workers: int | None = None,
        threads: int = 1,
        name: str | None = None,
        limit: float = 600.0,
        hosts: Sequence[str] | str | Path | None = None,
        launcher: str | None = None,
        nodes: int | None = None,
        fault_tolerant: bool = False,
        spares: int = 0,
        trusted_network: bool = False,
        oversubscribe: bool = False,
        **more: str,
    ) -> None:
        self.how = how = Start.asked(
            workers,
            threads,
            launcher,
            hosts,
            nodes,
            fault_tolerant,
            spares,
            trusted_network,
            **more,
        )
        self.name = name or usual_name(how)
        self.workers, self.threads, self.limit = how.workers, threads, limit
        self._begin(LocalEngines(folder_of(self.name), self.name, how, oversubscribe))

    def _begin(self, engines: LocalEngines | Visited) -> None:
        self._engines, self.folder = engines, engines.folder
        self._lock = RLock()  # of threads: the run's own starts engines, too, as a cell may
        self._client: ipyparallel.Client | None = None
        self._submitted: WeakSet[Submitted] = WeakSet()
        self._carried: Carried | None = None  # from engines that were rebuilt
        self.start()

    @classmethod
    def attach(cls, file: Path | str, limit: float = 600.0) -> Self:
        """Use a cluster that another machine keeps, for as long as it is up; see `attach_file`.

        Args:
            file: what the cluster wrote, or a copy of it.
            limit: seconds after which a rank's wait for another raises an error.

        Raises:
            InvalidInput: it is no such file, or of another labkit.
            LabkitError: the cluster has ended, or no way leads to it.
        """
        found = cls.__new__(cls)
        engines = Visited(Path(file))
        found.how, found.name, found.limit = engines.how, engines.name, limit
        found.workers, found.threads = engines.how.workers, engines.how.threads
        found._begin(engines)
        return found

    @property
    def attach_file(self) -> Path:
        """The file by which another machine attaches; it holds the keys: keep it to yourself.

        Raises:
            LabkitError: no other machine reaches ranks of this machine alone.
        """
        return self._engines.attach_file()

    def start(self) -> None:
        """Attach to the engines, starting them where they are not up."""
        with self._lock:
            try:
                connection = self._engines.start()
                self._check_shape()
                client = self._connect(connection)
                take_over(self.folder, client)
                self._restore()
            except BaseException:
                self._let_go()
                raise

    def close(self) -> None:
        """End this process's use of the cluster; the last one to do so ends the engines.

        What was submitted here and still runs is stopped, and kept as interrupted.
        """
        # A list: the set lets go of what ends meanwhile.
        for live in list(self._submitted):
            live.end()
        self._let_go()

    def _let_go(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self._engines.let_go()

    def restart(self) -> None:
        """End the engines, also stuck ones, and start them again at the next use."""
        self._let_go()
        self._engines.end()

    def rebuild(self, stuck: list[int]) -> None:
        """The same where some ranks are stuck: what cells have defined on the others is kept."""
        with self._lock:
            if self._client is not None and self.how_ended() is None:
                grace = Limits.of(self.limit).grace
                engines = dict(enumerate(self.state()["engines"]))
                self._carried = take(self._client, engines, stuck, grace)
            self.restart()

    def _restore(self) -> None:
        carried, self._carried = self._carried, None
        if carried is not None and self._client is not None:
            engines = dict(enumerate(self.state()["engines"]))
            if told := give(self._client, engines, carried).sentence:
                print(f"variables of cells: {told}", file=sys.stderr, flush=True)

    @property
    def client(self) -> ipyparallel.Client:
        """The ipyparallel client; a cluster that has ended is started again."""
        with self._lock:
            # Also where another process has ended it: it would wait for engines that are gone.
            if self._client is None or self.how_ended() is not None:
                self._let_go()
                self.start()
            return self._client

    @property
    def view(self) -> ipyparallel.DirectView:
        """All engines in rank order: `view.apply_sync(f)[k]` is what rank k returned."""
        return self.client.direct_view(self.engines)

    def run(
        self,
        experiment: Experiment,
        show: bool = True,
        checkpoint: Checkpoint | int | str | None = None,
        resume: Resumed = None,
    ) -> Run:
        """Run an experiment to its end and return its record.

        Args:
            experiment: what to run, on at most as many workers as there are ranks.
            show: a progress line in a terminal; in JupyterLab a panel with a stop button.
            checkpoint: how often its state is kept: a `Checkpoint`, steps, or such as "30s".
            resume: True: go on with the newest run of this very experiment that was interrupted or
                failed, in its record, bit for bit where it stood; where there is none, begin. A
                run, or its folder: begin with its weights, optimizer and place in the data, on
                however many workers, and however the model is cut.

        Raises:
            InvalidInput: the experiment does not fit this cluster, or its model not its strategy.
            RankError: a rank failed; the record is kept with its cause.
        """
        experiment = fault_magic.with_planted(experiment)
        kept, begun = checked(experiment, checkpoint, resume), earlier(experiment, resume)
        if begun is not None and begun.status["state"] == "completed":
            return begun
        if experiment.repeats == 1:
            return self._begin_run(experiment, show, kept, resume, begun).result()
        self._check(experiment)

        def one(seed: Experiment, directory: Path) -> Run:
            told = keeping(seed, kept, Run(directory), goes_on=True)
            return self._submit(seed, directory, show, told).result()

        return run_seeds(experiment, one, begun.path if begun else None)

    def submit(
        self,
        experiment: Experiment,
        show: bool = False,
        checkpoint: Checkpoint | int | str | None = None,
        resume: Resumed = None,
    ) -> Live:
        """Start an experiment and return at once; `result()` waits for it, `stop()` ends it.

        In JupyterLab the Live at the end of a cell is a panel of what goes on. The ranks go on
        when a cell is interrupted; `cluster.live()` finds them again. While they work for another
        call, this one waits for its turn.
        """
        if experiment.repeats > 1:
            raise InvalidInput(f"repeats={experiment.repeats} wants run(), which waits for all")
        experiment = fault_magic.with_planted(experiment)
        kept, begun = checked(experiment, checkpoint, resume), earlier(experiment, resume)
        if begun is not None and begun.status["state"] == "completed":
            begun = None  # it stays as it is: what is wanted here goes on
        return self._begin_run(experiment, show, kept, resume, begun)

    def _begin_run(
        self,
        experiment: Experiment,
        show: bool,
        checkpoint: Checkpoint | None,
        resume: Resumed,
        begun: Run | None,
    ) -> Live:
        self._check(experiment)
        run = begun
        if run is None and resume is not None and not isinstance(resume, bool):
            run = path_of(resume)
        told = keeping(experiment, checkpoint, run, goes_on=begun is not None)
        name = f"{experiment.label}-{experiment.hash8}"
        place = begun.path if begun is not None else store.run_directory(name)
        return self._submit(experiment, place, show, told)

    def _submit(
        self, experiment: Experiment, directory: Path, show: bool, told: CheckpointContext | None
    ) -> Live:
        live = Submitted(self, experiment, directory, told)
        if (client := self._client) is not None:  # as it is: `live` alone starts engines again
            state = self.state()
            for engine in state["engines"][experiment.ranks : state["workers"]]:
                client[engine].apply_async(prepare)  # those at leisure get ready
        self._submitted.add(live)
        live.begin(show)
        return live

    def live(self, show: bool = False) -> Live:
        """The experiment that was submitted last, by whichever process, running or ended.

        What another process has submitted can be watched and stopped from here, and `result()`
        waits for it. That process writes its record: when it ends before the ranks do, they end
        after the same step, and the run is interrupted.

        Raises:
            LabkitError: nothing was submitted yet.
        """
        return last_experiment.last(self.folder, show)

    def call(
        self,
        function: Callable[[Communicator, *Ts], T],
        *arguments: *Ts,
        ranks: int | None = None,
        network: str | Network | None = None,
    ) -> list[T]:
        """Call `function(communicator, *arguments)` on every rank; a list in rank order.

        Args:
            function: may come from a cell; what it needs is imported inside it.
            arguments: the same on every rank.
            ranks: call it on so many of them; default: all.
            network: a network that the communicator emulates.

        Raises:
            RankError: a rank failed; those that waited for it have ended too.
        """
        # Fewer, so that one cluster serves experiments of several sizes.
        count = self.workers if ranks is None else ranks
        if not 1 <= count <= self.workers:
            raise InvalidInput(f"ranks={ranks} is impossible; allowed: 1 to {self.workers}")
        calls = Calls(self, count, function, arguments, network)
        try:
            for _ in calls.watch():
                pass
            if dead := calls.dead():
                raise RankError(f"rank {min(dead)} failed: {ENDED}", min(dead))
            return calls.results() or []
        finally:
            calls.close()

    def predict(
        self,
        run: Run | Path | str,
        x: Batch,
        strategy: Strategy | str | None = None,
        workers: int | None = None,
        batch_size: int = 256,
    ) -> Batch:
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
        arguments = (asked.model(self.how.is_local), asked.strategy, x, batch_size)
        return together(self.call(infer, *arguments, ranks=asked.workers))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether this object holds the cluster."""
        return self._client is not None

    def __repr__(self) -> str:
        state = "up" if self.connected else "closed"
        return f"<Cluster {self.name}: {self.workers} ranks of {self.threads} threads, {state}>"

    def _repr_html_(self) -> str:
        return launch.card_of(self.name, self.folder, self.how, connected=self.connected)

    # --- starting ----------------------------------------------------------------------------

    def state(self) -> launch.State:
        """What the cluster's keeper says: its state, a message, workers, threads."""
        return self._engines.state()

    def how_ended(self) -> End | None:
        """How the engines have ended; None while they are up."""
        return self._engines.how_ended()

    def _connect(self, connection: Connection) -> ipyparallel.Client:
        import ipyparallel as ipp
        from traitlets.log import get_logger

        # CurveZMQ stands in for the signatures that it misses.
        log, unsigned = get_logger(), lambda record: "signing is disabled" not in record.msg
        log = getattr(log, "logger", log)  # of an adapter
        log.addFilter(unsigned)
        try:
            self._client = ipp.Client(connection)
        except TimeoutError:
            raise LabkitError(f"the controller of cluster {self.name} does not answer") from None
        finally:
            log.removeFilter(unsigned)
        self._client.wait_for_engines(self.how.ranks, interactive=False, timeout=120)
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
            view = self._client.direct_view(self.engines)
            view.block = True
            view.activate()  # %%px runs on all ranks, in rank order
            magic.register(self)  # and %%ranks, which ends with the first that fails
            fault_magic.register()
        return self._client

    @property
    def engines(self) -> list[int]:
        """Engine ids in rank order."""
        _ = self.client  # which starts them again where they have ended
        state = self.state()
        return state["engines"][: state["workers"]]

    def _check_shape(self) -> None:
        state = self.state()
        there = Start.of_json(state["how"])
        fields = ["launcher", "hosts", "nodes", "step", "place", "fault_tolerant", "spares"]
        if not self.how.trusted_network:  # who trusts the network may use engines that do not
            fields.append("trusted_network")
        for field in fields:
            found, wanted = getattr(there, field), getattr(self.how, field)
            if found != wanted:
                raise InvalidInput(
                    f"cluster {self.name!r} is up with {field}={found!r}, {wanted!r} is asked for; "
                    "give another name, or close that one"
                )
        for field, up, wanted, fits in (
            ("workers", state["workers"], self.workers, state["workers"] >= self.workers),
            ("threads", state["threads"], self.threads, state["threads"] == self.threads),
        ):
            if not fits:
                raise InvalidInput(
                    f"cluster {self.name!r} is up with {field}={up}, {wanted} are asked for; "
                    "give another name, or close that one"
                )

    def _check(self, experiment: Experiment) -> None:
        """Refuse what does not fit the ranks; fetch data that are not there yet."""
        if experiment.ranks > self.workers:
            apart = experiment.ranks - experiment.workers
            beside = f" and {plural(apart, 'rank')} beside them" if apart > 0 else ""
            raise InvalidInput(
                f"workers={experiment.workers}{beside} on a cluster of {self.workers}; "
                f"use Cluster(workers={experiment.ranks})"
            )
        if experiment.threads != self.threads:
            raise InvalidInput(
                f"threads={experiment.threads} on a cluster whose engines have {self.threads}; "
                f"TensorFlow fixes them at its start: use Cluster(threads={experiment.threads})"
            )
        if isinstance(experiment.dataset, str):
            from labkit import datasets

            # Here, once: ranks that fetch the same file at a time would get in each other's way.
            datasets.ensure(experiment.dataset)


def run(
    experiment: Experiment,
    show: bool = True,
    checkpoint: Checkpoint | int | str | None = None,
    resume: Resumed = None,
    oversubscribe: bool = False,
) -> Run:
    """Run an experiment on a cluster of its own shape, started for it or already up.

    One process, kept as long as this one lives, plays all that runs on the virtual clock.
    """
    if experiment.clock == "virtual":
        return _player(experiment.threads).run(experiment, show, checkpoint, resume)
    ranks, threads = experiment.ranks, experiment.threads
    with Cluster(workers=ranks, threads=threads, oversubscribe=oversubscribe) as cluster:
        return cluster.run(experiment, show, checkpoint, resume)


@cache
def _player(threads: int) -> Cluster:
    return Cluster(workers=1, threads=threads, launcher="local")


def predict(
    run: Run,
    x: Batch,
    strategy: Strategy | str | None = None,
    batch_size: int = 256,
    oversubscribe: bool = False,
) -> Batch:
    """What a run's model says of rows, on a cluster of its shape; see `Cluster.predict`."""
    workers, threads = run.experiment["workers"], run.experiment["threads"]
    with Cluster(workers=workers, threads=threads, oversubscribe=oversubscribe) as cluster:
        return cluster.predict(run, x, strategy, workers, batch_size)


def leftovers() -> list[str]:
    """Names of clusters on this machine whose keeper runs."""
    found = []
    for folder in sorted(runtime_folder("clusters").glob("*")):
        if is_held(folder / "keeper.lock"):
            found.append(folder.name)
    return found
