"""Names of Keras losses, metrics and optimizer arguments, checked without importing Keras."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from labkit.common.errors import InvalidInput
from labkit.common.nearest import listed, refuse_unknown


def _split(text: str) -> list[str]:
    return text.split()


# Keras can construct the losses in `LOSSES` without arguments.
LOSSES = _split("""
    bce binary_crossentropy binary_focal_crossentropy categorical_crossentropy
    categorical_focal_crossentropy categorical_hinge circle cosine_similarity ctc dice hinge huber
    kl_divergence kld log_cosh mae mape mean_absolute_error mean_absolute_percentage_error
    mean_squared_error mean_squared_logarithmic_error mse msle poisson
    sparse_categorical_crossentropy squared_hinge tversky BCE BinaryCrossentropy
    BinaryFocalCrossentropy CTC CategoricalCrossentropy CategoricalFocalCrossentropy
    CategoricalHinge Circle CosineSimilarity Dice Hinge Huber KLD KLDivergence LogCosh MAE MAPE
    MSE MSLE MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError
    MeanSquaredLogarithmicError Poisson SparseCategoricalCrossentropy SquaredHinge Tversky
""")

# Keras can construct the metrics in `METRICS` without arguments. The metric names "acc" and
# "accuracy" are also allowed, because Keras's `compile` resolves both names.
METRICS = _split("""
    acc accuracy auc bce binary_accuracy binary_crossentropy binary_io_u categorical_accuracy
    categorical_crossentropy categorical_hinge concordance_correlation cosine_similarity f1_score
    f_beta_score false_negatives false_positives hinge kl_divergence log_cosh_error mae mape mean
    mean_absolute_error mean_absolute_percentage_error mean_squared_error
    mean_squared_logarithmic_error mse msle pearson_correlation poisson precision r2_score recall
    root_mean_squared_error sparse_categorical_accuracy sparse_categorical_crossentropy
    sparse_top_k_categorical_accuracy squared_hinge sum top_k_categorical_accuracy true_negatives
    true_positives AUC Accuracy BCE BinaryAccuracy BinaryCrossentropy BinaryIoU
    CategoricalAccuracy CategoricalCrossentropy CategoricalHinge ConcordanceCorrelation
    CosineSimilarity F1Score FBetaScore FalseNegatives FalsePositives Hinge KLDivergence
    LogCoshError MAE MAPE MSE MSLE Mean MeanAbsoluteError MeanAbsolutePercentageError
    MeanSquaredError MeanSquaredLogarithmicError PearsonCorrelation Poisson Precision R2Score
    Recall RootMeanSquaredError SparseCategoricalAccuracy SparseCategoricalCrossentropy
    SparseTopKCategoricalAccuracy SquaredHinge Sum TopKCategoricalAccuracy TrueNegatives
    TruePositives
""")

COMMON_ARGUMENTS = _split("""
    learning_rate weight_decay clipnorm clipvalue global_clipnorm use_ema ema_momentum
    ema_overwrite_frequency loss_scale_factor gradient_accumulation_steps name
""")

OPTIMIZER_ARGUMENTS = {
    name: _split(options)
    for name, options in {
        "sgd": "momentum nesterov",
        "rmsprop": "rho momentum epsilon centered",
        "adam": "beta_1 beta_2 epsilon amsgrad",
        "adamw": "beta_1 beta_2 epsilon amsgrad",
        "adadelta": "rho epsilon",
        "adagrad": "initial_accumulator_value epsilon",
        "adamax": "beta_1 beta_2 epsilon",
        "adafactor": "beta_2_decay epsilon_1 epsilon_2 clip_threshold relative_step",
        "nadam": "beta_1 beta_2 epsilon",
        "ftrl": (
            "learning_rate_power initial_accumulator_value l1_regularization_strength "
            "l2_regularization_strength l2_shrinkage_regularization_strength beta"
        ),
        "lion": "beta_1 beta_2",
        "lamb": "beta_1 beta_2 epsilon",
        "lars": "momentum trust_coefficient exclude_1d trust_ratio",
        "muon": (
            "adam_beta_1 adam_beta_2 adam_weight_decay epsilon exclude_layers "
            "exclude_embeddings muon_a muon_b muon_c adam_lr_ratio momentum ns_steps nesterov "
            "rms_rate"
        ),
        "schedulefreeadamw": "beta_1 beta_2 epsilon warmup_steps",
    }.items()
}


def check_names(
    loss: str | None, metrics: Iterable[str] | None, optimizer: str, options: Mapping[str, object]
) -> None:
    """Raise an error if Keras does not know the loss, a metric or an optimizer argument.

    Args:
        loss: Name of a loss, or None to check no loss.
        metrics: Names of metrics, or None to check no metrics.
        optimizer: Name of an optimizer that labkit supports.
        options: Arguments of the optimizer.

    Raises:
        InvalidInput: A name is unknown; the message suggests the nearest known name.
    """
    # Loss names are case-sensitive, as in Keras.
    refuse_unknown("loss", [] if loss is None else [loss], LOSSES)
    refuse_unknown("metrics", metrics or (), METRICS)
    allowed = [*OPTIMIZER_ARGUMENTS[optimizer], *COMMON_ARGUMENTS]
    for name in options:
        if name not in allowed:
            raise InvalidInput(
                f"optimizer_options: {optimizer} has no argument {name!r}{listed(name, allowed)}"
            )
