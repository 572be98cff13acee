"""Replicas over a grid of machines: who computes what of a model, and what crosses in between."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import keras

from labkit.common.errors import InvalidInput
from labkit.model_parallel.grid import Machine, extent, planes_of
from labkit.model_parallel.grid import cut as pieces_of
from labkit.programs.cut_replica import Cut, once
from labkit.programs.passes import Pass
from labkit.programs.placement import Parts, placed
from labkit.programs.replica import Batches
from labkit.programs.tiled_replica import TiledReplica
from labkit.schedules.grid import Grid, check_fit, first_trained


def tiled(model: keras.Model, batches: Batches, grid: Grid) -> Cut:
    """The replicas of a model over a grid: machine 0, which has the loss, is the last member.

    Raises:
        InvalidInput: a layer that cannot be cut, or that has not a place or unit for each machine.
    """
    check_fit(grid, None, planes_of(pieces_of(model)))
    dtype = str(model.trainable_variables[0].dtype)
    if model.compute_dtype != dtype:
        raise InvalidInput(
            f"what crosses between machines of grid={grid} is {model.compute_dtype}, the weights "
            f"are {dtype}; both must be of one type: give precision='float32'"
        )
    first, *others = [Machine(model, grid, number) for number in range(grid[0] * grid[1])]
    machines, drawn = [*others, first], once(batches)
    members = [TiledReplica(machine, drawn, model) for machine in machines]
    parts = [_part(machine, model) for machine in machines]
    work = sum(_work(machine, n) for machine in machines for n in range(len(machine.pieces)))
    return Cut(members, parts, [_passes(machine, work) for machine in machines], {})


def _part(machine: Machine, model: keras.Model) -> Parts:
    """What a machine has of the flat weights."""
    weights = model.trainable_variables
    (all_of_it,) = placed([tuple(each.shape) for each in weights], 1, "round_robin")
    places = {id(pair.whole): pair.place for pair in machine.kept()}
    found = [
        piece.within(places[id(weight)])
        for weight, piece in zip(weights, all_of_it.pieces, strict=True)
        if id(weight) in places
    ]
    return Parts(tuple(piece for tile in found for piece in tile))


def _passes(machine: Machine, work: int) -> list[Pass]:
    """Those of the input, of each layer, and of the loss."""
    others, first, last = machine.others, first_trained(machine.planes), machine.number == 0

    def members(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple((number - 1) % (others + 1) for number in numbers)

    found = [
        Pass(
            gets=(others,) if machine.hands and not last else (),
            gives=tuple(range(others)) if machine.hands and last else (),
        )
    ]
    for turn, border in enumerate(machine.borders, 1):
        layer = turn <= len(machine.pieces)
        read = machine.borders[turn].out if layer else ()
        found.append(
            Pass(
                gets=members([who for who, _ in border.come]),
                gives=members([who for who, _ in read]),
                share=_work(machine, turn - 1) / work if layer else 0.0,
                goes_back=turn >= first,
                returns=turn > first,
            )
        )
    return found


def _work(machine: Machine, number: int) -> int:
    """Multiplications of a layer, for one sample."""
    piece = machine.pieces[number]
    reads, holds = extent(machine.read[number]), extent(machine.held[number + 1])
    if piece.plane.kind == "units":
        return prod(holds) * prod(reads)
    return prod(holds) * prod(piece.plane.kernel) * (reads[2] if piece.layer.variables else 1)
