"""The process that sets up logical devices before TensorFlow starts, then answers requests."""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from labkit.communicator.clock import WallClock
from labkit.frameworks.child import serve
from labkit.records.placed import PlacementMeasurements, PlanMeasurement, Row
from labkit.simulate.placement import DeviceGroup, PlacementPlan, all_on_one
from labkit.worker.devices.request import DeviceRequest
from labkit.worker.devices.rules import kernels, rules
from labkit.worker.devices.speeds import links, products_and_copies
from labkit.worker.devices.towers import TowerStep, towers
from labkit.worker.devices.traced_step import Traced, trace
from labkit.worker.executed_step import executed_graph, step_graph

if TYPE_CHECKING:
    import tensorflow as tf

LOSSES = 3  # number of steps whose losses must agree between plans
# This pattern matches a line of TensorFlow's placement log, such as `tower0/MatMul: (MatMul):
# /job:…/device:CPU:1`.
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
        """Measure placements, tasks and times, see `client.examine`."""
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
        """Run and time a training step by each plan, see `client.carry_out`."""
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
        """Measure matrix products and copies on two devices, see `client.speeds_of`."""
        return products_and_copies(self.clock, self.request, pair)

    def _traced(self) -> tuple[TowerStep, Traced]:
        """Trace a step without device requests, then switch TensorFlow's graph optimizer off."""
        step = towers(self.request)
        _optimize(True)
        traced = trace(step)
        _optimize(False)  # graphs that are built later must keep all operations
        return step, traced

    def _steps(
        self,
        functions: Sequence[Callable[..., tf.Tensor]],
        batch: tuple[tf.Tensor, tf.Tensor],
        rounds: int,
    ) -> list[list[float]]:
        """Return step times of each function; every second round calls them in reverse order."""
        seconds: list[list[float]] = [[] for _ in functions]
        for number in range(1 + rounds):
            for at in list(range(len(functions)))[:: -1 if number % 2 else 1]:
                start = self.clock.now()
                functions[at](*batch).numpy()
                if number:  # the first round is a warmup
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
