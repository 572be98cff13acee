"""The order in which the communication thread sends buckets, with priority for front layers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def by_priority(ready: Sequence[float], seconds: Sequence[float], rank: Sequence[int]) -> list[int]:
    """Return a fixed bucket order: whenever the link is free, the most urgent ready bucket is sent.

        ready    2  1  0     (the bucket of the last layer is ready first)
        seconds  1  3  1     -> [2, 1, 0]: when bucket 1 ends at 4, only bucket 0 remains
        ready    2  1  0
        seconds  1  1  3     -> [2, 0, 1]: when bucket 2 ends at 3, bucket 0 is the most urgent

    Args:
        ready: For each bucket, the time in seconds at which it is packed.
        seconds: For each bucket, the duration of its exchange in seconds.
        rank: For each bucket, its priority; the bucket with the lowest number is the most urgent.

    Source: Jayarajan et al.: Priority-based parameter propagation, 2019, arXiv 1905.03960; Peng et
    al.: A generic communication scheduler (ByteScheduler), 2019. Both methods decide the order
    while buckets wait; this function fixes the order in advance from measured times, so that all
    ranks use the same order.
    """
    coming = sorted(range(len(ready)), key=lambda bucket: ready[bucket])
    waiting: list[tuple[int, int]] = []
    order: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, ready[coming[0]])
        while coming and ready[coming[0]] <= now:
            bucket = coming.pop(0)
            heapq.heappush(waiting, (rank[bucket], bucket))
        _, bucket = heapq.heappop(waiting)
        order.append(bucket)
        now += seconds[bucket]
    return order
