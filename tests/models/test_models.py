"""Test models: invalid ones are refused without TensorFlow, and all ranks build the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from labkit import datasets, models
from labkit.common.errors import InvalidInput
from labkit.datasets import Shapes
from labkit.models import MODELS
from labkit.models.named_models import APPLICATIONS, class_of, smallest

DIGITS = Shapes((8, 8, 1), 10, "classification")
TABLE = Shapes((12,), 2, "classification")
TARGETS = Shapes((12,), 3, "regression")
TEXT = Shapes((20,), 65, "next_character")
FITTING = [
    *((name, shapes) for name in ("linear", "mlp", "rnn") for shapes in (DIGITS, TABLE, TARGETS)),
    ("cnn", DIGITS),
    ("locally_connected", DIGITS),
    ("rnn", TEXT),
    ("transformer", TEXT),
    ("mobilenet_v2", Shapes((32, 32, 3), 10, "classification")),
]


@pytest.fixture(params=["float32", "float64"])
def floatx(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set Keras's floating-point type during a test."""
    import keras

    _set_floatx(request.param)
    yield request.param
    _set_floatx("float32")
    keras.backend.clear_session()


def _set_floatx(floatx: str) -> None:
    import keras

    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)  # Keras remembers the dtype policy of its first layer


# Checked without TensorFlow -----------------------------------------------------------------------


def test_checking_imports_neither_tensorflow_nor_scikit_learn_nor_pooch() -> None:
    code = (
        "import sys; from labkit import datasets, models;"
        "models.check('inception_v3', {}, datasets.check('synthetic', {'shape': [75, 75, 3]}));"
        "print({'tensorflow', 'keras', 'sklearn', 'pooch'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet", {}, "did you mean 'resnet"),
        ("mlpp", {}, r"unknown model 'mlpp' \(did you mean 'mlp'\?\)$"),
        ("mlp", {"width": [3]}, "did you mean 'widths'.*; allowed: widths, activation, dropout"),
        ("mlp", {"widths": [-1]}, r"widths=\[-1\] is impossible; allowed: units of each hidden"),
        ("mlp", {"widths": 128}, r"such as \[128, 64\]"),
        ("mlp", {"dropout": 1.0}, "0 to below 1"),
        ("mlp", {"dropout": float("nan")}, "0 to below 1"),
        ("mlp", {"activation": "rleu"}, "allowed: relu, gelu"),
        ("cnn", {"filters": []}, "filters of each convolution"),
        ("rnn", {"cell": "rnn"}, "lstm or gru"),
        ("rnn", {"layers": 0}, "number of recurrent layers, 1 or more"),
        (
            "transformer",
            {"heads": 5},
            "heads=5 is impossible; allowed: number of attention heads.* divisor of width",
        ),
        (
            "transformer",
            {"width": 6},
            "heads=4 is impossible; allowed: number of attention heads.* divisor of width",
        ),
        ("linear", {"units": 3}, "allowed: none"),
        ("inception_v3", {"weights": "imagenet"}, "allowed: none"),
    ],
)
def test_what_cannot_work_is_refused_with_what_is_allowed(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        models.check(name, options)


@pytest.mark.parametrize(
    ("name", "shapes", "message"),
    [
        ("mlp", TEXT, "'mlp' cannot predict the next character of a sequence; allowed: rnn"),
        (
            "cnn",
            TABLE,
            r"does not fit examples of shape \[12\]; allowed: images of at least \[6, 6",
        ),
        ("inception_v3", DIGITS, r"\[8, 8, 1\]; allowed: images of at least \[75, 75, channels\]"),
        (
            "transformer",
            DIGITS,
            r"characters, not examples of shape \[8, 8, 1\]; .* 'shakespeare', .* linear, mlp, rnn",
        ),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(
    name: str, shapes: Shapes, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        models.check(name, {}, shapes)


@pytest.mark.parametrize("name", MODELS)
def test_every_option_says_what_is_allowed(name: str) -> None:
    for option, field in MODELS[name].options.model_fields.items():
        assert field.description, option


# Built with TensorFlow ----------------------------------------------------------------------------


def test_the_table_of_applications_is_that_of_the_installed_keras() -> None:
    import keras

    classes = (name for name in dir(keras.applications) if name[0].isupper())
    assert sorted(class_of(name).__name__ for name in APPLICATIONS) == sorted(classes)


@pytest.mark.battery(10, 10)
@pytest.mark.parametrize(("name", "shapes"), FITTING)
def test_every_model_gives_scores_for_every_task_it_fits(
    name: str, shapes: Shapes, floatx: str
) -> None:
    model = models.build(name, shapes)
    text = shapes.task == "next_character"
    x = np.zeros((2, *shapes.input_shape), np.int32 if text else np.float32)
    scores = model(x)
    assert scores.shape == (2, *(shapes.input_shape if text else ()), shapes.outputs)
    assert scores.dtype.name == floatx
    assert {weight.dtype for weight in model.trainable_weights} == {floatx}
    assert model.layers[-1].activation.__name__ == "linear"
    assert not model.compiled


def test_the_cnn_has_the_parameters_of_the_mnist_example() -> None:
    model = models.build("cnn", Shapes((28, 28, 1), 10, "classification"))
    assert model.count_params() == 1_199_882


def test_options_shape_the_model() -> None:
    widths = models.build("mlp", TABLE, widths=[5], dropout=0.5)
    assert [weight.shape for weight in widths.weights] == [(12, 5), (5,), (5, 2), (2,)]
    assert any(type(layer).__name__ == "Dropout" for layer in widths.layers)
    assert models.build("mlp", TABLE, widths=[]).count_params() == 12 * 2 + 2
    gated = models.build("rnn", TEXT, cell="gru", units=7, embedding=3)
    assert [weight.shape for weight in gated.weights][:2] == [(65, 3), (3, 21)]
    stacked = models.build("rnn", DIGITS, layers=3, units=5)
    assert [layer.output.shape for layer in stacked.layers[1:-1]] == [
        *[(None, 8, 5)] * 2,
        (None, 5),
    ]
    assert models.build("rnn", TEXT, layers=2).output_shape == (None, 20, 65)


@pytest.mark.parametrize(("name", "shapes"), [("mlp", DIGITS), ("cnn", DIGITS), ("rnn", TEXT)])
def test_the_seed_alone_decides_the_initial_weights(name: str, shapes: Shapes) -> None:
    import keras

    def weights(seed: int) -> list[np.ndarray]:
        keras.utils.set_random_seed(seed)
        return list(models.build(name, shapes).get_weights())

    first, again, other = weights(1), weights(1), weights(2)
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(first[0], other[0])


def test_a_transformer_sees_what_came_before_and_opens_anywhere(tmp_path: Path) -> None:
    import keras

    from labkit.model_parallel.stages import BlockChain

    model = models.build("transformer", TEXT, width=12, heads=3, feed_forward=7, dropout=0.1)
    codes = np.random.default_rng(0).integers(0, 65, (2, 20))
    other = np.where(np.arange(20) < 11, codes, 0)
    changed = np.abs(model(codes) - model(other)).max(axis=(0, 2)) > 0
    assert changed.tolist() == [False] * 11 + [True] * 9
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(codes), model(codes))
    halves = [f"{half}_add_{number}" for number in (1, 2) for half in ("attention", "feed_forward")]
    assert BlockChain(model).names()[1:] == [*halves, "norm", "scores"]


@pytest.mark.parametrize(
    ("name", "shapes", "options", "units"),
    [
        ("linear", DIGITS, {}, 10),
        ("mlp", DIGITS, {"widths": []}, 10),
        ("cnn", DIGITS, {"filters": [3], "dense": 12}, 12),
        ("rnn", TEXT, {}, 65),
        ("transformer", TEXT, {"feed_forward": 7, "width": 8}, 65),
        ("mobilenet_v2", Shapes((32, 32, 3), 10, "classification"), {}, None),
    ],
)
def test_the_widest_layer_is_known_without_building_it(
    name: str, shapes: Shapes, options: dict[str, object], units: int | None
) -> None:
    assert models.max_slices(name, options, shapes) == units


@pytest.mark.parametrize("pixels", [smallest("inception_v3"), smallest("inception_v3") - 1])
def test_inception_is_built_from_75_pixels_on(pixels: int) -> None:
    shapes = Shapes((pixels, pixels, 3), 10, "classification")
    if pixels < 75:
        with pytest.raises(InvalidInput, match="images of at least"):
            models.build("inception_v3", shapes)
    else:
        assert models.build("inception_v3", shapes).output_shape == (None, 10)


def test_an_application_whose_name_keras_uses_as_a_key_is_built() -> None:
    model = models.build("efficientnet_v2_b0", Shapes((32, 32, 3), 10, "classification"))
    assert "Rescaling" not in {type(layer).__name__ for layer in model.layers}


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize(
    ("name", "data", "options", "metric"),
    [
        ("mlp", "digits", {}, "accuracy"),
        ("mlp", "synthetic", {"task": "regression", "targets": 2}, "mean_absolute_error"),
    ],
)
def test_a_model_learns_its_task(
    name: str, data: str, options: dict[str, object], metric: str
) -> None:
    import keras

    keras.utils.set_random_seed(0)
    dataset = datasets.load(data, **options)
    model = models.build(name, dataset)
    loss, metrics = models.task_loss(dataset.task), models.task_metrics(dataset.task)
    model.compile("adam", loss=loss, metrics=metrics)
    model.fit(dataset.x_train, dataset.y_train, epochs=8, verbose=0)
    found = model.evaluate(dataset.x_test, dataset.y_test, verbose=0, return_dict=True)
    assert set(found) == {"loss", metric}
    assert found["loss"] < 0.25
    assert metric != "accuracy" or found["accuracy"] > 0.93


def test_the_losses_take_scores_not_probabilities() -> None:
    loss = models.task_loss("classification")
    assert float(loss(np.array([1]), np.array([[0.0, 3.0]]))) == pytest.approx(np.log1p(np.exp(-3)))
    per_character = models.task_loss("next_character")
    assert float(per_character(np.zeros((2, 5)), np.zeros((2, 5, 65)))) == pytest.approx(np.log(65))
    assert float(models.task_loss("regression")(np.zeros((2, 3)), np.full((2, 3), 2.0))) == 4
