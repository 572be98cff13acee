"""Roles in a program run: data about all programs, which every program knows at its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from labkit.programs.actions import Place, Vector
from labkit.programs.passes import Pass
from labkit.programs.placement import ServerPieces


@dataclass(frozen=True)
class Roles:
    """Workers, which compute, and servers, which store weights and are numbered after the workers.

    A worker may be a model-parallel replica, which is divided into stages or over a grid of
    machines. Each member of a replica (a stage or a machine) has its own program number. The last
    member of a replica computes the loss and has the worker's number. The program numbers of the
    other members begin after those of all servers.

    Attributes:
        workers: Number of workers.
        parts: For each server, the ranges of the flat weights that it stores; empty if there are no
            servers, because each worker then stores all weights.
        steps: Steps per epoch; in each step, every worker computes one batch.
        epochs: Number of epochs.
        weights: Initial weights of the model, as one flat vector.
        hosts: Rank of each program, by program number; programs on one rank share its network link.
        seed: Seed of the programs' random choices.
        slower: For each worker, its compute time divided by that of the fastest worker.
        layers: For each layer, its number of weights, in the order of the flat weights.
        rate: Learning rate of the optimizer in the first training step.
        cut: For each member (stage or machine) of a replica, the ranges of the flat weights that it
            has; empty if the model is not divided.
        passes: For each member (stage or machine) of a replica, its passes; a pass contains the
            numbers of the members with which it exchanges messages.
    """

    workers: int
    parts: Sequence[ServerPieces]
    steps: int
    epochs: int
    weights: Vector
    hosts: Sequence[int]
    seed: int = 0
    cut: Sequence[ServerPieces] = ()
    passes: Sequence[Sequence[Pass]] = ()
    slower: Sequence[float] = ()
    layers: Sequence[int] = ()
    rate: float = 0.0

    @property
    def servers(self) -> range:
        """The program numbers of the servers."""
        return range(self.workers, self.workers + len(self.parts))

    @property
    def lead(self) -> int:
        """The program number of the server that decides when the workers end."""
        return self.workers

    def assemble_weights(self, parts: Mapping[int, Vector]) -> Vector:
        """Join the parts of the weights from all servers, or average the workers' copies."""
        if len(parts) == 1:
            return next(iter(parts.values()))
        if not self.parts:  # without servers, each worker has a copy of all weights
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
        """Return the root mean square distance of the workers' weights from their mean."""
        mean = self.assemble_weights(parts)
        return float(
            np.sqrt(np.mean([np.sum((weights - mean) ** 2) for weights in parts.values()]))
        )

    def routes(self, compressed: bool = False) -> dict[tuple[int, int], int]:
        """Return the maximum bytes of a message for each (sender, receiver) on different ranks.

        Args:
            compressed: Whether messages are compressed. A compressed message may be larger than the
                original message.
                A compressed message contains at most all elements with their indices (twice the
                bytes), and a few numbers per tensor.
        """

        def max_bytes(server: int) -> int:
            part = self.part(server)
            nbytes = part.size * self.weights.itemsize
            return 2 * nbytes + 64 * (1 + len(part.pieces)) if compressed else nbytes

        return {
            route: max_bytes(server)
            for worker in range(self.workers)
            for server in self.servers
            if self.hosts[worker] != self.hosts[server]
            for route in ((worker, server), (server, worker))
        }

    def part(self, server: int) -> ServerPieces:
        """Return the ranges of the flat weights that a server stores."""
        return self.parts[server - self.workers]

    # --- model-parallel replicas -------------------------------------------------------------

    def members(self, worker: int) -> list[int]:
        """Return the program numbers of a replica's members, or only `worker` if it has none."""
        others = max(0, len(self.cut) - 1)
        first = self.workers + len(self.parts) + worker * others
        return [*range(first, first + others), worker]

    def place(self, number: int) -> Place:
        """Return the numbers of the replica and the member to which a program number belongs."""
        behind, member = number - self.workers - len(self.parts), len(self.cut) - 1
        return Place(number, member) if behind < 0 else Place(*divmod(behind, member))

    def of_member(self, member: int) -> Roles:
        """Return roles in which all weights are restricted to those of one replica member."""
        part_of_member = self.cut[member]
        parts = [part_of_member.within(part) for part in self.parts]
        return replace(self, parts=parts, weights=part_of_member.take(self.weights))
