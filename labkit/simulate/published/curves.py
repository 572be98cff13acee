"""Published figures, to compare shapes with: a cliff, an order, an efficiency, an error.

Marks of the sources: A abstract of the paper, C computed from its formula, D documentation of the
project, F read off a figure (± 3 %), P text of the paper, R the authors' raw results. A ratio
measured on one machine is never set against a cluster's absolute number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scaling:
    """A published scaling curve.

    Args: name; what: model and set-up; unit: of `workers`; workers: their numbers, the first is
    the base; speedup: over the base, as many as workers; source, mark: where it is from; base:
    what the base did, images/s, where that was published.
    """

    name: str
    what: str
    unit: str
    workers: tuple[int, ...]
    speedup: tuple[float, ...]
    source: str
    mark: str
    base: float = 0.0

    @property
    def efficiency(self) -> tuple[float, ...]:
        """speedup · base / workers: T₁ / (n · Tₙ) for a base of one worker."""
        pairs = zip(self.speedup, self.workers, strict=True)
        return tuple(speedup * self.workers[0] / workers for speedup, workers in pairs)


def _rates(rates: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(rate / rates[0] for rate in rates)


_BUGLIARELLO = "Bugliarello 2017, e-bug/distributed-tensorflow-benchmarks"
_SERVERS = "InceptionV3 (gradients 92.9 MB), TensorFlow 1.1 parameter servers, batch 64 a GPU"
_GPUS = (1, 2, 4, 8, 16, 32, 64, 128)
_VISHNU = "Vishnu 2016, Distributed TensorFlow with MPI"

PUBLISHED: dict[str, Scaling] = {
    each.name: each
    for each in (
        Scaling(
            "piz-daint",
            f"{_SERVERS}, 1 P100 a node",
            "GPUs",
            _GPUS,
            _rates((138.23, 264.57, 523.38, 1018.18, 2001.00, 3840.35, 7118.31, 9219.70)),
            _BUGLIARELLO,
            "R",
            138.23,
        ),
        Scaling(
            "p2.xlarge",
            f"{_SERVERS}, 1 K80 a node",
            "GPUs",
            _GPUS,
            _rates((30.55, 57.45, 114.57, 228.41, 431.65, 825.64, 996.32, 1077.59)),
            _BUGLIARELLO,
            "R",
            30.55,
        ),
        Scaling(
            "p2.8xlarge",
            f"{_SERVERS}, 8 K80 a node",
            "GPUs",
            _GPUS,
            _rates((30.55, 58.38, 116.34, 230.75, 448.57, 863.72, 1731.31, 3333.20)),
            _BUGLIARELLO,
            "R",
            30.55,
        ),
        Scaling(
            "vishnu-mnist-dnn",
            "MNIST-DNN, MPI allreduce",
            "cores",
            (1, 32),
            (1.0, 11.64),
            _VISHNU,
            "D",
        ),
        Scaling(
            "vishnu-mnist-cnn",
            "MNIST-CNN, MPI allreduce",
            "cores",
            (16, 64),
            (1.0, 1.41),
            _VISHNU,
            "D",
        ),
        *(
            Scaling(name, f"{what}, MaTEx", "CPUs", (1, 16), (1.0, speedup), "MaTEx", "F")
            for name, what, speedup in (
                ("matex-alexnet", "AlexNet", 10.9),
                ("matex-googlenet", "GoogLeNet", 14.7),
                ("matex-inceptionv3", "InceptionV3", 14.5),
                ("matex-resnet50", "ResNet50", 15.3),
            )
        ),
        *(
            Scaling(name, what, "nodes", workers, speedup, "Das 2016", "A")
            for name, what, workers, speedup in (
                ("das-vgg-a", "VGG-A", (1, 64, 128), (1.0, 53.0, 90.0)),
                ("das-overfeat", "OverFeat", (1, 64), (1.0, 42.0)),
                ("das-dnn", "7-layer DNN", (1, 16), (1.0, 6.5)),
                ("das-aws", "Ethernet, AWS, about", (1, 16), (1.0, 14.0)),
            )
        ),
    )
}


INCEPTION_MB = 92.9  # gradients of InceptionV3
SERVERS = {1: 1, 2: 1, 4: 3, 8: 2, 16: 4, 32: 12, 64: 40, 128: 116}  # best on piz-daint (R)
HOROVOD = {"InceptionV3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68}  # D
BYTEPS = {"Horovod": 0.70, "BytePS": 0.90}  # about (R)
BUBBLE_1F1B = {"p = 8, m = 24": 0.243, "p = 8, m = 32": 0.199, "p = 8, m = 64": 0.124}  # P
TORCHGPIPE = {"1 stage": 0.853, "2 stages": 1.41, "4 stages": 2.77, "8 stages": 4.29}  # R
TORCHGPIPE_AMOEBANET = {"8 stages, m = 1": 0.93, "8 stages, m = 4": 2.62, "8 stages, m = 32": 4.95}
DDG = {"ResNet-110, K = 2": 1.40, "ResNet-110, K = 3": 1.70, "ResNet-110, K = 4": 1.84}  # (F)
DDG_WRN = {"WRN-28-10, K = 2": 1.37, "WRN-28-10, K = 3": 1.57, "WRN-28-10, K = 4": 1.64}  # R
DGX_1 = 0.9956  # efficiency of InceptionV3 on 8 P100 in one node (Bugliarello 2017, P)


@dataclass(frozen=True)
class Softsync:
    """What was published of n-softsync at a rate.

    Args: remedy: of the rate; splits: n, none: all; error: share of test samples told wrong; what:
    data and learners; source, mark: where it is from.
    """

    remedy: str | None
    splits: tuple[int, ...]
    error: float
    what: str = "CIFAR-10, 30 learners"
    source: str = "Zhang 2016, arXiv 1511.05950"
    mark: str = "P"


SOFTSYNC = (Softsync(None, (15, 30), 0.90), Softsync("per_gradient", (), 0.18))
SOFTSYNC_LATER = 1e-4  # gradients more than 2n updates old are a smaller share (Zhang 2016, P)
