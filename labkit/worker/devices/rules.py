"""The rules of TensorFlow's placer, shown by examples of requested and actual devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.records.placed import Row
from labkit.worker.executed_step import executed_graph

if TYPE_CHECKING:
    import tensorflow as tf

# Prefix of the XLA compiler's device types. The kernel registry lists the device types of XLA, but
# operations cannot be placed on them.
COMPILED = "XLA"
LETTERS = 160  # maximum number of characters of an error text


def kernels(op: str) -> list[Row]:
    """Return the data types for which an operation has a kernel, for each device type.

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
        what: Description of the test, which users see.
        op: Type of the operation whose actual device is read from the executed graph.
        asked: Device that the operation requests.
        build: Function that creates the operation.
    """

    what: str
    op: str
    asked: str
    build: Callable[[], tf.Tensor]


def rules(devices: Sequence[str], gpus: Sequence[str]) -> list[Row]:
    """Run each test with soft and strict placement; return the actual device or the error.

    Args:
        devices: Names of the logical CPU devices; most tests request the last one.
        gpus: Names of the GPUs. If the machine has no GPU, the GPU test requests a GPU that does
            not exist.
    """
    import tensorflow as tf

    # The graph optimizer is switched off, because it would replace constant operations by their
    # results.
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
