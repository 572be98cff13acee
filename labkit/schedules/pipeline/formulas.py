"""What each method promises: the bubble it leaves, and how many activations a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.schedules.pipeline.table import Table
from labkit.schedules.round import Integers

Form = TypeVar("Form")


def bubble(
    table: Table, forward: float, backward_input: float, backward_weight: float
) -> float | None:
    """Seconds that the rank that waits longest does nothing; ranks equal, messages free.

    p ranks, m micro-batches, v chunks a rank; F, B, W: forward, input and weight part of the
    backward. The same from a rank's first row to its last as over all of the time, but for H2.

        gpipe, 1f1b, wavefront    (p - 1)(F + B + W)
        interleaved               (p - 1)(F + B + W)/v
        zero_bubble               (p - 1)(F + B - W)       m ≥ p, W ≤ F
        zero_bubble_h2            (p - 1)(F + B - 2W)      m ≥ 2p - 1, W ≤ F, W ≤ B
        layerwise                 (p - 1)(F + B + W) m
        pipedream                 0                        between filling and draining

    None where the form does not hold.

    Args: table: of `PIPELINE`; forward, backward_input, backward_weight: F, B, W in s, of a
    micro-batch on a rank (in all of its chunks).
    Raises: InvalidInput, for a table of another name.
    Source: Huang et al. 2019, arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473; Qi et al.
    2024, arXiv 2401.10241. Differs from it: the last says no bounds for W; beyond these ones the
    weight parts are too long for the gaps.
    """
    p, m = table.ranks, table.microbatches
    whole = forward + backward_input + backward_weight
    if table.name == "zero_bubble" and (m < p or backward_weight > forward):
        return None
    if table.name == "zero_bubble_h2" and (
        m < 2 * p - 1 or backward_weight > min(forward, backward_input)
    ):
        return None
    return (p - 1) * _lookup(
        {
            "gpipe": whole,
            "1f1b": whole,
            "wavefront": whole,
            "interleaved": whole / table.chunks,
            "zero_bubble": whole - 2 * backward_weight,
            "zero_bubble_h2": whole - 3 * backward_weight,
            "layerwise": whole * m,
            "pipedream": 0.0,
        },
        table,
    )


def bubble_share(
    table: Table, forward: float, backward_input: float, backward_weight: float
) -> float | None:
    """The bubble as a share of all time, (p - 1)/(m + p - 1) of `gpipe`: as `bubble`."""
    lost = bubble(table, forward, backward_input, backward_weight)
    if lost is None:
        return None
    return lost / (lost + table.microbatches * (forward + backward_input + backward_weight))


def most_in_flight(table: Table) -> Integers:
    """The bound of `memory.in_flight`, rank by rank, shape (ranks,); at most m · v of course.

        gpipe, wavefront    m
        1f1b, pipedream     p - r
        interleaved         (v - 1)p + 2(p - 1 - r) + 1, each 1/v of a rank's layers
        zero_bubble         p
        zero_bubble_h2      2p - 1
        layerwise           1

    Raises and source: as `bubble`.
    """
    p, m, v = table.ranks, table.microbatches, table.chunks
    rank = np.arange(p)
    forms: dict[str, int | Integers] = {
        "gpipe": m,
        "wavefront": m,
        "1f1b": p - rank,
        "pipedream": p - rank,
        "interleaved": (v - 1) * p + 2 * (p - 1 - rank) + 1,
        "zero_bubble": p,
        "zero_bubble_h2": 2 * p - 1,
        "layerwise": 1,
    }
    most: Integers = np.minimum(np.broadcast_to(_lookup(forms, table), (p,)), m * v)
    return most


def _lookup(forms: Mapping[str, Form], table: Table) -> Form:
    if table.name not in forms:
        raise InvalidInput(f"no formula for {table.name!r}: there are {', '.join(forms)}")
    return forms[table.name]
