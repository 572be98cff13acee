"""Predicted times of the transfer of an array over RDMA.

This module computes its predictions without measurements, so the machine needs no RDMA hardware.
The link is the preset of 100 Gb/s InfiniBand, the network of the measurements in the paper that
`predict` cites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from labkit.bench.timing import Row, head
from labkit.network import Network, finish_times

NETWORK = "100Gb-infiniband"
TCP_LATENCY = 20e-6  # latency of a TCP message in seconds, as in the preset "10GbE"
COPY = 10e9  # bytes/s at which a CPU core copies memory; a rounded value
PLACE = "RDMA, predicted"


class Protocol(NamedTuple):
    """The messages and memory copies by which a protocol transfers an array.

    Attributes:
        messages: Number of sequential messages; the last message contains the values of the array.
        copies: Number of times that a CPU copies all values of the array.
        description: Description of the protocol's messages.
        tcp: Whether the kernel's TCP stack transfers the messages.
    """

    messages: int
    copies: int
    description: str
    tcp: bool = False


PROTOCOLS = {
    "grpc": Protocol(1, 3, "the values, over the kernel's TCP", tcp=True),
    "two_sided": Protocol(
        3,
        2,
        "request to send, clear to send, the values; these are copied into and out of a "
        "ring buffer",
    ),
    "one_sided": Protocol(1, 0, "the values, followed by a flag that marks their arrival"),
    "one_sided_dynamic": Protocol(3, 0, "metadata, request to read, the values"),
}


def predict(
    sizes: Sequence[int], network: str | Network = NETWORK, copy: float = COPY
) -> list[Row]:
    r"""Return one row per transport and array size, with the predicted time T:

    \[T = m \lambda + \frac{n}{\beta} + c \frac{n}{\gamma},\]

    where m is the number of sequential messages of latency λ, n the number of bytes over a link of
    β bytes/s, and c the number of copies at γ bytes/s. The formula assumes that messages, the
    transfer and the copies do not overlap. The formula for the time neglects kernel load, small
    packets and memory registration.

    Args:
        sizes: Array sizes in bytes.
        network: The link, of which the latency and the bandwidth are used.
        copy: Rate at which a CPU core copies memory, in bytes/s.

    Source: J. Xue et al.: Fast distributed deep learning over RDMA, EuroSys 2019. Xue et al. report
    training speeds, not transfer times. Xue et al. train up to 25 times as fast as with
    TensorFlow's gRPC, and up to 169 % faster than with an RPC made for RDMA.
    """
    link = Network.parse(network)
    assert link is not None  # tells the type checker that `network` is not None
    rows = []
    for transport, each in PROTOCOLS.items():
        latency = TCP_LATENCY if each.tcp else link.latency
        for nbytes in sizes:
            flow = float(finish_times([[0]], [nbytes], [0.0], [link.bandwidth])[0])
            seconds = each.messages * latency + flow + each.copies * nbytes / copy
            row = head("transport", f"{transport}, {PLACE}", "exchange", 2, link.name, bytes=nbytes)
            milliseconds = dict.fromkeys(("median_ms", "min_ms", "p90_ms"), 1e3 * seconds)
            rows.append(
                row
                | {"clock": "simulation", "transport": transport, "place": PLACE, "repeats": 1}
                | milliseconds
                | {"bandwidth": nbytes / seconds, "copies": each.copies, "copied": each.description}
            )
    return rows
