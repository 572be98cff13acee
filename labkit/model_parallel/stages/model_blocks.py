"""A model as blocks in a row: where it may be cut, and which tensors pass over the cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import keras

from labkit.common.errors import InvalidInput
from labkit.model_parallel.functional import Nest, functional_of, leaves, mask_of, masked, nodes_of
from labkit.model_parallel.stages import footprint

if TYPE_CHECKING:
    from keras.src.models.functional import Functional
    from keras.src.ops.node import Node

    from labkit.common.canonical_json import JSON

INPUTS = -1  # as a stage: what is read from the batch, which all ranks have


class Source(NamedTuple):
    """Where a stage has a tensor from.

    Attributes:
        stage: that makes it, or `INPUTS`.
        number: among the outputs of that stage, or among the inputs of the model.
    """

    stage: int
    number: int


@dataclass(frozen=True)
class Parts:
    """The stages of a model, as models that share its layers.

    Each tensor passes straight from the stage that makes it to all that read it, and so do masks.

    Attributes:
        whole: the model.
        models: the stages; the last one has the outputs of the model.
        takes: where each of them has its inputs from, in their order.
    """

    whole: Functional
    models: list[keras.Model]
    takes: list[list[Source]]

    def read(self, x: Nest) -> list[Nest]:
        """The inputs of the model, in the order of `INPUTS`."""
        return leaves(self.whole, x)


class Blocks:
    """The blocks of a Sequential or Functional model, in an order in which they can be called.

        input ─ dense ─┬─ dense ─┬─ add ─ dense        blocks: dense │ dense, add │ dense
                       └─────────┘

    A block ends where one tensor alone passes on (its mask may go with it, no tensor of integers:
    no gradient goes through), or, if wide, behind each layer. What lies between two uses of one
    variable is in one block: it would be trained on two ranks, apart.

    Args:
        model: built.
        wide: whether several tensors may pass over a cut.
    """

    def __init__(self, model: keras.Model, wide: bool = False) -> None:
        self._graph = functional_of(model)
        self._nodes = list(_in_order(self._graph))
        # Of each block the nodes up to its end, and a name.
        ends = self._wide(self._free()) if wide else self._narrow(self._free())
        self._edges, self._names = [0, *(place for place, _ in ends)], [name for _, name in ends]

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._edges) - 1

    def names(self) -> list[str]:
        """The name of the last layer of each block."""
        return self._names

    def described(
        self, edges: Sequence[int], seconds: Sequence[float] | None = None
    ) -> dict[str, JSON]:
        """A cut for the run's record; bytes are those of a row that leaves each stage."""
        return {
            "blocks": self.names(),
            "edges": list(edges),
            "block_seconds": None if seconds is None else list(seconds),
            "bytes_a_row": [footprint.a_row(model.outputs) for model in self.split(edges).models],
        }

    def shared(self) -> list[str]:
        """The layers whose weights are used in several calls, which cannot be cut apart."""
        calls = Counter(
            (node.operation.name, id(variable))
            for node in self._nodes
            for variable in getattr(node.operation, "variables", [])
        )
        return sorted({name for (name, _), count in calls.items() if count > 1})

    def part(self, first: int, last: int) -> keras.Model:
        """Blocks [first, last) as a model of their own, which shares their layers."""
        edges = sorted({0, first, last, len(self)})
        return self.split(edges).models[edges.index(first)]

    def split(self, edges: Sequence[int]) -> Parts:
        """Stages of blocks [edges[k], edges[k + 1])."""
        made = {id(x): Source(INPUTS, n) for n, x in enumerate(self._graph.inputs)}
        nodes = [self._nodes[self._edges[a] : self._edges[b]] for a, b in pairwise(edges)]
        last = len(nodes) - 1
        reads = [self._read(own, stage == last) for stage, own in enumerate(nodes)]
        models, takes = [], []
        for stage, own in enumerate(nodes):
            given = {key: x for key, x in reads[stage].items() if key in made}
            given = dict(sorted(given.items(), key=lambda item: made[item[0]]))
            later = {key for read in reads[stage + 1 :] for key in read}
            out = [x for node in own for x in node.outputs if id(x) in later]
            made |= {id(x): Source(stage, number) for number, x in enumerate(out)}
            ends = self._graph._outputs_struct if stage == last else _plain(out)
            models.append(_model(own, list(given.values()), ends))
            takes.append([made[key] for key in given])
        return Parts(self._graph, models, takes)

    def _read(self, nodes: Sequence[Node], last: bool) -> dict[int, keras.KerasTensor]:
        """What nodes read, with its masks; at the end the outputs, too."""
        found = [x for node in nodes for x in node.arguments.keras_tensors]
        found += self._graph.outputs if last else []
        found += [mask for x in found if (mask := mask_of(x)) is not None]
        return {id(x): x for x in found}

    def _free(self) -> list[int]:
        """How many nodes may stand before a cut that tears no variable apart."""
        uses: dict[int, list[int]] = {}
        for place, node in enumerate(self._nodes):
            for variable in getattr(node.operation, "variables", []):
                uses.setdefault(id(variable), []).append(place)
        return [
            place
            for place in range(1, len(self._nodes) + 1)
            if not any(found[0] < place <= found[-1] for found in uses.values())
        ]

    def _wide(self, places: Sequence[int]) -> list[tuple[int, str]]:
        """The places behind layers, and the end."""
        made_by = {place: self._nodes[place - 1].operation for place in places}
        ends = [(n, by.name) for n, by in made_by.items() if isinstance(by, keras.layers.Layer)]
        return [*ends[:-1], (len(self._nodes), ends[-1][1])]

    def _narrow(self, places: Sequence[int]) -> list[tuple[int, str]]:
        """Those of the places where one tensor passes alone, and the end."""
        last_use = {id(x): len(self._nodes) + 1 for x in self._graph.outputs}
        for place, node in enumerate(self._nodes):
            for key in self._read([node], last=False):
                last_use[key] = max(place + 1, last_use.get(key, 0))
        outputs = self._graph.outputs
        found: list[tuple[int, str]] = []
        before = None
        alive = {id(x): x for x in self._graph.inputs}
        for place, node in enumerate(self._nodes, start=1):
            alive |= {id(x): x for x in node.outputs}
            alive = {key: x for key, x in alive.items() if last_use.get(key, 0) > place}
            masks = {id(mask_of(x)) for x in alive.values()}
            alone = [x for key, x in alive.items() if key not in masks]
            # A tensor stays alone while nodes beside it add nothing: once is enough.
            if place in places and len(alone) == 1 and alone[0] is not before:
                (before,) = alone
                if "float" in before.dtype and before is not outputs[0]:
                    found.append((place, before._keras_history.operation.name))
        return [*found, (len(self._nodes), outputs[-1]._keras_history.operation.name)]


class Chain(Blocks):
    """The blocks of a model through which one tensor alone passes, from one input to one output.

    Raises:
        InvalidInput: the model is no chain.
    """

    def __init__(self, model: keras.Model) -> None:
        graph = functional_of(model)
        if len(graph.inputs) != 1 or len(graph.outputs) != 1:
            raise InvalidInput(
                f"the model has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs; a "
                "chain of stages has one of each: give such a model, or use lk.AllReduce, "
                "lk.TensorParallel, or lk.Pipeline with another schedule than 'wavefront'"
            )
        super().__init__(model)


def split_model(model: keras.Model, edges: Sequence[int]) -> list[keras.Model]:
    """The stages of a chain: blocks [edges[k], edges[k + 1])."""
    return Chain(model).split(edges).models


def _in_order(graph: Functional) -> Iterator[Node]:
    """The calls of layers in an order in which they can be made, each followed by its masks'.

    The graph knows those masks alone that are arguments of layers; here are all.
    """
    seen: set[int] = set()

    def visit(node: Node) -> Iterator[Node]:
        if id(node) in seen or node.is_input:
            return
        seen.add(id(node))
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


def _model(nodes: Sequence[Node], given: Sequence[keras.KerasTensor], ends: Nest) -> keras.Model:
    """Calls of layers as a model, of some tensors with their masks."""
    # Layers are called again, not copied as by `keras.Model(tensors, tensors)`: copies lose masks.
    known = {id(x): keras.Input(batch_shape=x.shape, dtype=x.dtype) for x in given}
    inputs = list(known.values())
    for x in given:
        if (mask := mask_of(x)) is not None and id(mask) in known:
            masked(known[id(x)], known[id(mask)])
    for node in nodes:
        args, kwargs = node.arguments.fill_in(known)
        found = keras.tree.flatten(node.operation(*args, **kwargs))
        known |= {id(x): y for x, y in zip(node.outputs, found, strict=True)}
    return keras.Model(_plain(inputs), _filled(ends, known))


def _filled(ends: Nest, known: Mapping[int, keras.KerasTensor]) -> Nest:
    found: Nest = keras.tree.map_structure(lambda x: known[id(x)], ends)
    return found


def _plain(tensors: Sequence[keras.KerasTensor]) -> Nest:
    """One tensor as it is, several as a list: as Keras has inputs and outputs."""
    return tensors[0] if len(tensors) == 1 else list(tensors)
