"""A model as a chain of blocks: wherever one tensor alone passes on, it may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import keras

from labkit.common.errors import InvalidInput
from labkit.model_parallel.functional import functional_of, nodes_of

if TYPE_CHECKING:
    from keras.src.models.functional import Functional


class Chain:
    """The blocks of a Sequential or Functional model, in their order.

        input ─ dense ─┬─ dense ─┬─ add ─ dense        blocks: dense │ dense, add │ dense
                       └─────────┘

    A skip inside a block stays inside it: two tensors cross there, and no cut. So does what lies
    between two uses of one variable, and a tensor of integers, through which no gradient goes.

    Args:
        model: of one input and one output, built.

    Raises:
        InvalidInput: the model is no chain.
    """

    def __init__(self, model: keras.Model) -> None:
        graph = functional_of(model)
        if len(graph.inputs) != 1 or len(graph.outputs) != 1:
            raise InvalidInput(
                f"the model has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs; a "
                "chain of stages has one of each: give such a model, or use lk.AllReduce or "
                "lk.TensorParallel"
            )
        self._tensors = _cuts(graph)  # of the input, between blocks, of the output

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._tensors) - 1

    def part(self, first: int, last: int) -> keras.Model:
        """Blocks [first, last) as a model of their own, which shares their layers."""
        return keras.Model(self._tensors[first], self._tensors[last])

    def names(self) -> list[str]:
        """The name of the last layer of each block."""
        return [tensor._keras_history.operation.name for tensor in self._tensors[1:]]


def split_model(model: keras.Model, edges: Sequence[int]) -> list[keras.Model]:
    """The model's stages: blocks [edges[k], edges[k + 1])."""
    chain = Chain(model)
    return [chain.part(a, b) for a, b in pairwise(edges)]


def _cuts(graph: Functional) -> list[keras.KerasTensor]:
    """The tensors that pass alone from the nodes before them to the nodes behind them."""
    nodes = nodes_of(graph)
    last_use = {id(graph.outputs[0]): len(nodes)}
    uses: dict[int, list[int]] = {}  # of variables: shared ones stay on one side
    for place, node in enumerate(nodes):
        for tensor in node.arguments.keras_tensors:
            last_use[id(tensor)] = max(place, last_use.get(id(tensor), 0))
        for variable in getattr(node.operation, "variables", []):
            uses.setdefault(id(variable), []).append(place)
    cuts: list[keras.KerasTensor] = []
    alive: dict[int, keras.KerasTensor] = {}  # read by a node that is still to come
    for place, node in enumerate(nodes):
        alive |= {id(tensor): tensor for tensor in node.outputs}
        alive = {key: tensor for key, tensor in alive.items() if last_use.get(key, 0) > place}
        # A layer used on both sides of a cut would be trained on two ranks, apart.
        torn = any(found[0] <= place < found[-1] for found in uses.values())
        # One tensor alone is all that the nodes behind can know of those before.
        if len(alive) == 1 and not torn:
            cuts += alive.values()
    ends = (graph.inputs[0], graph.outputs[0])
    floats = [t for t in cuts if "float" in t.dtype or any(t is end for end in ends)]
    # A tensor stays alone while nodes beside it add nothing: once is enough.
    return [t for t, before in zip(floats, [None, *floats], strict=False) if t is not before]
