"""Test a model as a chain: cuts where a single tensor passes, and stages that form the whole."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.model_parallel.stages import INPUTS, BlockChain, Blocks, split_model

Dense = keras.layers.Dense


def sequential() -> Any:
    layers = [Dense(5, "relu", name="a"), Dense(4, name="b"), Dense(3, name="c")]
    return keras.Sequential([keras.Input((6,)), *layers])


def skip_inside() -> Any:
    x = keras.Input((6,))
    first = Dense(5, name="first")(x)
    inner = Dense(5, "tanh")(first)
    added = keras.layers.Add(name="added")([first, inner])
    return keras.Model(x, Dense(3, name="last")(added))


def skip_over_everything() -> Any:
    x = keras.Input((6,))
    y = Dense(6)(Dense(5)(x))
    return keras.Model(x, keras.layers.Add(name="added")([x, y]))


def shared_layer() -> Any:
    x = keras.Input((6,))
    tied = Dense(6, "tanh", name="tied")
    y = tied(Dense(6, name="between")(tied(x)))
    return keras.Model(x, Dense(3, name="last")(y))


def unused_outputs() -> Any:
    x = keras.Input((4, 2))
    y, _, _ = keras.layers.LSTM(3, return_state=True, name="lstm")(x)
    return keras.Model(x, Dense(3, name="last")(y))


def words() -> Any:
    layers = [
        keras.layers.Reshape((6,), name="flat"),
        keras.layers.Embedding(9, 4, name="words"),
        keras.layers.GlobalAveragePooling1D(name="mean"),
        Dense(3, name="last"),
    ]
    return keras.Sequential([keras.Input((2, 3), dtype="int32"), *layers])


def nested() -> Any:
    return keras.Sequential([keras.Input((6,)), sequential(), Dense(2, name="last")])


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        (sequential, ["a", "b", "c"]),
        (skip_inside, ["first", "added", "last"]),
        (skip_over_everything, ["added"]),
        (shared_layer, ["tied", "last"]),
        (unused_outputs, ["lstm", "last"]),
        (words, ["words", "mean", "last"]),
    ],
)
def test_blocks_end_where_one_tensor_passes_alone(build: Any, blocks: list[str]) -> None:
    chain = BlockChain(build())
    assert chain.names() == blocks
    assert len(chain) == len(blocks)


def test_a_model_in_the_model_is_one_block() -> None:
    assert len(BlockChain(nested())) == 2


@pytest.mark.parametrize("build", [sequential, skip_inside, shared_layer, unused_outputs, words])
def test_parts_in_sequence_are_the_model_and_share_its_variables(build: Any) -> None:
    model = build()
    parts = split_model(model, range(len(BlockChain(model)) + 1))
    x = np.random.default_rng(0).integers(0, 9, (7, *model.input_shape[1:]))
    value = x.astype(model.inputs[0].dtype)
    for part in parts:
        value = part(value)
    np.testing.assert_array_equal(value, model(x.astype(model.inputs[0].dtype)))
    held = [id(variable) for part in parts for variable in part.trainable_variables]
    assert sorted(held) == sorted(id(variable) for variable in model.trainable_variables)


def test_two_inputs_are_refused() -> None:
    a, b = keras.Input((2,)), keras.Input((2,))
    model = keras.Model([a, b], keras.layers.Add()([a, b]))
    with pytest.raises(InvalidInput, match="2 inputs and 1 outputs; a chain"):
        BlockChain(model)


def test_a_model_that_hides_its_layers_is_refused() -> None:
    class Own(keras.Model):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    for model in (Own(), keras.Sequential([Dense(3)])):
        with pytest.raises(InvalidInput, match="is unknown; give a"):
            BlockChain(model)


def two_sides() -> Any:
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    left, right = Dense(5, name="left")(a), Dense(5, name="right")(b)
    both = keras.layers.Add(name="both")([left, right])
    first = Dense(3, name="first")(both)
    second = Dense(2, name="second")(keras.layers.Concatenate(name="joined")([both, left]))
    return keras.Model({"a": a, "b": b}, {"first": first, "second": second})


def masked_words() -> Any:
    layers = [
        keras.layers.Embedding(9, 4, mask_zero=True, name="words"),
        keras.layers.LSTM(5, return_sequences=True, name="lstm"),
        Dense(4, name="each"),
        keras.layers.LSTM(3, name="end"),
    ]
    return keras.Sequential([keras.Input((6,), dtype="int32"), *layers])


def run_apart(model: Any, blocks: Blocks, edges: Any, x: list[Any]) -> Any:
    """Return the outputs of the stages run one after the other, each from its sources."""
    parts = blocks.split(edges)
    made = {(INPUTS, number): keras.ops.convert_to_tensor(value) for number, value in enumerate(x)}
    for stage, (part, takes) in enumerate(zip(parts.models, parts.takes, strict=True)):
        assert all(source.stage < stage for source in takes)
        given = [made[source] for source in takes]
        found = part(given if len(given) > 1 else given[0])
        made |= {(stage, n): each for n, each in enumerate(keras.tree.flatten(found))}
    return found


def test_wide_blocks_end_behind_each_layer_and_tensors_pass_straight() -> None:
    model = two_sides()
    assert len(Blocks(model)) == 1
    wide = Blocks(model, wide=True)
    assert sorted(wide.names()) == ["both", "first", "joined", "left", "right", "second"]
    x = [np.random.default_rng(0).random((7, width)) for width in (6, 4)]
    expected = model({"a": x[0], "b": x[1]})
    for edges in ([0, 6], [0, 1, 6], [0, 2, 4, 6], range(7)):
        found = run_apart(model, wide, edges, x)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)


def test_a_cut_lets_a_tensor_pass_with_its_mask() -> None:
    chain = BlockChain(masked_words())
    assert chain.names() == ["words", "lstm", "each", "end"]
    parts = chain.split([0, 1, 3, 4])
    passed = [[str(x.dtype) for x in part.inputs] for part in parts.models]
    assert passed == [["int32"], ["bool", "float32"], ["bool", "float32"]]
    assert [source.stage for source in parts.takes[2]] == [0, 1]  # the mask comes from stage 0


def test_calls_that_share_weights_stand_in_one_block_also_of_wide_ones() -> None:
    blocks = Blocks(shared_layer(), wide=True)
    assert (blocks.names(), blocks.shared()) == (["tied", "last"], ["tied"])
