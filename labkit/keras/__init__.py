"""The drop-in: data parallel training of a user's own Keras model, in a script or a cell.

    communicator = init()
    model.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.1), communicator), ...)
    model.fit(shard(dataset, communicator), callbacks=callbacks(communicator))

Every rank runs these lines. The mean of the gradients is taken where the optimizer applies them,
so a `train_step` of the user's own keeps working.
"""

from labkit.keras.evaluation import evaluate, global_metrics, predict
from labkit.keras.optimizer import DistributedOptimizer, check_compressor, copy_of
from labkit.keras.ranks import init, use_one_device
from labkit.keras.replicas import Synchronize, attach, broadcast, callbacks
from labkit.keras.sharding import shard

__all__ = [
    "DistributedOptimizer",
    "Synchronize",
    "attach",
    "broadcast",
    "callbacks",
    "check_compressor",
    "copy_of",
    "evaluate",
    "global_metrics",
    "init",
    "predict",
    "shard",
    "use_one_device",
]
