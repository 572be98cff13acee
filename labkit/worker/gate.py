"""The equivalence gate: an exact strategy must do what one process does, or has no speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import keras
import numpy as np
import tensorflow as tf

from labkit.common.places import cache_folder, fingerprint
from labkit.communicator import Communicator, alone
from labkit.compression import Compressor
from labkit.exchange.seam import Hook, Rows, Variables, seam
from labkit.experiment.experiment import Experiment, digest
from labkit.records.result import Verdict
from labkit.records.store import read_json, write_json
from labkit.strategies import AllReduce
from labkit.worker.conservation import Audit
from labkit.worker.feed import Source, global_batches, plan_of
from labkit.worker.session import TrainingSession, build_model, reset

STEPS = 20
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}  # of the largest weight
# What does not change whether the method is exact.
_IRRELEVANT = ("name", "epochs", "steps", "repeats", "threads", "seed", "gate", "callbacks")


def verify(experiment: Experiment, communicator: Communicator, source: Source) -> Verdict:
    r"""Train 20 steps on the ranks and in one process, in float64, and compare every weight.

    A lossy exchange is held against its conservation law instead, see `labkit.worker.conservation`.
    Passed when \(\max|w_\mathrm{ranks} - w_\mathrm{one}| \le 10^{-9} \max|w|\); a model that keeps
    float32 weights in spite of the policy is held to 1e-4. Collective over the communicator; the
    verdict is the same on all ranks and is cached by what it depends on.
    """
    reason = _why_not(experiment, source)
    if reason:
        return _verdict("not applicable", reason)
    place = cache_folder("gates") / f"{_key(experiment)}.json"
    known: Verdict | None = None
    if communicator.rank == 0 and place.exists():
        known = read_json(place)["equivalence"]
    known = communicator.share(known, what="the gate's cache")
    if known is not None:
        return known
    found = _compare(experiment, communicator, source)
    verdict: Verdict = communicator.share(found, what="the gate")
    if communicator.rank == 0:
        write_json(place, {"equivalence": verdict})
    return verdict


def _compare(experiment: Experiment, communicator: Communicator, source: Source) -> Verdict | None:
    short = _shortened(experiment, communicator, source)
    ranks = TrainingSession(short, communicator, source)
    ranks.feed.validation = None
    if (lossy := short.strategy.lossy) is not None:
        return _audit(short, ranks, lossy)
    short.strategy.train(ranks)
    ranks.close()
    if communicator.rank > 0:
        return None
    process = alone()
    single = short.replace(workers=1, capacities=None, strategy=AllReduce())
    one = TrainingSession(single, process, source)
    one.feed.validation = None
    one.feed.train = _for_one_process(short, communicator.size, process, source, one)
    process.close()
    one.compile(ranks.optimizer())  # the rate is scaled by the number of ranks in both
    seam(one.model).put_on(AddUpRows())
    one.fit([])
    # Not all variables: beside weights whose size is 1, states of random numbers reach 2³².
    pairs = list(zip(ranks.model.weights, one.model.weights, strict=True))
    # NumPy's maximum, unlike Python's, is not a number where one of its values is not.
    difference = float(np.max([np.abs(a.numpy() - b.numpy()).max(initial=0) for a, b in pairs]))
    scale = float(np.max([np.abs(b.numpy()).max(initial=0) for _, b in pairs]))
    kept = {b.dtype for b in one.model.trainable_variables}
    tolerance = TOLERANCE["float64" if kept == {"float64"} else "float32"] * max(scale, 1.0)
    passed = difference <= tolerance  # False where a weight is not a number
    what = f"{STEPS} steps on {communicator.size} ranks against one process, {'/'.join(kept)}"
    return _verdict("passed" if passed else "failed", what, difference, tolerance)


class AddUpRows(Hook):
    """Lets the optimizer see one gradient a row of an embedding, as ranks that add up do.

    Of a word that comes twice, Keras's Adam and its kin square each part of its gradient alone.
    """

    name: ClassVar[str] = "dense"

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Each gradient as a tensor of its variable's shape."""
        whole = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
        return inner(whole, variables)


def _audit(short: Experiment, ranks: TrainingSession, compressor: Compressor) -> Verdict:
    """Hold a compressor against its conservation law."""
    audit = Audit(ranks.communicator, compressor.conserves, compressor.rounding)
    ranks.watchers.append(audit.look)
    short.strategy.train(ranks)
    difference, tolerance = audit.difference()
    law = "sent + residual = gradient, and " if compressor.conserves else ""
    what = f"{STEPS} steps of {type(compressor).__name__}: {law}applied = mean of what was sent"
    return _verdict("passed" if difference <= tolerance else "failed", what, difference, tolerance)


def _shortened(experiment: Experiment, communicator: Communicator, source: Source) -> Experiment:
    if callable(source.train):
        return experiment.replace(precision="float64", epochs=1, steps=STEPS, callbacks=None)
    steps = min(STEPS, -(-source.rows(communicator) // experiment.batch_size))
    return experiment.replace(
        precision="float64", epochs=-(-STEPS // steps), steps=steps, callbacks=None
    )


def _for_one_process(
    short: Experiment, workers: int, process: Communicator, source: Source, one: TrainingSession
) -> tf.data.Dataset:
    """The global batches that the ranks have seen together."""
    if callable(source.train):
        return one.feed.train
    plan = plan_of(short, source.rows(process), short.capacities or (1.0,) * workers)
    return global_batches(source, plan, short.epochs)


def _why_not(experiment: Experiment, source: Source) -> str | None:
    if not experiment.gate:
        return "gate=False"
    if experiment.workers == 1:
        return "one process has nothing to be held against"
    lossy = experiment.strategy.lossy
    if lossy is None and not experiment.strategy.exact:
        return f"{type(experiment.strategy).__name__} is not exact"
    if lossy is not None and lossy.votes:
        return f"{type(lossy).__name__} is a vote, not a mean of what ranks have sent"
    reset(experiment)
    model = build_model(experiment, source)
    if type(model).train_step is not keras.Model.train_step:
        return "the model has a train_step of its own, which need not be a mean over samples"
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.BatchNormalization):
            return f"layer {layer.name!r} normalises by each rank's own batch"
        if _is_random(layer):
            return f"layer {layer.name!r} draws random numbers on each rank"
    return None


def _is_random(layer: keras.layers.Layer) -> bool:
    """Whether it draws numbers; a recurrent cell has a generator also where it drops nothing."""
    shares = [
        getattr(layer, name)
        for name in ("rate", "stddev", "dropout", "recurrent_dropout")
        if hasattr(layer, name)
    ]
    return hasattr(layer, "seed_generator") and (any(shares) or not shares)


def _key(experiment: Experiment) -> str:
    record = {k: v for k, v in experiment.to_json().items() if k not in _IRRELEVANT}
    return digest([record, fingerprint(), keras.__version__])


def _verdict(
    verdict: Literal["passed", "failed", "not applicable"],
    reason: str,
    difference: float | None = None,
    tolerance: float | None = None,
) -> Verdict:
    return Verdict(
        verdict=verdict, max_abs_difference=difference, tolerance=tolerance, reason=reason
    )
