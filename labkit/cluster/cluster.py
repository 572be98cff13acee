"""Cluster: starts or attaches to MPI engines, and runs experiments on them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, TypeVarTuple
from weakref import WeakSet

from labkit.cluster import launch, magic, run_handle
from labkit.cluster.calls import Calls, RankError
from labkit.cluster.engines import Connection, LocalEngines, RemoteEngines
from labkit.cluster.lease import default_name, folder_of, is_held
from labkit.cluster.namespace_transfer import CellVariables, restore_variables, save_variables
from labkit.cluster.prediction import join_parts, plan_prediction, validate_rows
from labkit.cluster.resume import (
    ResumeFrom,
    checkpoint_context,
    find_resumable,
    find_run,
    validate_checkpoint,
)
from labkit.cluster.run_handle import RunHandle
from labkit.cluster.start import FURTHER, Start
from labkit.cluster.submission import SubmittedRun, run_seeds
from labkit.cluster.warm import claim_warm_engines
from labkit.common import keras_settings
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.files import runtime_folder
from labkit.common.nearest import named_arguments
from labkit.common.quantities import parse_limit
from labkit.common.renamed import refuse_former_attributes
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


@refuse_former_attributes
class Cluster:
    """MPI ranks that run experiments and calls; each rank is an ipyparallel engine, a process.

    The object attaches to a running cluster of the same name, or starts a new cluster. A cluster
    ends when the last process that uses it closes it or exits, even by a crash.

    Ranks are processes of this machine or of several hosts:

        Cluster(hosts=["a:2", "b:2"])              mpiexec, through ssh or another agent
        Cluster(workers=4, nodes=2)                a Slurm job, from a login node or inside a job

    With several hosts, ipyparallel's controller listens on one address of this machine, encrypted
    by CurveZMQ. Python and labkit must have the same path on all hosts. The hosts need no access to
    the caller's folder. Each call sends the folder's modules and packages, but no data files.
    Options that are not given come from the environment variables LABKIT_LAUNCHER, LABKIT_HOSTS,
    LABKIT_NODES, LABKIT_AGENT and LABKIT_SLURM. With the environment variables, the same notebook
    runs on one machine or on many.

    Args:
        workers: Number of ranks without spares. The default is 2. With `hosts`, the default is one
            rank for each slot of the hosts.
        threads: Number of TensorFlow threads of each rank, which is fixed when an engine starts.
        name: Name of the cluster. The default name depends on the numbers of ranks and threads. The
            default name also depends on the interpreter and the engines' environment. The versions
            of labkit and TensorFlow also change the default name. All notebook runs of a sweep
            share one default name, which differs from that of other clusters. A cluster claims warm
            engines of its name, which `labkit prestart` has started in advance.
        timeout: Maximum time in seconds that a rank waits for another rank. After the timeout, the
            rank raises an error with each rank's status. The default value of `timeout` is 600
            seconds. All other deadlines follow from `timeout`, see `labkit.common.timeouts`.
        hosts: Names of hosts with the number of ranks of each, or the path of a host file.
        launcher: "local", "hosts" or "slurm"; default: chosen by the other arguments.
        nodes: Number of Slurm nodes. Inside a Slurm job, the default is the number of the job's
            nodes; otherwise, it is 1.
        fault_tolerant: Whether a run survives the death of a rank. Synchronous data parallel
            training continues on the surviving ranks. If a rank dies in another strategy than
            synchronous data parallel training, the engines restart. The engines also restart if a
            rank dies before or after training. The run then resumes from its newest checkpoint or
            from the start. The run ends if ranks die in three calls in a row without progress.
            A call that is not a run, or a cell of `%%ranks`, ends when the first rank dies. The
            next call has all ranks again.
        spares: Number of further ranks, which replace ranks that die during training. After a spare
            rank replaces a dead rank, the number of replicas is the same as before. A model that is
            split over ranks continues from copies of its weights. Neighbouring ranks store the
            copies of the weights in memory.
        trusted_network: Whether mpiexec may listen on every interface of this machine, unencrypted
            and without a key. If `trusted_network` is True, every user of the network can start
            programs as you. Set `trusted_network` where labkit cannot bind mpiexec to loopback: on
            macOS, and in containers without pidfd_getfd. The environment variable
            LABKIT_TRUSTED_NETWORK=1 has the same effect as `trusted_network=True`.
        oversubscribe: Whether the number of ranks may exceed the limits of this machine. The limits
            are 8 ranks per core and the free memory. By assumption, each rank needs 0.7 GiB of
            memory. More ranks than fit into the machine's total memory are always refused.
        more: Further options of the start, see `labkit.cluster.start.Start`. `launch_command` is
            "mpiexec" or "srun", which starts ranks in a job. `map_by="slot"` fills one host after
            the other; "node" assigns ranks to hosts round-robin. `options` are arguments of salloc
            or srun. `agent` is a command that replaces ssh. `interface` is the address by which
            hosts reach this machine.

    Raises:
        InvalidInput: A value is invalid, or cores or memory are not sufficient. The error also
            occurs if a running cluster of this name is too small.
        LabkitError: The engines do not form one MPI world on the requested hosts. The error message
            ends with the output of the engines.
    """

    @named_arguments(*FURTHER)
    def __init__(
        self,
        workers: int | None = None,
        threads: int = 1,
        name: str | None = None,
        timeout: float | str = 600.0,
        hosts: Sequence[str] | str | Path | None = None,
        launcher: str | None = None,
        nodes: int | None = None,
        fault_tolerant: bool = False,
        spares: int = 0,
        trusted_network: bool = False,
        oversubscribe: bool = False,
        **more: str,
    ) -> None:
        for what, advice in keras_settings.notes():
            warnings.warn(f"{what}; {advice}", stacklevel=3)
        self.how = how = Start.from_options(
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
        self.name = name or default_name(how)
        self.workers, self.threads = how.workers, threads
        self.timeout = parse_limit(timeout)
        self._open(LocalEngines(folder_of(self.name), self.name, how, oversubscribe))

    def _open(self, engines: LocalEngines | RemoteEngines) -> None:
        self._engines, self.folder = engines, engines.folder
        # A lock is needed, because the thread of a run and a notebook cell may both start engines.
        self._lock = RLock()
        self._client: ipyparallel.Client | None = None
        self._submitted: WeakSet[SubmittedRun] = WeakSet()
        # The attribute `_saved` contains variables of notebook cells, which labkit saves before the
        # engines restart.
        self._saved: CellVariables | None = None
        self.start()

    @classmethod
    @named_arguments()
    def attach(cls, file: Path | str, timeout: float | str = 600.0) -> Self:
        """Attach to a running cluster of another machine; see `attach_file`.

        Args:
            file: The cluster's `attach_file`, or a copy of it.
            timeout: Seconds that a rank waits for another rank before it raises an error.

        Raises:
            InvalidInput: The file is invalid, or another version of labkit has written it.
            LabkitError: The cluster has ended or cannot be reached.
        """
        cluster = cls.__new__(cls)
        cluster.timeout = parse_limit(timeout)
        engines = RemoteEngines(Path(file))
        cluster.how, cluster.name = engines.how, engines.name
        cluster.workers, cluster.threads = engines.how.workers, engines.how.threads
        cluster._open(engines)
        return cluster

    @property
    def attach_file(self) -> Path:
        """Path of the file by which another machine attaches; it contains keys, so keep it private.

        Raises:
            LabkitError: The ranks are processes of this machine, which no other machine can reach.
        """
        return self._engines.attach_file()

    def start(self) -> None:
        """Attach to the cluster's engines; start the engines if they are not running."""
        with self._lock:
            try:
                connection = self._engines.start()
                self._check_shape()
                client = self._connect(connection)
                claim_warm_engines(self.folder, client)
                self._restore()
            except BaseException:
                self._release()
                raise

    def close(self) -> None:
        """End this process's use of the cluster; the engines end when no process uses them.

        Runs that this object has submitted are stopped, and their records say "interrupted".
        """
        # The loop iterates over a copy, because the weak set may shrink when runs end.
        for live in list(self._submitted):
            live.end()
        self._release()

    def _release(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self._engines.release()

    def restart(self) -> None:
        """End all engines, even stuck engines; new engines start at the next use."""
        self._release()
        self._engines.end()

    def rebuild(self, stuck: list[int]) -> None:
        """Restart all engines, and restore the variables of the ranks that still answer.

        Args:
            stuck: Ranks whose variables are not read, because the ranks no longer answer.
        """
        with self._lock:
            if self._client is not None and self.how_ended() is None:
                grace = Limits.of(self.timeout).grace
                engines = dict(enumerate(self.state()["engines"]))
                self._saved = save_variables(self._client, engines, stuck, grace)
            self.restart()

    def _restore(self) -> None:
        saved, self._saved = self._saved, None
        if saved is not None and self._client is not None:
            engines = dict(enumerate(self.state()["engines"]))
            if summary := restore_variables(self._client, engines, saved).sentence:
                print(f"variables of cells: {summary}", file=sys.stderr, flush=True)

    @property
    def client(self) -> ipyparallel.Client:
        """The ipyparallel client; if the cluster has ended, access to it restarts the cluster."""
        with self._lock:
            # The method `how_ended` also detects engines that another process has ended.
            if self._client is None or self.how_ended() is not None:
                self._release()
                self.start()
            return self._client

    @property
    def view(self) -> ipyparallel.DirectView:
        """A view of all engines in rank order: `view.apply_sync(f)[k]` is the result of rank k."""
        return self.client.direct_view(self.engines)

    @named_arguments()
    def run(
        self,
        experiment: Experiment,
        show: bool = True,
        checkpoint: Checkpoint | int | str | None = None,
        resume: ResumeFrom = None,
    ) -> Run:
        """Run an experiment to its end and return its record.

        Args:
            experiment: The experiment. Its number of ranks must not exceed the cluster's number of
                ranks.
            show: Whether to show progress: a line in a terminal, a panel with a stop button in
                JupyterLab.
            checkpoint: Interval between checkpoints, as a `Checkpoint`, a number of steps, or
                "30s". With the value None, the run writes no checkpoints.
            resume: If True, continue the newest interrupted or failed run of the same experiment
                from its checkpoint. The record is the same, and the results are bit-identical. If
                no run of the experiment can be continued, start a new run. If `resume` is a run or
                its folder, start a new run. The new run takes weights, optimizer state and data
                position from the given run. The new run may have any number of workers and any
                split of the model.

        Raises:
            InvalidInput: The experiment does not fit the cluster, or its model does not fit its
                strategy.
            RankError: A rank failed; the record contains the cause.
        """
        experiment = magic.with_injected_faults(experiment)
        settings, previous = (
            validate_checkpoint(experiment, checkpoint, resume),
            find_resumable(experiment, resume),
        )
        if previous is not None and previous.status["state"] == "completed":
            return previous
        if experiment.repeats == 1:
            return self._begin_run(experiment, show, settings, resume, previous).result()
        self._validate(experiment)

        def run_one(seed: Experiment, directory: Path) -> Run:
            context = checkpoint_context(seed, settings, Run(directory), goes_on=True)
            return self._submit(seed, directory, show, context).result()

        return run_seeds(experiment, run_one, previous.path if previous else None)

    @named_arguments()
    def submit(
        self,
        experiment: Experiment,
        show: bool = False,
        checkpoint: Checkpoint | int | str | None = None,
        resume: ResumeFrom = None,
    ) -> RunHandle:
        """Start an experiment; return at once a handle with the methods `result` and `stop`.

        In JupyterLab a RunHandle at the end of a cell displays a panel with the progress. The ranks
        continue when a cell is interrupted, and `cluster.last_submitted()` returns the handle
        again. While the ranks serve another call, this method waits.
        """
        if experiment.repeats > 1:
            raise InvalidInput(
                f"repeats={experiment.repeats} cannot be submitted; use run(), which waits for "
                "all repeats, or give repeats=1"
            )
        experiment = magic.with_injected_faults(experiment)
        settings, previous = (
            validate_checkpoint(experiment, checkpoint, resume),
            find_resumable(experiment, resume),
        )
        if previous is not None and previous.status["state"] == "completed":
            previous = None  # A completed run cannot continue, so a new run starts.
        return self._begin_run(experiment, show, settings, resume, previous)

    def _begin_run(
        self,
        experiment: Experiment,
        show: bool,
        checkpoint: Checkpoint | None,
        resume: ResumeFrom,
        previous: Run | None,
    ) -> RunHandle:
        self._validate(experiment)
        run = previous
        if run is None and resume is not None and not isinstance(resume, bool):
            run = find_run(resume)
        context = checkpoint_context(experiment, checkpoint, run, goes_on=previous is not None)
        name = f"{experiment.label}-{experiment.hash8}"
        directory = previous.path if previous is not None else store.run_directory(name)
        return self._submit(experiment, directory, show, context)

    def _submit(
        self, experiment: Experiment, directory: Path, show: bool, context: CheckpointContext | None
    ) -> RunHandle:
        live = SubmittedRun(self, experiment, directory, context)
        # The code reads `_client`, because the property `client` would restart ended engines.
        if (client := self._client) is not None:
            state = self.state()
            for engine in state["engines"][experiment.ranks : state["workers"]]:
                # Engines without a rank of this run import the modules for training in advance.
                client[engine].apply_async(prepare)
        self._submitted.add(live)
        live.begin(show)
        return live

    def last_submitted(self, show: bool = False) -> RunHandle:
        """Return the handle of the last run that any process has submitted to this cluster.

        A run of another process can be watched and stopped from here, and `result()` waits for it.
        Only the process that submitted the run writes the run's record. If the submitting process
        ends earlier than the ranks, all ranks stop after the same step. The run's state is then
        "interrupted".

        Raises:
            LabkitError: No run was submitted yet.
        """
        return run_handle.last_submitted(self.folder, show)

    def call(
        self,
        function: Callable[[Communicator, *Ts], T],
        *arguments: *Ts,
        ranks: int | None = None,
        network: str | Network | None = None,
    ) -> list[T]:
        """Call `function(communicator, *arguments)` on every rank, and return a list in rank order.

        Args:
            function: Function to call; a notebook cell may define it. The function must import the
                modules that it needs.
            arguments: Arguments after the communicator, the same on every rank.
            ranks: Number of ranks to call, from rank 0; default: all.
            network: Network that the communicator emulates.

        Raises:
            RankError: A rank failed. When `RankError` is raised, the call has also ended on the
                ranks that waited for the failed rank.
        """
        # A call may use fewer ranks than the cluster has. One cluster can thus serve experiments of
        # several sizes.
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

    @named_arguments()
    def predict(
        self,
        run: Run | Path | str,
        x: Batch,
        strategy: Strategy | str | None = None,
        workers: int | None = None,
        batch_size: int = 256,
    ) -> Batch:
        """Predict rows with a trained model on several ranks, as `run.model().predict(x)` does.

        Replicas divide the rows among themselves. Each pipeline stage passes a micro-batch to the
        next stage and then starts its next micro-batch. Tensor-parallel ranks compute all rows
        together. Every rank reads the whole model first.

        Args:
            run: A completed run, or a .keras file.
            x: An array of shape (rows, …), or a nest of arrays; cast to the model's input type.
            strategy: Strategy that divides the work among the ranks. None selects the strategy of
                the run's training, or `AllReduce` for a file.
            workers: Number of ranks. None selects the run's number if the run's strategy is used,
                or else all ranks.
            batch_size: Number of rows that the model, or a pipeline stage, processes at a time;
                default: 256.

        Returns:
            Outputs of shape (rows, …) as a NumPy array, or a nest of arrays.

        Raises:
            InvalidInput: The strategy cannot divide this model by this number of ranks. The error
                also occurs if `x` does not fit the model.
            RankError: A rank failed.
        """
        plan = plan_prediction(run, strategy, workers, self.workers)
        validate_rows(x, batch_size)
        arguments = (plan.model(self.how.is_local), plan.strategy, x, batch_size)
        return join_parts(self.call(infer, *arguments, ranks=plan.workers))

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
        """Whether this object is connected to the engines."""
        return self._client is not None

    def __repr__(self) -> str:
        state = "up" if self.connected else "closed"
        return (
            f"<Cluster {self.name}: {self.workers} ranks with {self.threads} threads each, {state}>"
        )

    def _repr_html_(self) -> str:
        return launch.card_of(self.name, self.folder, self.how, connected=self.connected)

    # --- starting ----------------------------------------------------------------------------

    def state(self) -> launch.ClusterState:
        """Return the cluster's state, which its supervising process has written."""
        return self._engines.state()

    def how_ended(self) -> End | None:
        """Return how the engines have ended, or None while they are up."""
        return self._engines.how_ended()

    def _connect(self, connection: Connection) -> ipyparallel.Client:
        import ipyparallel as ipp
        from traitlets.log import get_logger

        # ipyparallel's client warns that messages are not signed, but CurveZMQ authenticates them.
        log, unsigned = get_logger(), lambda record: "signing is disabled" not in record.msg
        # The function `get_logger` may return a logger adapter, which has no method `addFilter`.
        log = getattr(log, "logger", log)
        log.addFilter(unsigned)
        try:
            self._client = ipp.Client(connection)
        except TimeoutError:
            raise LabkitError(
                f"the ipyparallel controller of cluster {self.name} does not answer"
            ) from None
        finally:
            log.removeFilter(unsigned)
        self._client.wait_for_engines(self.how.ranks, interactive=False, timeout=120)
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
            view = self._client.direct_view(self.engines)
            view.block = True
            view.activate()  # The magic command %%px runs a cell on all ranks, in rank order.
            # Unlike %%px, the magic command %%ranks ends the cell at the first failure.
            magic.register(self)
            magic.register_fault_magic()
        return self._client

    @property
    def engines(self) -> list[int]:
        """Engine ids in rank order."""
        _ = self.client  # Access to the property `client` restarts the engines if they have ended.
        state = self.state()
        return state["engines"][: state["workers"]]

    def _check_shape(self) -> None:
        state = self.state()
        running = Start.from_json(state["how"])
        fields = [
            "launcher",
            "hosts",
            "nodes",
            "launch_command",
            "map_by",
            "fault_tolerant",
            "spares",
        ]
        # A caller that trusts the network accepts a running cluster with either value of
        # `trusted_network`.
        if not self.how.trusted_network:
            fields.append("trusted_network")
        for field in fields:
            actual, requested = getattr(running, field), getattr(self.how, field)
            if actual != requested:
                raise InvalidInput(
                    f"cluster {self.name!r} is running with {field}={actual!r}, not "
                    f"{requested!r}; give the new cluster another name, or close the running one"
                )
        for field, up, requested, fits in (
            ("workers", state["workers"], self.workers, state["workers"] >= self.workers),
            ("threads", state["threads"], self.threads, state["threads"] == self.threads),
        ):
            if not fits:
                raise InvalidInput(
                    f"cluster {self.name!r} is running with {field}={up}, not {requested}; give "
                    "the new cluster another name, or close the running one"
                )

    def _validate(self, experiment: Experiment) -> None:
        """Raise an error if the experiment does not fit the ranks; download missing data."""
        if experiment.ranks > self.workers:
            extra = experiment.ranks - experiment.workers
            beside = f" and {plural(extra, 'further rank')}" if extra > 0 else ""
            raise InvalidInput(
                f"workers={experiment.workers}{beside} are more than the {self.workers} ranks of "
                f"the cluster; use Cluster(workers={experiment.ranks})"
            )
        if experiment.threads != self.threads:
            raise InvalidInput(
                f"threads={experiment.threads} on a cluster whose engines have {self.threads}; "
                "TensorFlow cannot change the number of threads after its start: use "
                f"Cluster(threads={experiment.threads})"
            )
        if isinstance(experiment.dataset, str):
            from labkit import datasets

            # This process downloads the data set once, because parallel downloads by ranks would
            # collide.
            datasets.ensure(experiment.dataset)


@named_arguments()
def run(
    experiment: Experiment,
    show: bool = True,
    checkpoint: Checkpoint | int | str | None = None,
    resume: ResumeFrom = None,
    oversubscribe: bool = False,
) -> Run:
    """Run an experiment on a cluster with fitting ranks and threads; see `Cluster.run`.

    The cluster is started if none is running. Experiments on the virtual clock run in one engine,
    which lives as long as this process.
    """
    if experiment.clock == "virtual":
        return _simulation_cluster(experiment.threads).run(experiment, show, checkpoint, resume)
    ranks, threads = experiment.ranks, experiment.threads
    with Cluster(workers=ranks, threads=threads, oversubscribe=oversubscribe) as cluster:
        return cluster.run(experiment, show, checkpoint, resume)


@cache
def _simulation_cluster(threads: int) -> Cluster:
    return Cluster(workers=1, threads=threads, launcher="local")


@named_arguments()
def predict(
    run: Run,
    x: Batch,
    strategy: Strategy | str | None = None,
    batch_size: int = 256,
    oversubscribe: bool = False,
) -> Batch:
    """Predict rows with a run's model on as many ranks as the run, see `Cluster.predict`."""
    workers, threads = run.experiment["workers"], run.experiment["threads"]
    with Cluster(workers=workers, threads=threads, oversubscribe=oversubscribe) as cluster:
        return cluster.predict(run, x, strategy, workers, batch_size)


def leftovers() -> list[str]:
    """Return the names of this user's running clusters on this machine."""
    names = []
    for folder in sorted(runtime_folder("clusters").glob("*")):
        if is_held(folder / "keeper.lock"):
            names.append(folder.name)
    return names
