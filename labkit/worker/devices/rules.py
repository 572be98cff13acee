"""What TensorFlow's placer does with what it is asked, and the kernels that it has to choose of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.records.placed import Row
from labkit.worker.executed_step import executed_graph

if TYPE_CHECKING:
    import tensorflow as tf

# Device types of XLA's compiler, which stand in the registry beside those that can be placed on.
COMPILED = "XLA"
LETTERS = 160  # of an error


def kernels(op: str) -> list[Row]:
    """A row a device type: the types for which TensorFlow's registry has a kernel for it.

    The registry is part of the library: it knows GPU kernels on a machine without a GPU, too.
    """
    from tensorflow.python.framework import dtypes
    from tensorflow.python.framework import kernels as registry

    found: dict[str, set[str]] = {}
    for kernel in registry.get_registered_kernels_for_op(op).kernel:
        if kernel.device_type.startswith(COMPILED):
            continue
        types = found.setdefault(kernel.device_type, set())
        for constraint in kernel.constraint:
            if constraint.name == "T":
                allowed = constraint.allowed_values.list.type
                types |= {dtypes.as_dtype(each).name for each in allowed}
    return [
        {"op": op, "device": device, "types": ", ".join(sorted(types))}
        for device, types in sorted(found.items())
    ]


@dataclass(frozen=True)
class Case:
    """A question to the placer.

    Attributes:
        what: in words.
        op: the type of the operation that is looked for in the graph that ran.
        asked: the device.
        build: makes the operation.
    """

    what: str
    op: str
    asked: str
    build: Callable[[], tf.Tensor]


def rules(devices: Sequence[str], gpus: Sequence[str]) -> list[Row]:
    """A row a question and whether placement was soft: where the operation ran, or the error.

    Args:
        devices: names of logical CPU devices; the last one is asked for.
        gpus: of the GPUs; empty: the first one is asked for although it is not there.
    """
    import tensorflow as tf

    # Or what is computed from constants alone would be computed when it is compiled.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    found = []
    try:
        for case in _cases(devices, gpus):
            for soft in (True, False):
                tf.config.set_soft_device_placement(soft)
                told: Row = {
                    "question": case.what,
                    "op": case.op,
                    "asked": case.asked,
                    "soft": soft,
                }
                found.append(told | _outcome(case))
    finally:
        tf.config.set_soft_device_placement(True)
    return found


def _outcome(case: Case) -> Row:
    import tensorflow as tf

    try:
        graph = executed_graph(tf.function(case.build, autograph=False))
    except (tf.errors.OpError, TypeError, ValueError) as error:
        words = " ".join(str(error).split())
        return {"ran_on": "nowhere", "error": words[:LETTERS]}
    (ran,) = {operation.device for operation in graph.operations if operation.op == case.op}
    return {"ran_on": ran, "error": ""}


def _cases(devices: Sequence[str], gpus: Sequence[str]) -> Iterator[Case]:
    import tensorflow as tf

    first, last = devices[0], devices[-1]
    gpu = gpus[0] if gpus else "GPU:0"
    ones = {name: tf.ones((2, 2), name) for name in ("float32", "int32", "uint32")}
    with tf.device(f"/{last}"):
        variable = tf.Variable(1.0)

    def product(kind: str, device: str) -> tf.Tensor:
        with tf.device(f"/{device}"):
            return tf.raw_ops.MatMul(a=ones[kind], b=ones[kind])

    def added() -> tf.Tensor:
        with tf.device(f"/{first}"):
            tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=1.0)
        return tf.ones(())

    def beside() -> tf.Tensor:
        with tf.device(f"/{first}"):
            one = tf.raw_ops.MatMul(a=ones["float32"], b=ones["float32"])
        with tf.device(f"/{last}"), tf.compat.v1.colocate_with(one.op):
            return tf.raw_ops.Relu(features=one)

    there = "" if gpus else ", where none is"
    yield Case("a scope names a device", "MatMul", last, lambda: product("float32", last))
    yield Case(f"an int32 product on a GPU{there}", "MatMul", gpu, lambda: product("int32", gpu))
    yield Case("a type without any kernel", "MatMul", last, lambda: product("uint32", last))
    yield Case(f"a variable is on {last}", "AssignAddVariableOp", first, added)
    yield Case(f"colocated with what is on {first}", "Relu", last, beside)
