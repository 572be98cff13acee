"""Small sets of flows with max-min rates that were computed by hand, to test network models."""

from __future__ import annotations

from typing import NamedTuple


class FlowSet(NamedTuple):
    """Flows on links, and the times, computed by hand, at which their last bytes are sent.

    Args: name; why: the arithmetic; bandwidth: bytes/s of each link; ways: the links that each flow
        uses; nbytes: bytes of each flow; start: start (s) of each flow; drained: time (s) at which
        each flow has sent its last byte.
    """

    name: str
    why: str
    bandwidth: tuple[float, ...]
    ways: tuple[tuple[int, ...], ...]
    nbytes: tuple[float, ...]
    start: tuple[float, ...]
    drained: tuple[float, ...]


FLOW_SETS = (
    FlowSet(
        "alone",
        "12 bytes at 3 bytes/s.",
        (3.0,),
        ((0,),),
        (12.0,),
        (1.0,),
        (5.0,),
    ),
    FlowSet(
        "slowest link",
        "A way is as fast as its slowest link: 12 bytes at min(3, 2, 6) bytes/s.",
        (3.0, 2.0, 6.0),
        ((0, 1, 2),),
        (12.0,),
        (0.0,),
        (6.0,),
    ),
    FlowSet(
        "two equals",
        "Both at half of 2 bytes/s, all the way.",
        (2.0,),
        ((0,), (0,)),
        (6.0, 6.0),
        (0.0, 0.0),
        (6.0, 6.0),
    ),
    FlowSet(
        "a small one behind a large one",
        "At half of 1 byte/s the 0.11 bytes take 0.22 s; the other has 1 - 0.11 left, alone.",
        (1.0,),
        ((0,), (0,)),
        (1.0, 0.11),
        (0.0, 0.0),
        (1.11, 0.22),
    ),
    FlowSet(
        "one joins",
        "The first has 10 - 4 = 6 left at 2 s; both at 1 byte/s: the second is done at 2 + 4; then "
        "the first has 2 left at 2 bytes/s.",
        (2.0,),
        ((0,), (0,)),
        (10.0, 4.0),
        (0.0, 2.0),
        (7.0, 6.0),
    ),
    FlowSet(
        "one joins when one ends",
        "They never meet: 4 bytes at 2 bytes/s each.",
        (2.0,),
        ((0,), (0,)),
        (4.0, 4.0),
        (0.0, 2.0),
        (2.0, 4.0),
    ),
    FlowSet(
        "senders as fast as their share",
        "Four senders of a quarter of the uplink's 4 bytes/s: nobody slows anybody down.",
        (4.0, 1.0, 1.0, 1.0, 1.0),
        ((1, 0), (2, 0), (3, 0), (4, 0)),
        (5.0, 5.0, 5.0, 5.0),
        (0.0, 0.0, 0.0, 0.0),
        (5.0, 5.0, 5.0, 5.0),
    ),
    FlowSet(
        "a fast master",
        "Eight workers of 1 byte/s into 8 bytes/s.",
        (8.0, *(1.0,) * 8),
        tuple((1 + worker, 0) for worker in range(8)),
        (3.0,) * 8,
        (0.0,) * 8,
        (3.0,) * 8,
    ),
    FlowSet(
        "what one leaves over",
        "The first cannot use more than 1 of 4 bytes/s; the second has the other 3.",
        (4.0, 1.0),
        ((1, 0), (0,)),
        (6.0, 18.0),
        (0.0, 0.0),
        (6.0, 6.0),
    ),
    FlowSet(
        "what two leave over",
        "Of 6 bytes/s two take 1 and 2, as their own links allow, the third the other 3. When the "
        "first ends (4 s), 6 - 2 = 4 are left for the third: 24 - 12 = 12 bytes in 3 s.",
        (6.0, 1.0, 2.0),
        ((1, 0), (2, 0), (0,)),
        (4.0, 20.0, 24.0),
        (0.0, 0.0, 0.0),
        (4.0, 10.0, 7.0),
    ),
    FlowSet(
        "a long way and two short ones",
        "Links of 1 and 2 bytes/s: the long flow has ½, as the short one on the first link; 1½ are "
        "left on the second: 6 / 1½ = 4 s. The first two share on, ½ each: 4 / ½ = 8 s.",
        (1.0, 2.0),
        ((0, 1), (0,), (1,)),
        (4.0, 4.0, 6.0),
        (0.0, 0.0, 0.0),
        (8.0, 8.0, 4.0),
    ),
    FlowSet(
        "the parking lot",
        "Three links of 2 bytes/s, one flow over all, one on each: 1 byte/s everywhere, 4 s. Then "
        "the long one has 8 - 4 = 4 left, alone: 2 s.",
        (2.0, 2.0, 2.0),
        ((0, 1, 2), (0,), (1,), (2,)),
        (8.0, 4.0, 4.0, 4.0),
        (0.0, 0.0, 0.0, 0.0),
        (6.0, 4.0, 4.0, 4.0),
    ),
    FlowSet(
        "bottlenecks one after the other",
        "Link 0 (3 bytes/s) is full at 1 each for its three flows; link 1 (4 bytes/s) carries one "
        "of them and has 3 for its other: 9 / 3 = 3 s. All others 6 / 1 = 6 s.",
        (3.0, 4.0),
        ((0,), (0,), (0, 1), (1,)),
        (6.0, 6.0, 6.0, 9.0),
        (0.0, 0.0, 0.0, 0.0),
        (6.0, 6.0, 6.0, 3.0),
    ),
    FlowSet(
        "a triangle",
        "Three links of 2 bytes/s, each pair of them a way: two flows on each link, 1 byte/s each. "
        "The first (3 bytes) ends at 3 s. The others share link 2 with each other: 1 byte/s on.",
        (2.0, 2.0, 2.0),
        ((0, 1), (1, 2), (2, 0)),
        (3.0, 5.0, 5.0),
        (0.0, 0.0, 0.0),
        (3.0, 5.0, 5.0),
    ),
    FlowSet(
        "one joins and leaves over two links",
        "Until 2 s the first has 2 bytes/s on link 0 (left: 12). The long one joins: link 0 gives "
        "1 each, link 1 (3 bytes/s) its other flow 2: of 16 bytes 6 have gone at 3 bytes/s by "
        "then, 10 at 2 bytes/s end at 7 s. The long one, 5 bytes, ends at 7 s, too; the first then "
        "has 12 - 5 = 7 left, at 2 bytes/s: 10.5 s.",
        (2.0, 3.0),
        ((0,), (0, 1), (1,)),
        (16.0, 5.0, 16.0),
        (0.0, 2.0, 0.0),
        (10.5, 7.0, 7.0),
    ),
    FlowSet(
        "all to all of three",
        "Links out (0, 1, 2) and in (3, 4, 5) of 2 bytes/s: two flows on each, 1 byte/s.",
        (2.0,) * 6,
        ((0, 4), (0, 5), (1, 3), (1, 5), (2, 3), (2, 4)),
        (7.0,) * 6,
        (0.0,) * 6,
        (7.0,) * 6,
    ),
    FlowSet(
        "a slow receiver",
        "Both leave by a link of 2 bytes/s; the first goes to ½ byte/s, so the second has 1½: "
        "6 / 1½ = 4 s; the first 4 / ½ = 8 s.",
        (2.0, 0.5, 2.0),
        ((0, 1), (0, 2)),
        (4.0, 6.0),
        (0.0, 0.0),
        (8.0, 4.0),
    ),
    FlowSet(
        "three arrive one by one",
        "6 bytes/s. A alone 0 to 1 s (6 gone), A and B 3 each to 2 s (A: 9, B: 3), three 2 each: "
        "C's 4 bytes until 4 s (A: 13, B: 7), then 3 each: B's last 3 until 5 s (A: 16), A's last "
        "8 at 6 bytes/s.",
        (6.0,),
        ((0,), (0,), (0,)),
        (24.0, 10.0, 4.0),
        (0.0, 1.0, 2.0),
        (19.0 / 3, 5.0, 4.0),
    ),
)
