"""A model as a sequence of blocks, with possible cuts and the tensors that cross each cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import keras

from labkit.common.errors import InvalidInput
from labkit.model_parallel.functional import (
    Nest,
    attach_mask,
    functional_of,
    leaves,
    mask_of,
    nodes_of,
)
from labkit.model_parallel.stages import footprint

if TYPE_CHECKING:
    from keras.src.models.functional import Functional
    from keras.src.ops.node import Node

    from labkit.common.canonical_json import JSON

# The number INPUTS stands for a fictitious pipeline stage that outputs the model's inputs.
INPUTS = -1


class TensorSource(NamedTuple):
    """The origin of a stage's input tensor: an output of a stage, or an input of the model.

    Attributes:
        stage: The stage that produces the tensor, or `INPUTS`.
        number: Index of the tensor among the outputs of `stage`, or among the inputs of the model.
    """

    stage: int
    number: int


@dataclass(frozen=True)
class StageModels:
    """The stages of a model as Keras models, which share their layers with the whole model.

    Each stage sends its output tensors directly to the stages that read them. Masks are sent in the
    same way as other tensors.

    Attributes:
        whole: The model that is divided into stages.
        models: The models of the stages; the last stage has the outputs of the whole model.
        takes: For each stage, the sources (`TensorSource`) of its input tensors, in order.
    """

    whole: Functional
    models: list[keras.Model]
    takes: list[list[TensorSource]]

    def read(self, x: Nest) -> list[Nest]:
        """Return the tensors of x as a list, in the order of the model's inputs."""
        return leaves(self.whole, x)


class Blocks:
    """The blocks, in topological order, between which a Sequential or Functional model can be cut.

        input ─ dense ─┬─ dense ─┬─ add ─ dense        blocks: dense │ dense, add │ dense
                       └─────────┘

    A block ends at each point where later layers read only one tensor (and its mask). If `wide` is
    set, a block ends after each layer. No block ends with an integer tensor, because integers have
    no gradient. All layer calls that use a variable are in one block. Otherwise, two ranks would
    train separate copies of the variable.

    Args:
        model: The Keras model, built.
        wide: Whether more than one tensor may cross a cut.
    """

    def __init__(self, model: keras.Model, wide: bool = False) -> None:
        self._graph = functional_of(model)
        self._nodes = list(_in_order(self._graph))
        # The list `ends` contains one pair per block: a number and the block's name. The number
        # tells where the block ends in the list of layer calls.
        ends = (
            self._wide_cuts(self._possible_cuts())
            if wide
            else self._narrow_cuts(self._possible_cuts())
        )
        self._edges, self._names = [0, *(place for place, _ in ends)], [name for _, name in ends]

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._edges) - 1

    def names(self) -> list[str]:
        """Return the name of the last layer of each block."""
        return self._names

    def described(
        self, edges: Sequence[int], seconds: Sequence[float] | None = None
    ) -> dict[str, JSON]:
        """Return a JSON record of a partition, with the bytes per row that each stage sends."""
        return {
            "blocks": self.names(),
            "edges": list(edges),
            "block_seconds": None if seconds is None else list(seconds),
            "bytes_a_row": [
                footprint.bytes_per_row(model.outputs) for model in self.split(edges).models
            ],
        }

    def shared(self) -> list[str]:
        """Return the names of layers that are called several times, all in the same block."""
        calls = Counter(
            (node.operation.name, id(variable))
            for node in self._nodes
            for variable in getattr(node.operation, "variables", [])
        )
        return sorted({name for (name, _), count in calls.items() if count > 1})

    def part(self, first: int, last: int) -> keras.Model:
        """Return the blocks from `first` to `last - 1` as a separate model with shared layers."""
        edges = sorted({0, first, last, len(self)})
        return self.split(edges).models[edges.index(first)]

    def split(self, edges: Sequence[int]) -> StageModels:
        """Return the stages as models; stage k consists of blocks edges[k] to edges[k + 1] - 1."""
        sources = {id(x): TensorSource(INPUTS, n) for n, x in enumerate(self._graph.inputs)}
        nodes = [self._nodes[self._edges[a] : self._edges[b]] for a, b in pairwise(edges)]
        last = len(nodes) - 1
        reads = [self._read(calls, stage == last) for stage, calls in enumerate(nodes)]
        models, takes = [], []
        for stage, calls in enumerate(nodes):
            inputs = {key: x for key, x in reads[stage].items() if key in sources}
            inputs = dict(sorted(inputs.items(), key=lambda item: sources[item[0]]))
            later = {key for read in reads[stage + 1 :] for key in read}
            out = [x for node in calls for x in node.outputs if id(x) in later]
            sources |= {id(x): TensorSource(stage, number) for number, x in enumerate(out)}
            ends = self._graph._outputs_struct if stage == last else _unwrap_single(out)
            models.append(_model(calls, list(inputs.values()), ends))
            takes.append([sources[key] for key in inputs])
        return StageModels(self._graph, models, takes)

    def _read(self, nodes: Sequence[Node], last: bool) -> dict[int, keras.KerasTensor]:
        """Return the tensors and masks that nodes read; if `last` is set, also model outputs."""
        tensors = [x for node in nodes for x in node.arguments.keras_tensors]
        tensors += self._graph.outputs if last else []
        tensors += [mask for x in tensors if (mask := mask_of(x)) is not None]
        return {id(x): x for x in tensors}

    def _possible_cuts(self) -> list[int]:
        """Return the node counts at which a cut separates no two uses of the same variable."""
        uses: dict[int, list[int]] = {}
        for place, node in enumerate(self._nodes):
            for variable in getattr(node.operation, "variables", []):
                uses.setdefault(id(variable), []).append(place)
        return [
            place
            for place in range(1, len(self._nodes) + 1)
            if not any(nodes[0] < place <= nodes[-1] for nodes in uses.values())
        ]

    def _wide_cuts(self, places: Sequence[int]) -> list[tuple[int, str]]:
        """Return (node count, layer name) for a cut after each layer and for the model's end."""
        makers = {place: self._nodes[place - 1].operation for place in places}
        ends = [(n, by.name) for n, by in makers.items() if isinstance(by, keras.layers.Layer)]
        return [*ends[:-1], (len(self._nodes), ends[-1][1])]

    def _narrow_cuts(self, places: Sequence[int]) -> list[tuple[int, str]]:
        """Return (node count, layer name) for each one-tensor cut, and for the model's end."""
        last_use = {id(x): len(self._nodes) + 1 for x in self._graph.outputs}
        for place, node in enumerate(self._nodes):
            for key in self._read([node], last=False):
                last_use[key] = max(place + 1, last_use.get(key, 0))
        outputs = self._graph.outputs
        cuts: list[tuple[int, str]] = []
        previous = None
        alive = {id(x): x for x in self._graph.inputs}
        for place, node in enumerate(self._nodes, start=1):
            alive |= {id(x): x for x in node.outputs}
            alive = {key: x for key, x in alive.items() if last_use.get(key, 0) > place}
            masks = {id(mask_of(x)) for x in alive.values()}
            live = [x for key, x in alive.items() if key not in masks]
            # If the same single tensor crosses several successive cut positions, only the first
            # position becomes a cut.
            if place in places and len(live) == 1 and live[0] is not previous:
                (previous,) = live
                if "float" in previous.dtype and previous is not outputs[0]:
                    cuts.append((place, previous._keras_history.operation.name))
        return [*cuts, (len(self._nodes), outputs[-1]._keras_history.operation.name)]


class BlockChain(Blocks):
    """The blocks of a model with one input and one output; a single tensor crosses each cut.

    Raises:
        InvalidInput: The model has several inputs or outputs.
    """

    def __init__(self, model: keras.Model) -> None:
        graph = functional_of(model)
        if len(graph.inputs) != 1 or len(graph.outputs) != 1:
            raise InvalidInput(
                f"the model has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs; a "
                "chain of stages needs one input and one output; give such a model, or use "
                "lk.AllReduce, lk.TensorParallel, or lk.Pipeline with a schedule other than "
                "'wavefront'"
            )
        super().__init__(model)


def split_model(model: keras.Model, edges: Sequence[int]) -> list[keras.Model]:
    """Return the stages as models: stage k has blocks edges[k] to edges[k + 1] - 1."""
    return BlockChain(model).split(edges).models


def _in_order(graph: Functional) -> Iterator[Node]:
    """Yield layer calls in topological order, each followed by the calls that compute its masks.

    Keras's graph lists only masks that are layer arguments, but `_in_order` also includes all other
    masks.
    """
    visited: set[int] = set()

    def visit(node: Node) -> Iterator[Node]:
        if id(node) in visited or node.is_input:
            return
        visited.add(id(node))
        for x in node.arguments.keras_tensors:
            yield from visit(_maker(x))
        yield node
        for x in node.outputs:
            if (mask := mask_of(x)) is not None:
                yield from visit(_maker(mask))

    for node in nodes_of(graph):
        yield from visit(node)


def _maker(x: keras.KerasTensor) -> Node:
    return x._keras_history.operation._inbound_nodes[x._keras_history.node_index]


def _model(nodes: Sequence[Node], tensors: Sequence[keras.KerasTensor], ends: Nest) -> keras.Model:
    """Return a model that repeats the layer calls `nodes` with new inputs like `tensors`."""
    # All layers are called again, because `keras.Model(tensors, tensors)` would copy the tensors
    # without their masks.
    replacements = {id(x): keras.Input(batch_shape=x.shape, dtype=x.dtype) for x in tensors}
    inputs = list(replacements.values())
    for x in tensors:
        if (mask := mask_of(x)) is not None and id(mask) in replacements:
            attach_mask(replacements[id(x)], replacements[id(mask)])
    for node in nodes:
        args, kwargs = node.arguments.fill_in(replacements)
        outputs = keras.tree.flatten(node.operation(*args, **kwargs))
        replacements |= {id(x): y for x, y in zip(node.outputs, outputs, strict=True)}
    return keras.Model(_unwrap_single(inputs), _filled(ends, replacements))


def _filled(ends: Nest, replacements: Mapping[int, keras.KerasTensor]) -> Nest:
    nest: Nest = keras.tree.map_structure(lambda x: replacements[id(x)], ends)
    return nest


def _unwrap_single(tensors: Sequence[keras.KerasTensor]) -> Nest:
    """Return one tensor without a list, and several tensors as a list, as Keras does."""
    return tensors[0] if len(tensors) == 1 else list(tensors)
