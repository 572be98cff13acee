"""Test that models in parts learn as in one `keras.fit`: masks, sample weights, reductions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from labkit import (
    Cluster,
    DelayedGradients,
    Experiment,
    InvalidInput,
    Layerwise,
    Pipeline,
    TensorParallel,
)
from labkit.strategies import Strategy

Found = tuple[list[np.ndarray], list[float], dict[str, float]]  # weights, losses, metrics
random = np.random.default_rng(0)
ROWS, STEPS = 33, 6
# Sentences of different lengths, one of them empty; 0 is padding.
LENGTHS = random.integers(1, STEPS + 1, ROWS) * (np.arange(ROWS) != 5)
WORDS = random.integers(1, 9, (ROWS, STEPS)) * (np.arange(STEPS) < LENGTHS[:, None])
HOLES = WORDS * (random.random((ROWS, STEPS)) < 0.7)  # with gaps, also at the start
EACH = random.standard_normal((ROWS, STEPS, 3))
CLASSES = random.integers(-1, 3, (ROWS, STEPS))  # -1 means no class
STEP_WEIGHTS = random.uniform(size=(ROWS, STEPS))
ROW_WEIGHTS = random.uniform(size=ROWS) * (np.arange(ROWS) % 4 > 0)


def sentences(end: bool = False, **loss: Any) -> Any:
    """Return a maker of a compiled model that answers each word, or once per sentence."""

    def build() -> Any:
        import keras

        x = keras.Input((STEPS,), dtype="int32")
        y = keras.layers.Embedding(9, 4, mask_zero=True)(x)
        y = keras.layers.LSTM(5, return_sequences=True)(y)
        y = keras.layers.GRU(4, return_sequences=not end)(y)
        y = keras.layers.Dense(5, "tanh")(y)
        model = keras.Model(x, keras.layers.Dense(3)(y))
        kinds = keras.losses
        kind = kinds.SparseCategoricalCrossentropy if "from_logits" in loss else None
        made = (kind or kinds.MeanSquaredError)(**loss)
        metrics = ["mae"] if kind is None else ["accuracy"]
        model.compile(keras.optimizers.SGD(0.1), made, metrics=metrics, weighted_metrics=metrics)
        return model

    return build


def plain(reduction: str) -> Any:
    """Return a maker of a model without a mask."""

    def build() -> Any:
        import keras

        layers = [keras.layers.Dense(5, "tanh", kernel_regularizer="l2"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((STEPS,)), *layers])
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=reduction))
        return model

    return build


def tangled(inputs: type = dict, outputs: type = dict) -> Any:
    """Return a maker of a model with two inputs, two losses, and tensors read by several layers."""

    def build() -> Any:
        import keras
        from keras.layers import Add, Concatenate, Dense

        a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
        left, right = Dense(5, "tanh", name="left")(a), Dense(5, "tanh", name="right")(b)
        twice = Dense(5, "tanh", name="twice")
        middle = twice(twice(Add()([left, right])))
        first = Dense(3, name="first")(Concatenate()([middle, left]))
        joined = Dense(5, "tanh", kernel_regularizer="l2", name="joined")
        second = Dense(2, name="second")(joined(Add()([middle, left, right])))
        mse = keras.losses.MeanSquaredError
        losses, weights = [mse(), mse(reduction="sum")], [0.7, 0.05]
        given: Any = {"a": a, "b": b} if inputs is dict else inputs((a, b))
        found: Any = [first, second]
        if outputs is dict:
            found = {"first": first, "second": second}
            losses, weights = ({"first": x[0], "second": x[1]} for x in (losses, weights))
        model = keras.Model(given, found)
        model.compile(keras.optimizers.SGD(0.1), losses, loss_weights=weights)
        return model

    return build


A, B = random.standard_normal((ROWS, 6)), random.standard_normal((ROWS, 4))
FIRST, SECOND = random.standard_normal((ROWS, 3)), random.standard_normal((ROWS, 2))
NAMED = {"a": A, "b": B}, {"first": FIRST, "second": SECOND}


def ladder() -> Any:
    """Return a model like a U-net: layers on the way up also read layers on the way down."""
    import keras
    from keras.layers import Concatenate, Dense

    x = keras.Input((6,))
    first = Dense(5, "tanh")(x)
    second = Dense(4, "tanh")(first)
    third = Dense(3, "tanh")(second)
    up = Dense(4, "tanh")(Concatenate()([third, second]))
    model = keras.Model(x, Dense(3)(Concatenate()([up, first, x])))
    model.compile("sgd", "mean_squared_error", metrics=["mae"])
    return model


def translator() -> Any:
    """Return a model of two masked sentences; a word counts if either sentence has it."""
    import keras
    from keras.layers import GRU, Add, Dense, Embedding

    read, written = (keras.Input((STEPS,), dtype="int32") for _ in range(2))
    source = GRU(4, return_sequences=True)(Embedding(9, 4, mask_zero=True)(read))
    target = GRU(4, return_sequences=True)(Embedding(9, 4, mask_zero=True)(written))
    both = Dense(5, "tanh")(Add()([source, target]))
    model = keras.Model([read, written], Dense(3)(Add()([both, Dense(5)(source)])))
    model.compile(keras.optimizers.SGD(0.1), "mean_squared_error", weighted_metrics=["mae"])
    return model


def attentive() -> Any:
    """Return a model with attention to masked words, after which Keras drops the mask."""
    import keras
    from keras.layers import Add, Dense, Embedding, MultiHeadAttention

    x = keras.Input((STEPS,), dtype="int32")
    y = Embedding(9, 4, mask_zero=True)(x)
    y = Add()([y, MultiHeadAttention(2, 3)(y, y)])
    model = keras.Model(x, Dense(3)(Dense(4)(y)))
    model.compile("sgd", "mean_squared_error")
    return model


def tied() -> Any:
    import keras

    x = keras.Input((6,))
    layer, between = keras.layers.Dense(6, "tanh", name="tied"), keras.layers.Dense(6)
    model = keras.Model(x, layer(between(layer(x))))
    model.compile("sgd", "mean_squared_error")
    return model


def data(*arrays: Any) -> Any:
    def build() -> Any:
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(arrays)

    return build


def experiment(strategy: Strategy, model: Any, dataset: Any, workers: int = 2) -> Experiment:
    return Experiment(
        model=model,
        dataset=dataset,
        validation=dataset,
        strategy=strategy,
        workers=workers,
        batch_size=13,  # 13, 13 and 7 rows, which no number of micro-batches divides
        epochs=2,
        precision="float64",
        verify=False,
    )


def train(communicator: Any, questions: list[Experiment], alone: bool = False) -> list[Found]:
    """Return this rank's results for each experiment, by its strategy or by Keras alone."""
    import keras

    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    class Logs(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            epochs.append(logs)

    found = []
    for question in questions:
        epochs: list[dict[str, float]] = []
        session = TrainingSession(question, communicator, read(question, communicator))
        session.callbacks.append(Logs())
        if alone:
            session.compile(session.optimizer())
            session.fit([])
        else:
            question.strategy.train(session)
        weights = [variable.numpy() for variable in session.model.trainable_variables]
        held_out = {k: float(v) for k, v in epochs[-1].items() if k.startswith("val_")}
        # Keras weights batches equally in the losses of several outputs, whatever their rows.
        held_out = {k: v for k, v in held_out.items() if k == "val_loss" or "_loss" not in k}
        found.append((weights, [float(logs["loss"]) for logs in epochs], held_out))
        session.close()
    return found


def assert_same(
    cluster: Cluster,
    strategies: list[Strategy],
    model: Any,
    dataset: Any,
    workers: int = 2,
) -> None:
    """Check that weights, epoch losses and metrics of held-out rows equal Keras's."""
    questions = [experiment(strategy, model, dataset, workers) for strategy in strategies]
    (((weights, losses, metrics),),) = cluster.call(
        train, [questions[0].replace(workers=1, strategy=Layerwise())], True, ranks=1
    )
    for rank in cluster.call(train, questions, ranks=workers):
        for found, told, held_out in rank:
            for own, expected in zip(found, weights, strict=True):
                np.testing.assert_allclose(own, expected, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(told, losses, rtol=1e-9)
            assert held_out == pytest.approx(metrics, rel=1e-9)


slow = pytest.mark.slow
IN_STAGES: list[Strategy] = [
    Pipeline("gpipe", microbatches=4, recompute=True),
    Pipeline("zero_bubble", microbatches=3, partition=(1, 4)),
    Layerwise(),
]
WAVES: list[Strategy] = [
    Pipeline("wavefront", microbatches=4, partition=(2, 3)),
    Pipeline("wavefront", microbatches=3, partition=(1, 4), recompute=True),
]


@pytest.mark.battery(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies",
    [
        [Pipeline("1f1b", microbatches=3, partition=(2, 3))],
        pytest.param(IN_STAGES, marks=slow),  # a test below covers WAVES with gaps
    ],
)
def test_masks_travel_between_stages_and_count_in_the_loss(
    cluster: Cluster, strategies: list[Strategy]
) -> None:
    assert_same(cluster, strategies, sentences(), data(WORDS, EACH))


@pytest.mark.exhaustive
def test_a_stretch_that_begins_with_masked_steps_goes_on_from_the_one_before(
    cluster: Cluster,
) -> None:
    assert_same(cluster, WAVES, sentences(), data(HOLES, EACH))
    assert_same(cluster, WAVES[:1], sentences(end=True), data(HOLES, EACH[:, 0]))


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize(
    ("model", "dataset"),
    [
        (plain("mean_with_sample_weight"), data(HOLES, EACH[:, 0], ROW_WEIGHTS)),
        *(
            pytest.param(*case, marks=slow)
            for case in (
                (sentences(reduction="sum"), data(WORDS, EACH)),
                (sentences(reduction="mean_with_sample_weight"), data(WORDS, EACH, STEP_WEIGHTS)),
                (sentences(from_logits=True, ignore_class=-1), data(WORDS, CLASSES, STEP_WEIGHTS)),
                (plain("sum_over_batch_size"), data(HOLES, EACH[:, 0], ROW_WEIGHTS)),
            )
        ),
    ],
)
def test_micro_batches_count_as_keras_reduces_a_loss(
    cluster: Cluster, model: Any, dataset: Any
) -> None:
    strategies: list[Strategy] = [Pipeline("1f1b", microbatches=3)]
    assert_same(cluster, strategies, model, dataset)


@pytest.mark.exhaustive
def test_delayed_gradients_hand_masks_on(cluster: Cluster) -> None:
    """Test one module, which delays nothing, and two, whose first loss equals one process's."""
    assert_same(cluster, [DelayedGradients()], sentences(), data(WORDS, EACH), workers=1)
    question = experiment(DelayedGradients(), sentences(), data(WORDS, EACH)).replace(
        batch_size=ROWS, epochs=1
    )
    one = question.replace(workers=1, strategy=Layerwise())
    (((_, expected, _),),) = cluster.call(train, [one], True, ranks=1)
    for ((_, told, _),) in cluster.call(train, [question], ranks=2):
        np.testing.assert_allclose(told, expected, rtol=1e-9)


@pytest.mark.exhaustive
def test_masked_layers_in_slices(cluster: Cluster) -> None:
    assert_same(cluster, [TensorParallel()], sentences(), data(WORDS, EACH))


def scores() -> Any:
    """Return a next-word model whose scores stay sliced: no mask, no dense layer before them."""
    import keras

    layers = [keras.layers.Embedding(9, 4), keras.layers.GRU(4, return_sequences=True)]
    model = keras.Sequential([keras.Input((STEPS,)), *layers, keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.slow
def test_weights_count_in_scores_that_stay_cut(cluster: Cluster) -> None:
    """Test a softmax over slices, in which Keras's own loss takes no part."""
    chosen = data(WORDS, np.maximum(CLASSES, 0), STEP_WEIGHTS)
    assert_same(cluster, [TensorParallel()], scores, chosen)


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize(
    ("model", "dataset", "strategies"),
    [
        (tangled(), data(*NAMED), [Pipeline("1f1b", microbatches=3)]),
        pytest.param(
            tangled(tuple, list),
            data((A, B), (FIRST, SECOND)),
            [
                Pipeline("interleaved", microbatches=2, virtual_stages_per_rank=2),
                Pipeline("zero_bubble"),
            ],
            marks=slow,
        ),
        pytest.param(
            ladder,
            data(A, FIRST),
            [
                Pipeline("gpipe", microbatches=3, partition=(2, 5), recompute=True),
                Pipeline("interleaved", microbatches=2, virtual_stages_per_rank=3),
            ],
            marks=slow,
        ),
        pytest.param(
            translator,
            data((WORDS, HOLES), EACH),
            [Pipeline(microbatches=3)],
            marks=slow,
        ),
    ],
)
def test_each_tensor_passes_straight_to_the_stages_that_read_it(
    cluster: Cluster, model: Any, dataset: Any, strategies: list[Strategy]
) -> None:
    assert_same(cluster, strategies, model, dataset)


@slow
def test_a_tensor_skips_the_stages_between_and_its_gradients_add_up(cluster: Cluster) -> None:
    """Test three stages, of which both later ones read the first one's output."""
    strategies: list[Strategy] = [Pipeline(microbatches=3, partition=(2, 2, 3))]
    assert_same(cluster, strategies, ladder, data(A, FIRST), workers=3)
    strategies = [Pipeline("zero_bubble", microbatches=3)]
    assert_same(cluster, strategies, tangled(), data(*NAMED), workers=3)


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize(
    ("model", "dataset"),
    [
        (tangled(), data(*NAMED)),
        pytest.param(tangled(tuple, list), data((A, B), (FIRST, SECOND)), marks=slow),
        pytest.param(translator, data((WORDS, HOLES), EACH), marks=slow),
    ],
)
def test_slices_of_models_with_several_inputs_and_outputs(
    cluster: Cluster, model: Any, dataset: Any
) -> None:
    assert_same(cluster, [TensorParallel()], model, dataset)


@slow
@pytest.mark.parametrize(
    ("model", "dataset", "more"),
    [
        (
            tangled(),
            data(*NAMED),
            [Pipeline(microbatches=2, stages=2), TensorParallel(tensor_parallel_size=2)],
        ),
        (translator, data((WORDS, HOLES), EACH), []),
    ],
    ids=["tangled", "masked"],
)
def test_stages_of_slices_and_replicas_of_what_is_no_chain(
    cluster: Cluster, model: Any, dataset: Any, more: list[Strategy]
) -> None:
    assert_same(
        cluster, [Pipeline(microbatches=2, tensor_parallel_size=2), *more], model, dataset, 4
    )


def late(communicator: Any, modules: int) -> Any:
    """Return the weights by delayed gradients on these ranks, and by the formula."""
    import tensorflow as tf

    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    question = experiment(DelayedGradients(), tangled(), data(*NAMED), modules)
    session = TrainingSession(question, communicator, read(question, communicator))
    question.strategy.train(session)
    found = [variable.numpy() for variable in session.model.trainable_variables]
    cut: Any = session.partition
    owners = {
        name: module
        for module, (a, b) in enumerate(pairwise(cut["edges"]))
        for name in cut["blocks"][a:b]
    }
    session.close()
    session = TrainingSession(question, communicator, read(question, communicator))
    model = session.model
    session.compile(session.optimizer())
    values, past = [v.numpy() for v in model.trainable_variables], []
    edges = [0, 13, 26, 33]
    for _ in range(question.epochs):
        for a, b in pairwise(edges):
            for variable, value in zip(model.trainable_variables, values, strict=True):
                variable.assign(value)
            x, y = ({k: v[a:b] for k, v in each.items()} for each in NAMED)
            with tf.GradientTape() as tape:
                loss = model._compile_loss(y, model(x, training=True)) + sum(model.losses)
            weights = [v.value for v in model.trainable_variables]
            past.append([np.asarray(g) for g in tape.gradient(loss, weights)])
            for n, variable in enumerate(model.trainable_variables):
                back = modules - 1 - owners[variable.path.split("/")[0]]
                if back < len(past):
                    values[n] = values[n] - 0.1 * past[-1 - back][n]
    session.close()
    return found, values


@slow
def test_delayed_gradients_of_what_is_no_chain_are_as_late_as_the_formula_says(
    cluster: Cluster,
) -> None:
    for found, expected in cluster.call(late, 3, ranks=3):
        for own, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, right, rtol=1e-9, atol=1e-12)


def test_a_layer_whose_calls_would_stand_in_two_stages_is_refused(cluster: Cluster) -> None:
    with pytest.raises(InvalidInput, match=r"calls that share weights \(tied\).*leaves 1"):
        cluster.call(train, [experiment(Layerwise(), tied, data(A, A))], ranks=2)


@slow
def test_a_mask_that_only_weights_can_tell_is_refused_where_it_counts(cluster: Cluster) -> None:
    def build() -> Any:
        import keras
        from keras.layers import LSTM, Dense, Masking

        layers = [Dense(4, "relu"), Masking(), LSTM(4, return_sequences=True), Dense(3)]
        model = keras.Sequential([keras.Input((STEPS, 3)), *layers])
        model.compile("sgd", "mean_squared_error")
        return model

    assert_same(cluster, [Layerwise()], build, data(EACH, EACH))
    question = experiment(Pipeline(microbatches=3), build, data(EACH, EACH))
    with pytest.raises(InvalidInput, match=r"mask of the predictions depends on weights .*kernel"):
        cluster.call(train, [question], ranks=2)


@pytest.mark.slow
def test_masks_that_attention_takes_off_are_refused_where_they_would_pass(cluster: Cluster) -> None:
    assert_same(cluster, [TensorParallel()], attentive, data(WORDS, EACH))
    question = experiment(Pipeline(microbatches=3), attentive, data(WORDS, EACH))
    with pytest.raises(InvalidInput, match="removes the masks of its inputs"):
        cluster.call(train, [question], ranks=2)
