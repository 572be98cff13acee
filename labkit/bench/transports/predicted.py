"""What the exchange would take where a network card reads and writes memory by itself: predicted.

Nothing here is measured. This machine has no such card; the link is the preset of 100 Gb/s
InfiniBand, on which the paper's measurements were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from labkit.bench.timing import Row, head
from labkit.network import Network, drained

NETWORK = "100Gb-infiniband"
TCP_LATENCY = 20e-6  # s; see the preset of 10GbE
COPY = 10e9  # bytes/s at which a core copies memory; a round number
PLACE = "RDMA, predicted"


class Protocol(NamedTuple):
    """What goes over the wire before values have come, and what is copied at the ends.

    Attributes:
        messages: one after the other, the last one with the values.
        copies: of all values, by a processor.
        said: the messages.
        tcp: whether the kernel's TCP carries them.
    """

    messages: int
    copies: int
    said: str
    tcp: bool = False


PROTOCOLS = {
    "grpc": Protocol(1, 3, "values, in the kernel's TCP", tcp=True),
    "two_sided": Protocol(3, 2, "request to send, its answer, values; in and out of a ring"),
    "one_sided": Protocol(1, 0, "values with a flag behind them"),
    "one_sided_dynamic": Protocol(3, 0, "metadata, request to read, values"),
}


def predict(
    sizes: Sequence[int], network: str | Network = NETWORK, copy: float = COPY
) -> list[Row]:
    r"""A row a transport and size, from the flow that the values are on the link:

    \[T = m \lambda + \frac{n}{\beta} + c \frac{n}{\gamma},\]

    with m messages one after the other of latency λ, n bytes over a link of β bytes/s, and c
    copies at γ bytes/s, none of which overlap. Busy kernels, small packets and the cost of
    registering memory are not in it.

    Args:
        sizes: bytes of the array.
        network: the link; its latency and its bandwidth.
        copy: bytes/s at which a core copies.

    Source: J. Xue et al.: Fast distributed deep learning over RDMA, EuroSys 2019, who report, of
    training and not of one exchange, up to 25 times the speed of TensorFlow's gRPC, and up to 169 %
    more than that of an RPC made for RDMA.
    """
    link = Network.parse(network)
    assert link is not None  # for the type checker: a link was given
    rows = []
    for transport, each in PROTOCOLS.items():
        latency = TCP_LATENCY if each.tcp else link.latency
        for nbytes in sizes:
            flow = float(drained([[0]], [nbytes], [0.0], [link.bandwidth])[0])
            seconds = each.messages * latency + flow + each.copies * nbytes / copy
            row = head("transport", f"{transport}, {PLACE}", "exchange", 2, link.name, bytes=nbytes)
            milliseconds = dict.fromkeys(("median_ms", "min_ms", "p90_ms"), 1e3 * seconds)
            rows.append(
                row
                | {"clock": "simulation", "transport": transport, "place": PLACE, "repeats": 1}
                | milliseconds
                | {"bandwidth": nbytes / seconds, "copies": each.copies, "copied": each.said}
            )
    return rows
