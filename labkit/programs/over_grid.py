"""Replicas of a model on a grid of machines: weights of each machine, and exchanged values."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import keras

from labkit.common.errors import InvalidInput
from labkit.model_parallel.grid import GridMachine, extent, planes_of
from labkit.model_parallel.grid import cut as pieces_of
from labkit.programs.cut_replica import CutReplicas, cache_latest_batch
from labkit.programs.passes import Pass
from labkit.programs.placement import ServerPieces, placed
from labkit.programs.replica import Batches
from labkit.programs.tiled_replica import TiledReplica
from labkit.schedules.grid import Grid, first_trained_layer, validate_grid


def tiled(model: keras.Model, batches: Batches, grid: Grid) -> CutReplicas:
    """Divide a model over a grid of machines; machine 0, the last member, computes the loss.

    Raises:
        InvalidInput: If a layer cannot be divided, or if there are more machines than output
            positions or units of a layer to divide among them.
    """
    validate_grid(grid, None, planes_of(pieces_of(model)))
    dtype = str(model.trainable_variables[0].dtype)
    if model.compute_dtype != dtype:
        raise InvalidInput(
            f"values between machines of grid={grid} are {model.compute_dtype}, the weights "
            f"are {dtype}; both must have one dtype: give precision='float32'"
        )
    first, *others = [GridMachine(model, grid, number) for number in range(grid[0] * grid[1])]
    machines, cached_batches = [*others, first], cache_latest_batch(batches)
    members = [TiledReplica(machine, cached_batches, model) for machine in machines]
    parts = [_part(machine, model) for machine in machines]
    work = sum(_work(machine, n) for machine in machines for n in range(len(machine.pieces)))
    return CutReplicas(members, parts, [_passes(machine, work) for machine in machines], {})


def _part(machine: GridMachine, model: keras.Model) -> ServerPieces:
    """Return the ranges of the flat weights that a machine stores."""
    weights = model.trainable_variables
    (all_of_it,) = placed([tuple(weight.shape) for weight in weights], 1, "round_robin")
    places = {id(pair.whole): pair.place for pair in machine.owned_pairs()}
    tiles = [
        piece.within(places[id(weight)])
        for weight, piece in zip(weights, all_of_it.pieces, strict=True)
        if id(weight) in places
    ]
    return ServerPieces(tuple(piece for tile in tiles for piece in tile))


def _passes(machine: GridMachine, work: int) -> list[Pass]:
    """Return a machine's passes: one for the input, one per layer, and one for the loss."""
    others, first, last = machine.others, first_trained_layer(machine.planes), machine.number == 0

    def members(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple((number - 1) % (others + 1) for number in numbers)

    passes = [
        Pass(
            gets=(others,) if machine.shares_weights and not last else (),
            gives=tuple(range(others)) if machine.shares_weights and last else (),
        )
    ]
    for turn, border in enumerate(machine.borders, 1):
        layer = turn <= len(machine.pieces)
        receivers = machine.borders[turn].out if layer else ()
        passes.append(
            Pass(
                gets=members([machine_number for machine_number, _ in border.come]),
                gives=members([machine_number for machine_number, _ in receivers]),
                share=_work(machine, turn - 1) / work if layer else 0.0,
                goes_back=turn >= first,
                returns=turn > first,
            )
        )
    return passes


def _work(machine: GridMachine, number: int) -> int:
    """Return how many multiplications a machine needs for a layer, per sample."""
    piece = machine.pieces[number]
    reads, holds = extent(machine.read[number]), extent(machine.held[number + 1])
    if piece.plane.kind == "units":
        return prod(holds) * prod(reads)
    return prod(holds) * prod(piece.plane.kernel) * (reads[2] if piece.layer.variables else 1)
