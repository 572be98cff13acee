"""Who is there: what a program knows of the others before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from labkit.programs.actions import Place, Vector
from labkit.programs.passes import Pass
from labkit.programs.placement import Parts


@dataclass(frozen=True)
class Roles:
    """Workers that compute and servers that hold weights, by number: servers come after workers.

    A worker may be a replica that is cut, in stages or over a grid of machines, whose members are
    numbers of their own: the last one, which knows the loss, has the number of the worker; the
    others come after all servers.

    Attributes:
        workers: how many compute.
        parts: of the flat weights, one a server; none where workers hold all.
        steps: of an epoch, in each of which all workers have a batch.
        epochs: how many.
        weights: that all begin with, flat.
        hosts: the place of each, by number: who is at one place shares its link and its rank.
        seed: of random choices.
        slower: than the fastest, by how many times each worker computes.
        layers: how many of the flat weights each layer has, in their order.
        rate: the optimizer's, at the first step.
        cut: of the flat weights, what each member of a replica has; none where they are whole.
        passes: what each member computes, and whom it exchanges messages with in between.
    """

    workers: int
    parts: Sequence[Parts]
    steps: int
    epochs: int
    weights: Vector
    hosts: Sequence[int]
    seed: int = 0
    cut: Sequence[Parts] = ()
    passes: Sequence[Sequence[Pass]] = ()
    slower: Sequence[float] = ()
    layers: Sequence[int] = ()
    rate: float = 0.0

    @property
    def servers(self) -> range:
        """Their numbers."""
        return range(self.workers, self.workers + len(self.parts))

    @property
    def lead(self) -> int:
        """The server that says who goes on."""
        return self.workers

    def whole(self, parts: Mapping[int, Vector]) -> Vector:
        """The flat weights of which servers hold these parts, or of which workers hold copies."""
        if len(parts) == 1:
            return next(iter(parts.values()))
        if not self.parts:  # the mean of what workers hold
            total = np.zeros_like(self.weights)
            for worker in sorted(parts):
                total += parts[worker]
            total /= len(parts)
            return total
        flat = np.empty_like(self.weights)
        for server, part in parts.items():
            self.part(server).put(part, flat)
        return flat

    def consensus_distance(self, parts: Mapping[int, Vector]) -> float:
        """The root mean square distance of workers' weights from their mean."""
        mean = self.whole(parts)
        return float(np.sqrt(np.mean([np.sum((own - mean) ** 2) for own in parts.values()])))

    def routes(self, said: bool = False) -> dict[tuple[int, int], int]:
        """Bytes of what workers and servers at different places send each other, both ways.

        Args:
            said: through a compressor. That may take more than it saves: all elements with their
                indices, twice the bytes, and a few numbers for each tensor.
        """

        def most(server: int) -> int:
            part = self.part(server)
            nbytes = part.size * self.weights.itemsize
            return 2 * nbytes + 64 * (1 + len(part.pieces)) if said else nbytes

        return {
            route: most(server)
            for worker in range(self.workers)
            for server in self.servers
            if self.hosts[worker] != self.hosts[server]
            for route in ((worker, server), (server, worker))
        }

    def part(self, server: int) -> Parts:
        """What a server holds."""
        return self.parts[server - self.workers]

    # --- replicas that are cut ---------------------------------------------------------------

    def members(self, worker: int) -> list[int]:
        """The numbers of a worker's members, in their order; of a whole one its own."""
        others = max(0, len(self.cut) - 1)
        first = self.workers + len(self.parts) + worker * others
        return [*range(first, first + others), worker]

    def place(self, number: int) -> Place:
        """Which member of which replica this is."""
        behind, member = number - self.workers - len(self.parts), len(self.cut) - 1
        return Place(number, member) if behind < 0 else Place(*divmod(behind, member))

    def of_member(self, member: int) -> Roles:
        """What a member knows: servers hold those of its weights that it shares with them."""
        own = self.cut[member]
        parts = [own.within(part) for part in self.parts]
        return replace(self, parts=parts, weights=own.take(self.weights))
