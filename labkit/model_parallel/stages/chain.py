"""A model as a chain of blocks: wherever one tensor alone passes on, it may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import keras

from labkit.common.errors import InvalidInput


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

    def __init__(self, model: Any) -> None:
        graph = model._functional if isinstance(model, keras.Sequential) else model
        if not hasattr(graph, "_nodes_by_depth"):
            raise InvalidInput(
                f"a {type(model).__name__} hides its layers: give a keras.Sequential that starts "
                "with keras.Input, or a functional keras.Model"
            )
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

    def part(self, first: int, last: int) -> Any:
        """Blocks [first, last) as a model of their own, which shares their layers."""
        return keras.Model(self._tensors[first], self._tensors[last])

    def names(self) -> list[str]:
        """Of the last layer of each block."""
        return [tensor._keras_history.operation.name for tensor in self._tensors[1:]]


def split_model(model: Any, edges: Sequence[int]) -> list[Any]:
    """The model's stages: blocks [edges[k], edges[k + 1])."""
    chain = Chain(model)
    return [chain.part(a, b) for a, b in pairwise(edges)]


def _cuts(graph: Any) -> list[Any]:
    """The tensors that pass alone from the nodes before them to the nodes behind them."""
    depths = sorted(graph._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in graph._nodes_by_depth[depth]]
    last_use = {id(graph.outputs[0]): len(nodes)}
    uses: dict[int, list[int]] = {}  # of variables: shared ones stay on one side
    for place, node in enumerate(nodes):
        for tensor in node.arguments.keras_tensors:
            last_use[id(tensor)] = max(place, last_use.get(id(tensor), 0))
        for variable in getattr(node.operation, "variables", []):
            uses.setdefault(id(variable), []).append(place)
    cuts: list[Any] = []
    alive: dict[int, Any] = {}
    for place, node in enumerate(nodes):
        alive |= {id(tensor): tensor for tensor in node.outputs}
        alive = {key: tensor for key, tensor in alive.items() if last_use.get(key, 0) > place}
        torn = any(found[0] <= place < found[-1] for found in uses.values())
        if len(alive) == 1 and not torn:
            cuts += alive.values()
    ends = (graph.inputs[0], graph.outputs[0])
    return _distinct([t for t in cuts if "float" in t.dtype or any(t is end for end in ends)])


def _distinct(tensors: list[Any]) -> list[Any]:
    found: list[Any] = []
    for tensor in tensors:
        if not found or tensor is not found[-1]:
            found.append(tensor)
    return found
