"""The settings that are forecast and run, and other settings that are calibrated for them."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from labkit.bench.host_selection import share_of
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

MODELS = {"small": [128, 128], "large": [512, 512]}  # widths
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
BATCHES = (24, 80, 320)  # rows of all ranks
CROWDED = (3, 4)  # ranks: on two cores they share these
FEW = ("ring", "ring, overlap", "averaging", "server")  # ways of these
APART = ("ring", "averaging")  # ways on two hosts
LINK = 250  # Mb/s between these
HOSTS = Network(
    name="two hosts",
    latency=PRESETS["1GbE"].latency,
    bandwidth=share_of(LINK * 10**6),
    hosts=2,
    host_latency=PRESETS["100Gb-infiniband"].latency,
    host_bandwidth=PRESETS["100Gb-infiniband"].bandwidth,
)
ROWS = (8, 64, 256)  # of a rank, that are calibrated
BATCH = 64  # of all ranks, at which whole steps are
STEPS = (40, 200)  # least and most of a run
FEATURES = 64


class Setting(NamedTuple):
    """What is forecast, and run.

    Attributes:
        case: model, way, ranks and batch.
        experiment: that is run.
        hosts: the network between two hosts, whose link is real; None: on one.
    """

    case: str
    experiment: Experiment
    hosts: Network | None = None

    @property
    def network(self) -> Network | None:
        """That it is on, emulated or not."""
        return self.hosts or Network.parse(self.experiment.network)


def settings(only: str = "") -> list[Setting]:
    """Two ranks in every way on every network, alone, too many for the cores, on two hosts.

    Args:
        only: what stands in the case of all that are wanted, such as "2 ranks".
    """
    pairs = product(enumerate(MODELS), enumerate(NETWORKS), enumerate(WAYS))
    found = [
        # Every way of a model meets all networks and all batches, though not each with each.
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
    """What is calibrated for settings: their models and ways, at another batch."""
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
