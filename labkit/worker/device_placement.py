"""A process that places each operation of a training step on a device and measures the step."""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from labkit.communicator.clock import Clock, WallClock
from labkit.frameworks.child import serve
from labkit.records.step_graph import WAY, PlacementMeasurements, PlanMeasurement, Row
from labkit.simulate.placement import DeviceGroup, PlacementPlan, all_on_one
from labkit.worker.device_graph import TowerStep, Traced, towers, trace
from labkit.worker.devices import DeviceRequest
from labkit.worker.executed_step import executed_graph, step_graph

if TYPE_CHECKING:
    import tensorflow as tf


# The names of the XLA compiler's device types start with `COMPILED`. TensorFlow's kernel registry
# lists the device types of XLA, but operations cannot be placed on them.
COMPILED = "XLA"
LETTERS = 160  # An error text has at most `LETTERS` characters.


def kernels(op: str) -> list[Row]:
    """Return, for each device type, the data types for which an operation has a kernel.

    TensorFlow's kernel registry lists GPU kernels even on a machine without a GPU.
    """
    from tensorflow.python.framework import dtypes
    from tensorflow.python.framework import kernels as registry

    types_by_device: dict[str, set[str]] = {}
    for kernel in registry.get_registered_kernels_for_op(op).kernel:
        if kernel.device_type.startswith(COMPILED):
            continue
        types = types_by_device.setdefault(kernel.device_type, set())
        for constraint in kernel.constraint:
            if constraint.name == "T":
                allowed = constraint.allowed_values.list.type
                types |= {dtypes.as_dtype(dtype).name for dtype in allowed}
    return [
        {"op": op, "device": device, "types": ", ".join(sorted(types))}
        for device, types in sorted(types_by_device.items())
    ]


@dataclass(frozen=True)
class PlacementQuery:
    """A test of TensorFlow's placer: an operation, and the device that it requests.

    Attributes:
        what: Description of the test for users.
        op: Type of the operation whose actual device is read from the executed graph.
        asked: Device that the operation requests.
        build: Function that creates the operation.
    """

    what: str
    op: str
    asked: str
    build: Callable[[], tf.Tensor]


def rules(devices: Sequence[str], gpus: Sequence[str]) -> list[Row]:
    """Run each test with soft and strict placement; return the actual devices or errors.

    Args:
        devices: Names of the logical CPU devices; most tests request the last one.
        gpus: Names of the GPUs. If the machine has no GPU, the GPU test requests a GPU that does
            not exist.
    """
    import tensorflow as tf

    # TensorFlow's graph optimizer is switched off, because it would replace constant operations by
    # their results.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    rows = []
    try:
        for case in _cases(devices, gpus):
            for soft in (True, False):
                tf.config.set_soft_device_placement(soft)
                row: Row = {
                    "question": case.what,
                    "op": case.op,
                    "asked": case.asked,
                    "soft": soft,
                }
                rows.append(row | _outcome(case))
    finally:
        tf.config.set_soft_device_placement(True)
    return rows


def _outcome(case: PlacementQuery) -> Row:
    import tensorflow as tf

    try:
        graph = executed_graph(tf.function(case.build, autograph=False))
    except (tf.errors.OpError, TypeError, ValueError) as error:
        words = " ".join(str(error).split())
        return {"ran_on": "nowhere", "error": words[:LETTERS]}
    (ran,) = {operation.device for operation in graph.operations if operation.op == case.op}
    return {"ran_on": ran, "error": ""}


def _cases(devices: Sequence[str], gpus: Sequence[str]) -> Iterator[PlacementQuery]:
    import tensorflow as tf

    first, last = devices[0], devices[-1]
    gpu = gpus[0] if gpus else "GPU:0"
    ones = {name: tf.ones((2, 2), name) for name in ("float32", "int32", "uint32")}
    with tf.device(f"/{last}"):
        variable = tf.Variable(1.0)

    def product(kind: str, device: str) -> tf.Tensor:
        with tf.device(f"/{device}"):
            return tf.raw_ops.MatMul(a=ones[kind], b=ones[kind])

    def add() -> tf.Tensor:
        with tf.device(f"/{first}"):
            tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=1.0)
        return tf.ones(())

    def colocated() -> tf.Tensor:
        with tf.device(f"/{first}"):
            one = tf.raw_ops.MatMul(a=ones["float32"], b=ones["float32"])
        with tf.device(f"/{last}"), tf.compat.v1.colocate_with(one.op):
            return tf.raw_ops.Relu(features=one)

    suffix = "" if gpus else " without GPUs"
    yield PlacementQuery("a scope names a device", "MatMul", last, lambda: product("float32", last))
    yield PlacementQuery(
        f"an int32 product on a GPU{suffix}", "MatMul", gpu, lambda: product("int32", gpu)
    )
    yield PlacementQuery(
        "a data type without any kernel", "MatMul", last, lambda: product("uint32", last)
    )
    yield PlacementQuery(f"a variable is on {last}", "AssignAddVariableOp", first, add)
    yield PlacementQuery(f"colocated with an operation on {first}", "Relu", last, colocated)


HOPS = 16  # One graph makes `HOPS` round trips between two devices.
LINK = (4, 2**16, 2**20, 2**22)  # The constant LINK lists the sizes of the copied tensor in bytes.
FLOAT = 4  # The constant FLOAT is the size of a float32 in bytes.


def links(clock: Clock, request: DeviceRequest) -> tuple[list[Row], float, float]:
    """Measure copies between the first two devices; return rows, latency (s), bandwidth (bytes/s).

    One graph copies a tensor back and forth between two devices. Each copy takes a send, a receive
    and an identity operation. The latency is the time of one copy of the smallest tensor. The
    bandwidth is infinite if the largest tensor takes no longer than the smallest. Between devices
    that share memory, the bandwidth may be infinite.
    """
    import tensorflow as tf

    pair = request.names[:2]
    rows: list[Row] = []
    for size in LINK:
        with tf.device(f"/{pair[0]}"):
            value = tf.zeros((size // FLOAT,))

        def hop(x: tf.Tensor) -> tf.Tensor:
            for number in range(2 * HOPS):
                with tf.device(f"/{pair[1 - number % 2]}"):
                    x = tf.identity(x)
            with tf.device(f"/{pair[0]}"):
                return x[:1]

        hopping = tf.function(hop, autograph=False)
        seconds = _timed(clock, partial(_read_result, hopping, value), request.repeats)
        row: Row = {"from": pair[0], "to": pair[1], "bytes": size}
        rows.append(row | _spread([duration / (2 * HOPS) for duration in seconds]))
    least, most = float(rows[0]["seconds"]), float(rows[-1]["seconds"])
    longer = most - least
    return rows, least, (LINK[-1] - LINK[0]) / longer if longer > 0 else float("inf")


def products_and_copies(clock: Clock, request: DeviceRequest, pair: tuple[str, str]) -> list[Row]:
    """Measure n × n matrix products on two devices, copies between them, and round trips.

    In a round trip, two matrices are copied to the second device, and their product is copied back.
    The timer of each measurement stops only when the devices are idle. In rows without a round
    trip, the matrices are already on the device that multiplies them. A CPU uses as many threads as
    the request specifies. A GPU computes float32 with TensorFlow's default settings, which may
    include TF32.
    """
    import tensorflow as tf

    rows: list[Row] = []
    for size in request.sizes:
        matrices = []
        for device in pair:
            with tf.device(f"/{device}"):
                matrix = tf.random.uniform((size, size), seed=request.seed)
            matrices.append(matrix)
            seconds = _timed(clock, partial(_wait_for, _product(device), matrix), request.repeats)
            rows.append(_row("product", size, device, request.threads) | _spread(seconds))
        for source, target in ((0, 1), (1, 0)):
            move = partial(_wait_for, _move(pair[target]), matrices[source])
            seconds = _timed(clock, move, request.repeats)
            way = f"{pair[source]} to {pair[target]}"
            rows.append(_row("copy", size, way, request.threads) | _spread(seconds))
        other = tf.identity(matrices[0])
        round_trip = partial(_wait_for, _there_and_back(pair), matrices[0], other)
        seconds = _timed(clock, round_trip, request.repeats)
        way = f"{pair[0]} to {pair[1]} and back"
        rows.append(_row(WAY, size, way, request.threads) | _spread(seconds))
    return rows


def _row(what: str, size: int, device: str, threads: int) -> Row:
    nbytes = FLOAT * size * size
    return {"what": what, "n": size, "device": device, "bytes": nbytes, "threads": threads}


def _product(device: str) -> Callable[[tf.Tensor], tf.Tensor]:
    import tensorflow as tf

    def multiply(matrix: tf.Tensor) -> tf.Tensor:
        with tf.device(f"/{device}"):
            return tf.matmul(matrix, matrix)

    return multiply


def _there_and_back(pair: tuple[str, str]) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    import tensorflow as tf

    def multiply(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        with tf.device(f"/{pair[1]}"):
            product = tf.matmul(tf.identity(left), tf.identity(right))
        with tf.device(f"/{pair[0]}"):
            return tf.identity(product)

    return multiply


def _move(device: str) -> Callable[[tf.Tensor], tf.Tensor]:
    import tensorflow as tf

    def move(matrix: tf.Tensor) -> tf.Tensor:
        with tf.device(f"/{device}"):
            return tf.identity(matrix)

    return move


def _read_result(work: Callable[[tf.Tensor], tf.Tensor], argument: tf.Tensor) -> None:
    """Call a function, and copy its result to a NumPy array."""
    work(argument).numpy()


def _wait_for(work: Callable[..., tf.Tensor], *argument: tf.Tensor) -> None:
    """Call a function, and wait until all devices are idle, because GPU calls return early."""
    import tensorflow as tf

    work(*argument)
    tf.test.experimental.sync_devices()


def _timed(clock: Clock, work: Callable[[], object], repeats: int) -> list[float]:
    work()  # The first call compiles the function, so its time is not measured.
    seconds = []
    for _ in range(repeats):
        start = clock.now()
        work()
        seconds.append(clock.now() - start)
    return seconds


def _spread(seconds: list[float]) -> Row:
    return {"seconds": median(seconds), "seconds_low": min(seconds), "seconds_high": max(seconds)}


LOSSES = 3  # The losses of `LOSSES` steps must agree between placement plans.
# The pattern `PLACED` matches a line of TensorFlow's placement log, such as `tower0/MatMul:
# (MatMul): /job:…/device:CPU:1`.
PLACED = re.compile(r"^(\S+): \((\w+)\): \S*device:(\w+:\d+)$", re.MULTILINE)


class Devices:
    """TensorFlow in this process, with the logical devices that a request defines."""

    def __init__(self, request: DeviceRequest, log: bool) -> None:
        import tensorflow as tf

        self.request, self.clock = request, WallClock()
        # TensorFlow accepts settings of devices and threads only before its first operation.
        tf.debugging.set_log_device_placement(log)
        tf.config.threading.set_intra_op_parallelism_threads(request.threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(request.devices, 2))
        (processor,) = tf.config.list_physical_devices("CPU")
        configurations = [tf.config.LogicalDeviceConfiguration()] * request.devices
        tf.config.set_logical_device_configuration(processor, configurations)
        devices = tf.config.list_logical_devices()
        self.listed = [device.name.removeprefix("/device:") for device in devices]

    def examine(self) -> PlacementMeasurements:
        """Measure placements, tasks and times (`labkit.worker.devices.examine`)."""
        scoped = towers(self.request, self.request.names)
        log = logged(lambda: _once(scoped.run, scoped.batch))
        placed = step_graph(scoped.run, *scoped.batch, repeats=self.request.repeats)
        step, traced = self._traced()
        plan = all_on_one(traced.tasks(), DeviceGroup(self.request.names))
        tasks = traced.tasks(traced.timed(plan, step.batch, self.request.repeats))
        lone = median(self._steps([traced.placed(plan)], step.batch, self.request.repeats)[0])
        rows, latency, bandwidth = links(self.clock, self.request)
        gpus = [name for name in self.listed if name.startswith("GPU")]
        return PlacementMeasurements(
            listed=self.listed,
            kernels=kernels("MatMul"),
            rules=rules(self.request.names, gpus),
            scoped=placed,
            log=log,
            tasks=tasks,
            links=rows,
            latency=latency,
            bandwidth=bandwidth,
            dispatch=max(0.0, lone - tasks.seconds) / len(tasks.tasks),
            speeds=self.speeds(("CPU:0", gpus[0])) if gpus else [],
        )

    def carry_out(self, plans: Sequence[PlacementPlan], rounds: int) -> list[PlanMeasurement]:
        """Run and time a training step by each plan (`labkit.worker.devices.carry_out`)."""
        step, traced = self._traced()
        graphs, functions, losses = [], [], []
        for plan in plans:
            functions.append(traced.placed(plan))
            graphs.append(executed_graph(functions[-1], *step.batch))
            losses.append([float(functions[-1](*step.batch)) for _ in range(LOSSES)])
        seconds = self._steps(functions, step.batch, rounds)
        return [
            PlanMeasurement(plan.name, plan_seconds, loss, len(graph.copies), graph)
            for plan, plan_seconds, loss, graph in zip(plans, seconds, losses, graphs, strict=True)
        ]

    def speeds(self, pair: tuple[str, str]) -> list[Row]:
        """Measure matrix products and copies on two devices (`devices.speeds_of`)."""
        return products_and_copies(self.clock, self.request, pair)

    def _traced(self) -> tuple[TowerStep, Traced]:
        """Trace a step without device requests, then switch TensorFlow's graph optimizer off."""
        step = towers(self.request)
        _optimize(True)
        traced = trace(step)
        # Graphs that are built later must keep all operations, so TensorFlow's graph optimizer is
        # switched off.
        _optimize(False)
        return step, traced

    def _steps(
        self,
        functions: Sequence[Callable[..., tf.Tensor]],
        batch: tuple[tf.Tensor, tf.Tensor],
        rounds: int,
    ) -> list[list[float]]:
        """Return step times of each function; odd rounds call the functions in reverse order."""
        seconds: list[list[float]] = [[] for _ in functions]
        for number in range(1 + rounds):
            for at in list(range(len(functions)))[:: -1 if number % 2 else 1]:
                start = self.clock.now()
                functions[at](*batch).numpy()
                if number:  # The first round is a warmup, so its time is not recorded.
                    seconds[at].append(self.clock.now() - start)
        return seconds


def logged(work: Callable[[], object]) -> Mapping[str, str]:
    """Call a function; read the device of each node from TensorFlow's placement log.

    The placer writes its log to file descriptor 1, which is redirected to a file during the call.
    """
    flush = ctypes.CDLL(None).fflush
    saved_descriptor = os.dup(1)
    with tempfile.TemporaryFile() as file:
        flush(None)
        os.dup2(file.fileno(), 1)
        try:
            work()
        finally:
            flush(None)
            os.dup2(saved_descriptor, 1)
            os.close(saved_descriptor)
        file.seek(0)
        text = file.read().decode(errors="replace")
    return {name: device for name, _, device in PLACED.findall(text)}


def _once(step: Callable[..., Any], batch: tuple[tf.Tensor, tf.Tensor]) -> None:
    import tensorflow as tf

    tf.function(step)(*batch)


def _optimize(enabled: bool) -> None:
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not enabled})


def start(task: tuple[DeviceRequest, bool]) -> Mapping[str, Callable[..., object]]:
    """Set up the logical devices; return the functions that the parent process can call."""
    devices = Devices(*task)
    calls = (devices.examine, devices.carry_out, devices.speeds)
    return {call.__name__: call for call in calls}


if __name__ == "__main__":
    serve(start)
