"""Published scaling of allreduce, reproduced by formulas from the shapes of network layers.

The papers give no compute times of the networks. The formulas assume that compute time is
proportional to the number of operations, and fit only the cost of the exchange. There are two ways
to count the operations of the neural networks in Horovod's results. The results were known before a
way of counting was chosen, so the tables show both ways of counting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from labkit.schedules import AlphaBetaCost
from labkit.simulate.costs import textbook
from labkit.simulate.published.reproduction import (
    BYTEPS,
    HOROVOD,
    PUBLISHED,
    Figures,
    Parameters,
    Reproduction,
)
from labkit.simulate.published.shapes import (
    Layers,
    alexnet,
    googlenet,
    inception_v3,
    multiplications,
    nbytes,
    operations,
    overfeat,
    resnet,
    vgg,
)

LINK = 25e9 / 8  # bytes/s of a 25 Gb/s Ethernet link
PART = "time to exchange all bytes once, in steps of one worker"
SHARE = "exposed time, as a share of the ring's time"
STEP = "step of InceptionV3, s"
NETWORKS: Mapping[str, Callable[[], Layers]] = {
    "AlexNet": alexnet,
    "GoogLeNet": googlenet,
    "InceptionV3": inception_v3,
    "OverFeat": overfeat,
    "ResNet50": partial(resnet, (3, 4, 6, 3)),
    "ResNet-101": partial(resnet, (3, 4, 23, 3)),
    "VGG-A": partial(vgg, (1, 1, 2, 2, 2)),
    "VGG-16": partial(vgg, (2, 2, 3, 3, 3)),
}


def _ring(workers: int) -> float:
    """Return the traffic on the link of one rank in a ring, as a multiple of the buffer size."""
    return textbook("ring", workers).beta


def _density(network: str) -> float:
    """Return the bytes of gradients to exchange per operation of a neural network."""
    layers = NETWORKS[network]()
    return nbytes(layers) / operations(layers)


# Horovod's results: a worker processes 64 images per training step, and the step time of
# InceptionV3 on a P100 GPU is Bugliarello's result.
def _horovod_ring(network: str) -> float:
    cost = AlphaBetaCost(beta=_ring(512))
    return cost.beta * nbytes(NETWORKS[network]()) / LINK


def _horovod_fit(known: Figures) -> Parameters:
    (name, efficiency), *_ = known.items()
    step = 64 / PUBLISHED["piz-daint"].base
    return {STEP: step, SHARE: step * (1 / efficiency - 1) / _horovod_ring(name)}


def _horovod(
    parameters: Parameters, name: str, work: Callable[[Layers], float] = multiplications
) -> float:
    step = parameters[STEP] * work(NETWORKS[name]()) / work(inception_v3())
    return step / (step + parameters[SHARE] * _horovod_ring(name))


# BytePS results: there is one extra server host per worker host, so a worker sends all bytes once
# and receives all bytes once, concurrently.
def _byteps_fit(known: Figures) -> Parameters:
    return {PART: (1 / known["Horovod"] - 1) / _ring(256)}


def _byteps(parameters: Parameters, name: str) -> float:
    return 1 / (1 + parameters[PART] * (_ring(256) if name == "Horovod" else 1))


# MaTEx and Das divide one batch among p workers: T(p) / T(1) = 1 / p + `_ring(p)` · c, where the
# constant c is fitted.
def _divided_fit(known: Figures) -> Parameters:
    (name, speedup), *_ = known.items()
    network, workers = _place(name)
    return {f"{PART}, {network}": (1 / speedup - 1 / workers) / _ring(workers)}


def _divided(parameters: Parameters, name: str) -> float:
    network, workers = _place(name)
    ((what, part),) = parameters.items()
    part *= _density(network) / _density(what.removeprefix(f"{PART}, "))
    return 1 / (1 / workers + _ring(workers) * part)


def _place(name: str) -> tuple[str, int]:
    """Split a name such as `VGG-A, 64` into the neural network and the number of workers."""
    network, _, workers = name.partition(", ")
    return network, int(workers)


# Vishnu's results: layers are small, so each of the lg p butterfly rounds on p cores costs only its
# latency.
ROUND = "time of a round, in steps of one core"


def _vishnu_fit(known: Figures) -> Parameters:
    (name, speedup), *_ = known.items()
    cores = int(name.split()[-1])
    return {ROUND: (1 / speedup - 1 / cores) / textbook("butterfly", cores).alpha}


def _vishnu(parameters: Parameters, name: str) -> float:
    first, last = (
        1 / cores + parameters[ROUND] * textbook("butterfly", cores).alpha
        for cores in map(int, name.split(", ")[1].split(" to "))
    )
    return first / last


def _figures(**names: str) -> Figures:
    """Return the last speed-up of each curve; keywords are curve names, values are result keys."""
    return {what: PUBLISHED[name.replace("_", "-")].speedup[-1] for name, what in names.items()}


_DAS = {
    f"VGG-A, {n}": s for n, s in zip((64, 128), PUBLISHED["das-vgg-a"].speedup[1:], strict=True)
}
_UP, _SHARE = "speed-up", "efficiency"

REPRODUCTIONS = (
    Reproduction(
        "Horovod",
        "D",
        "512 GPUs, 25 Gb/s",
        _SHARE,
        HOROVOD,
        _horovod,
        ("InceptionV3",),
        _horovod_fit,
    ),
    Reproduction(
        "Horovod",
        "D",
        "512 GPUs, 25 Gb/s, without minimal filtering",
        _SHARE,
        HOROVOD,
        partial(_horovod, work=operations),
        ("InceptionV3",),
        _horovod_fit,
    ),
    Reproduction(
        "BytePS", "R", "BERT-large, 256 GPUs", _SHARE, BYTEPS, _byteps, ("Horovod",), _byteps_fit
    ),
    Reproduction(
        "Vishnu 2016",
        "D",
        "same time per round in both networks",
        _UP,
        _figures(vishnu_mnist_dnn="MNIST-DNN, 1 to 32", vishnu_mnist_cnn="MNIST-CNN, 16 to 64"),
        _vishnu,
        ("MNIST-DNN, 1 to 32",),
        _vishnu_fit,
    ),
    Reproduction(
        "MaTEx",
        "F",
        "16 CPUs",
        _UP,
        _figures(
            matex_alexnet="AlexNet, 16",
            matex_googlenet="GoogLeNet, 16",
            matex_inceptionv3="InceptionV3, 16",
            matex_resnet50="ResNet50, 16",
        ),
        _divided,
        ("AlexNet, 16",),
        _divided_fit,
    ),
    Reproduction(
        "Das 2016",
        "A",
        "nodes",
        _UP,
        _DAS | _figures(das_overfeat="OverFeat, 64"),
        _divided,
        ("VGG-A, 64",),
        _divided_fit,
    ),
    Reproduction(
        "Das 2016",
        "A",
        "no layer shapes, a single value",
        _UP,
        _figures(das_dnn="7-layer DNN, 16", das_aws="AWS, 16"),
    ),
)
