"""The process that has the devices: it is told how many before TensorFlow starts, and answers."""

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
from labkit.records.placed import Examined, Measured, Row
from labkit.simulate.placement import Machine, Plan, all_on_one
from labkit.worker.devices.request import DeviceRequest
from labkit.worker.devices.rules import kernels, rules
from labkit.worker.devices.speeds import links, products_and_copies
from labkit.worker.devices.towers import Step, towers
from labkit.worker.devices.traced import Traced, trace
from labkit.worker.executed_step import executed_graph, step_graph

if TYPE_CHECKING:
    import tensorflow as tf

LOSSES = 3  # steps of a plan that are compared with those of others
# A line of TensorFlow's placement log: `tower0/MatMul: (MatMul): /job:…/device:CPU:1`
PLACED = re.compile(r"^(\S+): \((\w+)\): \S*device:(\w+:\d+)$", re.MULTILINE)


class Devices:
    """One process's TensorFlow, with the logical devices that were asked for."""

    def __init__(self, asked: DeviceRequest, log: bool) -> None:
        import tensorflow as tf

        self.asked, self.clock = asked, WallClock()
        # All before anything of TensorFlow runs; the placer asks for the log only then.
        tf.debugging.set_log_device_placement(log)
        tf.config.threading.set_intra_op_parallelism_threads(asked.threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(asked.devices, 2))
        (processor,) = tf.config.list_physical_devices("CPU")
        each = [tf.config.LogicalDeviceConfiguration()] * asked.devices
        tf.config.set_logical_device_configuration(processor, each)
        found = tf.config.list_logical_devices()
        self.listed = [device.name.removeprefix("/device:") for device in found]

    def examine(self) -> Examined:
        """See `asking.examine`."""
        scoped = towers(self.asked, self.asked.names)
        log = logged(lambda: _once(scoped.run, scoped.batch))
        placed = step_graph(scoped.run, *scoped.batch, repeats=self.asked.repeats)
        step, traced = self._traced()
        plan = all_on_one(traced.tasks(), Machine(self.asked.names))
        tasks = traced.tasks(traced.timed(plan, step.batch, self.asked.repeats))
        lone = median(self._steps([traced.placed(plan)], step.batch, self.asked.repeats)[0])
        rows, latency, bandwidth = links(self.clock, self.asked)
        gpus = [name for name in self.listed if name.startswith("GPU")]
        return Examined(
            listed=self.listed,
            kernels=kernels("MatMul"),
            rules=rules(self.asked.names, gpus),
            scoped=placed,
            log=log,
            tasks=tasks,
            links=rows,
            latency=latency,
            bandwidth=bandwidth,
            dispatch=max(0.0, lone - tasks.seconds) / len(tasks.tasks),
            speeds=self.speeds(("CPU:0", gpus[0])) if gpus else [],
        )

    def carry_out(self, plans: Sequence[Plan], rounds: int) -> list[Measured]:
        """See `asking.carry_out`."""
        step, traced = self._traced()
        graphs, functions, losses = [], [], []
        for plan in plans:
            functions.append(traced.placed(plan))
            graphs.append(executed_graph(functions[-1], *step.batch))
            losses.append([float(functions[-1](*step.batch)) for _ in range(LOSSES)])
        seconds = self._steps(functions, step.batch, rounds)
        return [
            Measured(plan.name, taken, loss, len(graph.copies), graph)
            for plan, taken, loss, graph in zip(plans, seconds, losses, graphs, strict=True)
        ]

    def speeds(self, pair: tuple[str, str]) -> list[Row]:
        """See `asking.speeds_of`."""
        return products_and_copies(self.clock, self.asked, pair)

    def _traced(self) -> tuple[Step, Traced]:
        """The step without scopes; from here on graphs run as they are given."""
        step = towers(self.asked)
        _optimize(True)
        traced = trace(step)
        _optimize(False)  # no operation may vanish now, nor be fused
        return step, traced

    def _steps(
        self,
        functions: Sequence[Callable[..., tf.Tensor]],
        batch: tuple[tf.Tensor, tf.Tensor],
        rounds: int,
    ) -> list[list[float]]:
        """Seconds of each function's steps, in turns; back again every other round."""
        found: list[list[float]] = [[] for _ in functions]
        for number in range(1 + rounds):
            for at in list(range(len(functions)))[:: -1 if number % 2 else 1]:
                start = self.clock.now()
                functions[at](*batch).numpy()
                if number:  # the first ones warm up
                    found[at].append(self.clock.now() - start)
        return found


def logged(work: Callable[[], object]) -> Mapping[str, str]:
    """Device by node, as TensorFlow's placement log says it while this is done.

    The placer writes to the process's standard output past Python, so that is what is read.
    """
    flush = ctypes.CDLL(None).fflush
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        flush(None)
        os.dup2(file.fileno(), 1)
        try:
            work()
        finally:
            flush(None)
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        text = file.read().decode(errors="replace")
    return {name: device for name, _, device in PLACED.findall(text)}


def _once(step: Callable[..., Any], batch: tuple[tf.Tensor, tf.Tensor]) -> None:
    import tensorflow as tf

    tf.function(step)(*batch)


def _optimize(wanted: bool) -> None:
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not wanted})


def start(task: tuple[DeviceRequest, bool]) -> Mapping[str, Callable[..., object]]:
    """Set up, and answer."""
    devices = Devices(*task)
    calls = (devices.examine, devices.carry_out, devices.speeds)
    return {call.__name__: call for call in calls}


if __name__ == "__main__":
    serve(start)
