"""Reproductions of published results: some results determine parameters, others are predicted.

Published results for comparison: scaling curves, efficiencies and errors.

A letter marks the type of source of each value. The letter A marks the paper's abstract, and C the
paper's formula. The letter D marks the project's documentation. The letter F marks a figure, read
within ± 3 %. The letter P marks the paper's text, and R the authors' raw data. A ratio that is
measured on one machine is never compared with an absolute number from a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

# The keys of `Parameters` are names of parameters with their units.
Parameters: TypeAlias = Mapping[str, float]
Figures: TypeAlias = dict[str, float]
Verdict: TypeAlias = Literal[
    "predicted", "predicted from a fit", "reproduced", "by construction", "bound", "not reached"
]
NOTHING: Parameters = {}
VERDICTS: Mapping[Verdict, str] = {
    "predicted": "the value served neither to fit a parameter nor to choose the model's form",
    "predicted from a fit": "the parameters were fitted to measurements of the same "
    "experiment with fewer workers; the model's form was chosen after the values were known",
    "reproduced": "the value was fitted, or one number was free, or the form of the model was "
    "chosen after the value was known",
    "by construction": "the cost model predicts this value for any choice of its parameters",
    "bound": "labkit's value is a computed bound [C], and the measured value is within it",
    "not reached": "the error is too large, or no published value is available for a fit",
}


@dataclass(frozen=True)
class Judged:
    """A published result, the value that labkit's model predicts for it, and a verdict.

    Args:
        source, mark: Origin of the result, and the letter for its type of source
            (`labkit.simulate.published.reproduction`).
        study, what: Names of the study and of the result.
        unit: Unit of the values.
        parameters: Parameters of the model, by name.
        fitted: Names of the published results to which the parameters are fitted.
        predicted: Value that the model predicts; None if no published result is available for the
            fit.
        published: Published value.
        points: True if `error` is a difference, False if it is a relative error.
        within: Largest allowed absolute value of `error`.
        reached: The `verdict` if the absolute error is at most `within`. For the verdict "bound",
            the error must instead be at least 0.

    `error` is predicted / published - 1; if `points` is true, it is predicted - published.
    `verdict` is the value of `reached`, or "not reached"; see `VERDICTS`.
    """

    source: str
    mark: str
    study: str
    what: str
    unit: str
    parameters: Parameters
    fitted: tuple[str, ...]
    predicted: float | None
    published: float
    points: bool
    within: float
    reached: Verdict

    @property
    def error(self) -> float | None:
        if self.predicted is None:
            return None
        if self.points:
            return self.predicted - self.published
        return self.predicted / self.published - 1

    @property
    def verdict(self) -> Verdict:
        if self.error is None:
            return "not reached"
        bound = self.reached == "bound"
        reached = self.error >= 0 if bound else abs(self.error) <= self.within
        return self.reached if reached else "not reached"


@dataclass(frozen=True)
class Reproduction:
    """A model that reproduces published measurements.

    Args:
        source, mark, name, unit, within, points: See `Judged`.
        figures: Published values by the name of the result.
        predict: Function (parameters, name of the result) -> value. If None, no model can be
            fitted.
        fitted: Names of the published values that are passed to `fit`; all other values are unknown
            to `fit`.
        fit: Function from the `fitted` values to the parameters of the model.
        marks: Letters that name the source types of single values.
        verdicts: Verdicts of single values; the default is "reproduced" with a fit, and "predicted"
            without one.
    """

    source: str
    mark: str
    name: str
    unit: str
    figures: Figures
    predict: Callable[[Parameters, str], float] | None = None
    fitted: tuple[str, ...] = ()
    fit: Callable[[Figures], Parameters] = field(default=lambda known: NOTHING)
    within: float = 0.15
    points: bool = False
    marks: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)

    def reproduce(self) -> list[Judged]:
        """Return one row per published value."""
        usual: Verdict = "reproduced" if self.fitted else "predicted"
        parameters = self.fit({name: self.figures[name] for name in self.fitted})
        return [
            Judged(
                source=self.source,
                mark=self.marks.get(name, self.mark),
                study=self.name,
                what=name,
                unit=self.unit,
                parameters=parameters,
                fitted=self.fitted,
                predicted=self.predict(parameters, name) if self.predict else None,
                published=published,
                points=self.points,
                within=self.within,
                reached=self.verdicts.get(name, usual),
            )
            for name, published in self.figures.items()
        ]


@dataclass(frozen=True)
class Scaling:
    """A published scaling curve: the speed-up for several numbers of workers.

    Args:
        name: Name of the curve.
        what: Neural network and set-up of the experiment.
        unit: Unit of `workers`, such as "GPUs" or "nodes".
        workers: Numbers of workers; the first number is the base of all speed-ups.
        speedup: For each number of workers, the speed-up over the base.
        source, mark: Origin of the curve, and the letter of its source type. The module's docstring
            defines the letters of source types.
        base: Throughput of the base in images/s; 0 if it is not published.
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
        """Parallel efficiency speedup · workers[0] / workers (T₁ / (n · Tₙ) if workers[0] is 1)."""
        pairs = zip(self.speedup, self.workers, strict=True)
        return tuple(speedup * self.workers[0] / workers for speedup, workers in pairs)


def _rates(rates: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(rate / rates[0] for rate in rates)


_BUGLIARELLO = "Bugliarello 2017, e-bug/distributed-tensorflow-benchmarks"
_SERVERS = "InceptionV3 (gradients 92.9 MB), TensorFlow 1.1 parameter servers, batch 64 a GPU"
_GPUS = (1, 2, 4, 8, 16, 32, 64, 128)
_VISHNU = "Vishnu 2016, Distributed TensorFlow with MPI"

PUBLISHED: dict[str, Scaling] = {
    curve.name: curve
    for curve in (
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


# In comments on published values, a single letter marks the type of source. The docstring of the
# module defines the letters for types of source.
INCEPTION_MB = 92.9  # The gradients of InceptionV3 take `INCEPTION_MB` megabytes.
# `SERVERS` gives the best number of servers for each number of nodes. The best number has the
# highest throughput on the computer Piz Daint.
SERVERS = {1: 1, 2: 1, 4: 3, 8: 2, 16: 4, 32: 12, 64: 40, 128: 116}  # R
HOROVOD = {"InceptionV3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68}  # efficiencies (D)
BYTEPS = {"Horovod": 0.70, "BytePS": 0.90}  # approximate efficiencies (R)
BUBBLE_1F1B = {"p = 8, m = 24": 0.243, "p = 8, m = 32": 0.199, "p = 8, m = 64": 0.124}  # P
TORCHGPIPE = {"1 stage": 0.853, "2 stages": 1.41, "4 stages": 2.77, "8 stages": 4.29}  # R
TORCHGPIPE_AMOEBANET = {"8 stages, m = 1": 0.93, "8 stages, m = 4": 2.62, "8 stages, m = 32": 4.95}
DDG = {"ResNet-110, K = 2": 1.40, "ResNet-110, K = 3": 1.70, "ResNet-110, K = 4": 1.84}  # (F)
DDG_WRN = {"WRN-28-10, K = 2": 1.37, "WRN-28-10, K = 3": 1.57, "WRN-28-10, K = 4": 1.64}  # R
# On 8 P100 GPUs in one node, InceptionV3 trains with the efficiency `DGX_1` (Bugliarello 2017, P).
DGX_1 = 0.9956


@dataclass(frozen=True)
class Softsync:
    """A published result of n-softsync training, with or without correction of the learning rate.

    Args:
        remedy: How the learning rate is corrected for staleness. If None, the learning rate is
            constant.
        splits: Values of n for which the result holds. If empty, the result holds for all n.
        error: Fraction of misclassified test samples.
        what: Data set and number of learners.
        source, mark: Origin of the result, and the letter of its source type. The module's
            docstring defines the letters of source types.
    """

    remedy: str | None
    splits: tuple[int, ...]
    error: float
    what: str = "CIFAR-10, 30 learners"
    source: str = "Zhang 2016, arXiv 1511.05950"
    mark: str = "P"


SOFTSYNC = (Softsync(None, (15, 30), 0.90), Softsync("per_gradient", (), 0.18))
# At most the fraction `SOFTSYNC_LATER` of gradients is more than 2n updates old (Zhang 2016, P).
SOFTSYNC_LATER = 1e-4
