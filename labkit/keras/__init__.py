"""The drop-in: data parallel training of a user's own Keras model, in a script or a cell.

    communicator = init()
    model.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.1), communicator), ...)
    model.fit(shard(dataset, communicator), callbacks=callbacks(communicator))

Every rank runs these lines. The mean of the gradients is taken where the optimizer applies them,
so a `train_step` of the user's own keeps working. The losses that a model is compiled with count as
in the whole batch, see `whole_batch`; a loss of the user's own making is a mean over rows.
"""

from __future__ import annotations

import atexit

import labkit.keras.tensorflow_backend  # noqa: F401

# isort: split
import tensorflow as tf

from labkit.common.nearest import named_arguments
from labkit.common.quantities import parse_limit
from labkit.communicator import Communicator, world
from labkit.keras.evaluation import evaluate, global_metrics, predict
from labkit.keras.failed_fits import prepare_restarts
from labkit.keras.lars import LARS
from labkit.keras.optimizer import DistributedOptimizer, check_compressor
from labkit.keras.optimizer_state import (
    Recipe,
    beyond_configuration,
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
def init(limit: float | str = 600.0) -> Communicator:
    """Join the ranks that mpiexec started; on GPU machines take the device of the local rank.

    Args:
        limit: seconds after which waiting for another rank raises.
    """
    communicator = world(limit=parse_limit(limit))
    prepare_restarts(communicator)
    atexit.register(communicator.leave)
    use_one_device(communicator)
    return communicator


def use_one_device(communicator: Communicator) -> None:
    """Show TensorFlow one GPU a rank of this host, with memory that grows; without GPUs nothing."""
    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        return
    own = devices[communicator.local_rank % len(devices)]
    # Both calls do nothing where that is so already, also when TensorFlow has started.
    tf.config.set_visible_devices(own, "GPU")
    tf.config.experimental.set_memory_growth(own, True)
