"""In which order the communication thread serves buckets, when front layers come first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def by_priority(ready: Sequence[float], seconds: Sequence[float], rank: Sequence[int]) -> list[int]:
    """One fixed order: whenever the line is free, the most urgent bucket that is ready.

        ready    2  1  0     (the last layer's bucket first)
        seconds  1  3  1     -> [2, 1, 0]: when 1 ends at 4, only 0 is left
        ready    2  1  0
        seconds  1  1  3     -> [2, 0, 1]: when 2 ends at 3, 0 is ready and more urgent than 1

    Args:
        ready: when each bucket is packed, seconds.
        seconds: how long its exchange takes.
        rank: its urgency; the least is most urgent.
    Source: Jayarajan et al.: Priority-based parameter propagation, 2019, arXiv 1905.03960; Peng et
    al.: A generic communication scheduler (ByteScheduler), 2019. There the order is decided while
    buckets wait; here it is fixed from measured times, so that all ranks have the same.
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
