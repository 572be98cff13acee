"""Published scaling of allreduce, reproduced by formulas from the shapes of network layers.

The papers give no compute times of the networks. The formulas assume that compute time is
proportional to the number of operations. Only the cost of the exchange is fitted. The operations of
a network can be counted in two ways. Because the results were known beforehand, the tables show
both ways of counting operations.

Bytes and operations of the layers of published networks, computed from their architectures.

All values are computed from the shapes of layers (letter C among the types of source). Each layer
has two tensors, a kernel and a vector. The vector is a bias or the shift of a batch normalization.
A batch normalization has no scale, as in InceptionV3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

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

FLOAT = 4  # bytes
# A tuple `Step` describes a convolution by its output channels, kernel height and kernel width. The
# tuple of a convolution with stride 2 has one more entry. The extra entry is the new side length of
# the image.
Step: TypeAlias = tuple[int, ...]


class LayerShape(NamedTuple):
    """A convolution; a dense layer is a convolution with one output position.

    Args:
        ins, outs: Numbers of input and output channels.
        height, width: Size of the kernel.
        positions: Number of positions (pixels) of the output.
        stride: Stride of the kernel.
    """

    ins: int
    outs: int
    height: int = 1
    width: int = 1
    positions: int = 1
    stride: int = 1

    @property
    def tensors(self) -> tuple[int, int]:
        """Bytes of the kernel, and bytes of the bias or shift vector."""
        return FLOAT * self.ins * self.outs * self.height * self.width, FLOAT * self.outs

    @property
    def operations(self) -> int:
        """Number of multiply-adds in the forward pass of one sample."""
        return self.ins * self.outs * self.height * self.width * self.positions

    @property
    def multiplications(self) -> float:
        """Number of multiplications with minimal filtering: 16, not 36, per 3 × 3 kernel, stride 1.

        Source: Lavin and Gray 2016, *Fast algorithms for convolutional neural networks* (arXiv
        1509.09308), F(2 × 2, 3 × 3).
        """
        minimal = (self.height, self.width, self.stride) == (3, 3, 1) and self.positions > 1
        return self.operations * (16 / 36 if minimal else 1)


Layers: TypeAlias = list[LayerShape]


def nbytes(layers: Sequence[LayerShape]) -> int:
    """Return the total bytes of the gradients of all layers."""
    return sum(sum(layer.tensors) for layer in layers)


def operations(layers: Sequence[LayerShape]) -> int:
    """Return the total of `LayerShape.operations` over all layers."""
    return sum(layer.operations for layer in layers)


def multiplications(layers: Sequence[LayerShape]) -> float:
    """Return the total of `LayerShape.multiplications` over all layers."""
    return sum(layer.multiplications for layer in layers)


def _chain(ins: int, side: int, *steps: Step) -> Layers:
    """Return a chain of convolutions on images of side × side positions."""
    layers = []
    for outs, height, width, *new_side in steps:
        side = new_side[0] if new_side else side
        layers.append(LayerShape(ins, outs, height, width, side**2, 1 + len(new_side)))
        ins = outs
    return layers


def _dense(*sizes: int) -> Layers:
    return [LayerShape(ins, outs) for ins, outs in pairwise(sizes)]


def inception_v3(classes: int = 1001) -> Layers:
    """InceptionV3 (Szegedy et al. 2015, arXiv 1512.00567), 299 × 299 images, no auxiliary head."""
    net = _chain(3, 149, (32, 3, 3, 149), (32, 3, 3, 147), (64, 3, 3))
    # The image shrinks because the convolution has no padding; the stride remains 1.
    net[1] = net[1]._replace(stride=1)
    net += _chain(64, 73, (80, 1, 1)) + _chain(80, 71, (192, 3, 3))
    for ins, pooled in ((192, 32), (256, 64), (288, 64)):
        net += _chain(ins, 35, (64, 1, 1)) + _chain(ins, 35, (48, 1, 1), (64, 5, 5))
        net += _chain(ins, 35, (64, 1, 1), (96, 3, 3), (96, 3, 3)) + _chain(ins, 35, (pooled, 1, 1))
    net += _chain(288, 35, (384, 3, 3, 17))
    net += _chain(288, 35, (64, 1, 1), (96, 3, 3), (96, 3, 3, 17))
    for n in (128, 160, 160, 192):
        net += _chain(768, 17, (192, 1, 1)) + _chain(768, 17, (n, 1, 1), (n, 1, 7), (192, 7, 1))
        net += _chain(768, 17, (n, 1, 1), (n, 7, 1), (n, 1, 7), (n, 7, 1), (192, 1, 7))
        net += _chain(768, 17, (192, 1, 1))
    net += _chain(768, 17, (192, 1, 1), (320, 3, 3, 8))
    net += _chain(768, 17, (192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3, 8))
    for ins in (1280, 2048):
        net += _chain(ins, 8, (320, 1, 1)) + _chain(ins, 8, (384, 1, 1), (384, 1, 3))
        net += _chain(384, 8, (384, 3, 1))
        net += _chain(ins, 8, (448, 1, 1), (384, 3, 3), (384, 1, 3)) + _chain(384, 8, (384, 3, 1))
        net += _chain(ins, 8, (192, 1, 1))
    return net + _dense(2048, classes)


def resnet(blocks: Sequence[int]) -> Layers:
    """ResNet with bottlenecks (He et al. 2015, arXiv 1512.03385): (3, 4, 6, 3) is ResNet-50."""
    net, ins = _chain(3, 112, (64, 7, 7, 112)), 64
    for stage, count in enumerate(blocks):
        width, side = 64 << stage, 56 >> stage
        for block in range(count):
            first: Step = (width, 1, 1, side) if block == 0 else (width, 1, 1)
            net += _chain(ins, side, first, (width, 3, 3), (4 * width, 1, 1))
            net += _chain(ins, side, (4 * width, 1, 1)) if block == 0 else []
            ins = 4 * width
    return net + _dense(2048, 1000)


def vgg(convolutions: Sequence[int]) -> Layers:
    """VGG (Simonyan and Zisserman 2014, arXiv 1409.1556): (2, 2, 3, 3, 3) is VGG-16."""
    net, ins = Layers(), 3
    for stage, count in enumerate(convolutions):
        width = min(64 << stage, 512)
        net += _chain(ins, 224 >> stage, *[(width, 3, 3)] * count)
        ins = width
    return net + _dense(7 * 7 * 512, 4096, 4096, 1000)


def alexnet() -> Layers:
    """AlexNet (Krizhevsky et al. 2012); its layers 2, 4 and 5 read only half of the channels."""
    net = _chain(3, 55, (96, 11, 11, 55)) + _chain(48, 27, (256, 5, 5))
    net += (
        _chain(256, 13, (384, 3, 3)) + _chain(192, 13, (384, 3, 3)) + _chain(192, 13, (256, 3, 3))
    )
    return net + _dense(6 * 6 * 256, 4096, 4096, 1000)


def googlenet() -> Layers:
    """GoogLeNet (Szegedy et al. 2014, arXiv 1409.4842), from table 1 of the paper."""
    net = _chain(3, 112, (64, 7, 7, 112)) + _chain(64, 56, (64, 1, 1), (192, 3, 3))
    ins = 192
    for side, (one, three_in, three, five_in, five, pooled) in (
        (28, (64, 96, 128, 16, 32, 32)),
        (28, (128, 128, 192, 32, 96, 64)),
        (14, (192, 96, 208, 16, 48, 64)),
        (14, (160, 112, 224, 24, 64, 64)),
        (14, (128, 128, 256, 24, 64, 64)),
        (14, (112, 144, 288, 32, 64, 64)),
        (14, (256, 160, 320, 32, 128, 128)),
        (7, (256, 160, 320, 32, 128, 128)),
        (7, (384, 192, 384, 48, 128, 128)),
    ):
        net += _chain(ins, side, (one, 1, 1)) + _chain(ins, side, (three_in, 1, 1), (three, 3, 3))
        net += _chain(ins, side, (five_in, 1, 1), (five, 5, 5)) + _chain(ins, side, (pooled, 1, 1))
        ins = one + three + five + pooled
    return net + _dense(1024, 1000)


def overfeat() -> Layers:
    """OverFeat (Sermanet et al. 2013, arXiv 1312.6229): the fast network in the paper's table 1."""
    net = _chain(3, 56, (96, 11, 11, 56)) + _chain(96, 24, (256, 5, 5))
    net += _chain(256, 12, (512, 3, 3), (1024, 3, 3), (1024, 3, 3))
    return net + _dense(6 * 6 * 1024, 3072, 4096, 1000)


LINK = 25e9 / 8  # The constant LINK is the bandwidth of 25 Gb/s Ethernet in bytes/s.
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
    """Return a rank's link traffic in a ring, as a multiple of the buffer size."""
    return textbook("ring", workers).beta


def _density(network: str) -> float:
    """Return the bytes of gradients to exchange per operation of a neural network."""
    layers = NETWORKS[network]()
    return nbytes(layers) / operations(layers)


# Horovod's workers process 64 images per step. The step time of InceptionV3 on a P100 GPU comes
# from Bugliarello.
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


# BytePS runs one extra server host per worker host. A BytePS worker sends and receives all bytes
# once, in both directions concurrently.
def _byteps_fit(known: Figures) -> Parameters:
    return {PART: (1 / known["Horovod"] - 1) / _ring(256)}


def _byteps(parameters: Parameters, name: str) -> float:
    return 1 / (1 + parameters[PART] * (_ring(256) if name == "Horovod" else 1))


# In the results of MaTEx and Das, p workers divide a batch. T(p) / T(1) = 1 / p + `_ring(p)` · c is
# the relative step time. The factor c is fitted to a published speed-up.
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


# Vishnu's networks have small layers, so a round of the butterfly costs only latency. On p cores,
# the butterfly takes lg p rounds.
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
    """Return the last speed-up of each published curve."""
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
