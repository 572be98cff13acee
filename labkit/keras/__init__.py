"""Data-parallel training of a user's own Keras model, in a script or a notebook cell.

    communicator = init()
    model.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.1), communicator), ...)
    model.fit(shard(dataset, communicator), callbacks=callbacks(communicator))

Every rank executes the calls of `init`, `compile` and `fit`. Before the optimizer applies
gradients, it averages the gradients over the ranks, so a custom `train_step` works unchanged.
Losses that are passed to `compile` cover the whole batch of all ranks. Each loss has the value that
one process would compute (module `whole_batch`). A custom `train_step` may compute its own loss.
Labkit treats the loss of a custom `train_step` as a mean over samples.
"""

from __future__ import annotations

import atexit

import labkit.keras.tensorflow_backend  # noqa: F401

# isort: split
import tensorflow as tf

from labkit.common.nearest import named_arguments
from labkit.common.quantities import parse_limit
from labkit.communicator import Communicator, world
from labkit.keras.evaluation import evaluate, global_metrics, predict, prepare_restarts
from labkit.keras.lars import LARS
from labkit.keras.optimizer import (
    DistributedOptimizer,
    Recipe,
    beyond_configuration,
    check_compressor,
    copy_of,
    refuse_steps,
    refuse_variables,
    view_of,
    without_replica_sum,
)
from labkit.keras.replica_consistency import broadcast
from labkit.keras.replicas import Synchronize, attach, callbacks
from labkit.keras.sharding import part_of, shard

__all__ = [
    "LARS",
    "DistributedOptimizer",
    "Recipe",
    "Synchronize",
    "attach",
    "beyond_configuration",
    "broadcast",
    "callbacks",
    "check_compressor",
    "copy_of",
    "evaluate",
    "global_metrics",
    "init",
    "part_of",
    "predict",
    "refuse_steps",
    "refuse_variables",
    "shard",
    "use_one_device",
    "view_of",
    "without_replica_sum",
]


@named_arguments()
def init(timeout: float | str = 600.0) -> Communicator:
    """Join the ranks that mpiexec started, and assign a GPU to each rank if there are GPUs.

    Args:
        timeout: Maximum seconds that a rank waits for another rank before raising an error;
            default: 600.
    """
    communicator = world(timeout=parse_limit(timeout))
    prepare_restarts(communicator)
    atexit.register(communicator.leave)
    use_one_device(communicator)
    return communicator


def use_one_device(communicator: Communicator) -> None:
    """Make only one GPU visible to TensorFlow on this rank, and allocate its memory on demand."""
    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        return
    device = devices[communicator.local_rank % len(devices)]
    # If TensorFlow already has the same device settings, `set_visible_devices` and
    # `set_memory_growth` have no effect.
    tf.config.set_visible_devices(device, "GPU")
    tf.config.experimental.set_memory_growth(device, True)
