"""The settings that are forecast and run, and the experiments from which they are calibrated."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from labkit.bench.host_allreduce import share_of
from labkit.compression import COMPRESSORS, ErrorFeedback, TopK
from labkit.experiment import Experiment
from labkit.network import PRESETS, Network
from labkit.strategies import (
    AllReduce,
    ParameterAveraging,
    ParameterServer,
    Pipeline,
    Strategy,
)

MODELS = {"small": [128, 128], "large": [512, 512]}  # widths of the models' layers
NETWORKS = (
    Network.named("10GbE"),
    Network(name="500Mb", latency=100e-6, bandwidth=500e6 / 8),
    Network(name="250Mb", latency=200e-6, bandwidth=250e6 / 8),
    Network(name="100Mb, 1 ms", latency=1e-3, bandwidth=100e6 / 8),
)
WAYS: dict[str, Strategy] = {
    "ring": AllReduce(algorithm="ring"),
    "ring, overlap": AllReduce(algorithm="ring", schedule="overlap"),
    "float16": AllReduce(algorithm="ring", compressor=COMPRESSORS["Float16"]()),
    "1 bit": AllReduce(algorithm="ring", compressor=COMPRESSORS["OneBit"]()),
    "top-k": AllReduce(algorithm="ring", compressor=ErrorFeedback(inner=TopK(ratio=0.01))),
    "averaging": ParameterAveraging(period=4),
    "server": ParameterServer(colocated=True),
    "pipeline": Pipeline(microbatches=4),
}
BATCHES = (24, 80, 320)  # global batch sizes, samples
CROWDED = (3, 4)  # numbers of ranks that share two cores
# Strategies of the settings with more ranks than cores.
FEW = ("ring", "ring, overlap", "averaging", "server")
APART = ("ring", "averaging")  # strategies of the settings on two hosts
LINK = 250  # bandwidth between the two hosts, Mb/s
HOSTS = Network(
    name="two hosts",
    latency=PRESETS["1GbE"].latency,
    bandwidth=share_of(LINK * 10**6),
    hosts=2,
    host_latency=PRESETS["100Gb-infiniband"].latency,
    host_bandwidth=PRESETS["100Gb-infiniband"].bandwidth,
)
ROWS = (8, 64, 256)  # batch sizes per rank in the calibration, samples
BATCH = 64  # global batch size of the calibrated experiments, samples
STEPS = (40, 200)  # minimum and maximum number of steps of a run
FEATURES = 64


class Setting(NamedTuple):
    """A setting whose training is first forecast and then run.

    Attributes:
        case: Name of the setting: its model, strategy, ranks and batch size.
        experiment: The experiment that runs.
        hosts: Network between two hosts, for a setting whose link is real; None for one host.
    """

    case: str
    experiment: Experiment
    hosts: Network | None = None

    @property
    def network(self) -> Network | None:
        """The network between the ranks, real or emulated."""
        return self.hosts or Network.parse(self.experiment.network)


def settings(only: str = "") -> list[Setting]:
    """Return settings of one rank, two ranks, more ranks than cores, and two hosts.

    Args:
        only: Text that the name of each returned setting contains, such as "2 ranks".
    """
    pairs = product(enumerate(MODELS), enumerate(NETWORKS), enumerate(WAYS))
    found = [
        # Every strategy occurs with every network and with every batch size, but not with every
        # pair of network and batch size.
        _setting(model, way, 2, BATCHES[(m + n + w) % len(BATCHES)], network)
        for (m, model), (n, network), (w, way) in pairs
    ]
    found += [_setting("small", "ring", 1, BATCHES[0]), _setting("large", "ring", 1, BATCHES[1])]
    found += [
        _setting("small", way, ranks, 40 * ranks, NETWORKS[2])
        for ranks, way in product(CROWDED, FEW)
    ]
    found += [
        Setting(f"{own.case}, two hosts", own.experiment, HOSTS)
        for own in (_setting("small", way, 4, 160) for way in APART)
    ]
    return [each for each in found if only in each.case]


def calibrated(chosen: list[Setting]) -> list[Experiment]:
    """Return the experiments to calibrate: those of the settings, with a different batch size."""
    known = [each.experiment.replace(batch_size=BATCH, network=None) for each in chosen]
    return list({each.hash8: each for each in known}.values())


def _setting(
    model: str, way: str, ranks: int, batch: int, network: Network | None = None
) -> Setting:
    experiment = Experiment(
        model="mlp",
        model_options={"widths": MODELS[model]},
        dataset="synthetic",
        dataset_options={"shape": [FEATURES], "rows": max(BATCHES) * STEPS[1], "test_rows": 64},
        strategy=WAYS[way],
        workers=ranks,
        batch_size=batch,
        network=network,
        verify=False,
    )
    who = "alone" if ranks == 1 else f"{way}, {ranks} ranks"
    return Setting(f"{model}, {who}, {batch} rows", experiment)
