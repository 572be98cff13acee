"""Simulate flows with SimGrid, to compute the time at which each flow ends.

The script imports nothing of labkit, reads one flow set as JSON from stdin, and prints the end
times in seconds.
"""

import json
import sys

from simgrid import Actor, Engine, LinkInRoute, Mailbox, NetZone, this_actor

SCALE = 1e6  # factor for bytes, because SimGrid rounds to whole bytes and to microseconds
# The options select the fluid model without correction factors for latency and bandwidth, and
# without TCP windows and acknowledgements.
PLAIN = (
    "network/model:CM02",
    "network/latency-factor:1",
    "network/bandwidth-factor:1",
    "network/weight-S:0",
    "network/TCP-gamma:0",
    "network/crosstraffic:0",
)


def main() -> None:
    """Simulate the flow set that stdin contains as JSON; print when each flow ends."""
    given = json.load(sys.stdin)
    engine = Engine([sys.argv[0], "--log=root.thresh:critical", *(f"--cfg={c}" for c in PLAIN)])
    zone = NetZone.create_full_zone("flows")
    links = []
    for number, bandwidth in enumerate(given["bandwidth"]):
        links.append(zone.create_link(f"link {number}", bandwidth * SCALE).set_latency(0))
        links[-1].seal()
    done = [0.0] * len(given["ways"])
    for flow, way in enumerate(given["ways"]):
        ends = [zone.create_host(f"{end} {flow}", 1e9) for end in ("from", "to")]
        route = [LinkInRoute(links[link]) for link in way]
        zone.add_route(ends[0].netpoint, ends[1].netpoint, None, None, route, True)
        size = round(given["nbytes"][flow] * SCALE)
        Actor.create("send", ends[0], _send, flow, given["start"][flow], size)
        Actor.create("receive", ends[1], _receive, flow, done)
    zone.seal()
    engine.run()
    print(json.dumps(done))


def _send(flow: int, start: float, size: int) -> None:
    this_actor.sleep_until(start)
    Mailbox.by_name(str(flow)).put(flow, size)


def _receive(flow: int, done: list[float]) -> None:
    Mailbox.by_name(str(flow)).get()
    done[flow] = Engine.clock


if __name__ == "__main__":
    main()
