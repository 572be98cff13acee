"""A process joins the others that mpiexec has started."""

from __future__ import annotations

import atexit

import tensorflow as tf

from labkit.communicator import Communicator, world


def init(limit: float = 600.0) -> Communicator:
    """Join the ranks that mpiexec started; on GPU machines take the device of the local rank.

    Args:
        limit: seconds after which waiting for another rank raises.
    """
    communicator = world(limit=limit)
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
