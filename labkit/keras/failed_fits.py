"""Restart of `fit` after an earlier `fit` has failed on some ranks or on all."""

from __future__ import annotations

import inspect
import sys
from weakref import WeakKeyDictionary, ref

import keras

from labkit.communicator import Communicator
from labkit.communicator.reserve import RecoveryBarrier
from labkit.exchange.hooks import hooks_of
from labkit.keras.optimizer import distributed_optimizers

_RESERVES: WeakKeyDictionary[Communicator, RecoveryBarrier] = WeakKeyDictionary()
_FIT = inspect.unwrap(keras.Model.fit).__code__  # the method of Keras itself, not of a subclass
# Model that is in a `fit`, by communicator.
_FITTED: WeakKeyDictionary[Communicator, ref[keras.Model]] = WeakKeyDictionary()


def prepare_restarts(communicator: Communicator) -> None:
    """Allow all ranks to call `fit` again after a failed `fit` (collective)."""
    from mpi4py import MPI

    if communicator.size > 1:
        _RESERVES[communicator] = RecoveryBarrier(MPI.COMM_WORLD, communicator)


def begin_fit(model: keras.Model, communicator: Communicator) -> None:
    """Wait for all ranks; after a failed `fit`, reset their shared state (collective).

    A `fit` inside another `fit`, for example in a callback, neither waits nor resets.
    """
    fitted = _FITTED.get(communicator)
    exclude_current = fitted is not None and fitted() is model
    if not is_inside_fit(communicator, exclude_current):
        _restart_after_failure(model, communicator)
        _FITTED[communicator] = ref(model)


def begin_evaluation(model: keras.Model, communicator: Communicator) -> None:
    """Wait for all ranks before an evaluation; reset after a failed `fit` (collective)."""
    if not is_inside_fit(communicator):
        _restart_after_failure(model, communicator)


def end_fit(model: keras.Model, communicator: Communicator) -> None:
    """Record that the `fit` of `model` has ended on this rank."""
    fitted = _FITTED.get(communicator)
    if fitted is not None and fitted() is model:
        del _FITTED[communicator]


def _restart_after_failure(model: keras.Model, communicator: Communicator) -> None:
    reserve = _RESERVES.get(communicator)
    if reserve is None:
        return
    failure = str(communicator.wait_policy.first_error or "")
    if _FITTED.pop(communicator, None) is not None:
        failure = failure or "its fit ended early"
    exchanges = [optimizer.exchange for optimizer in distributed_optimizers(model)]

    def settle() -> None:
        for exchange in exchanges:
            exchange.service.close()

    reserve.meet("the start of a fit or an evaluation", failure, settle)
    outdated = [exchange for exchange in exchanges if exchange.is_outdated]
    for exchange in outdated:
        exchange.reset(1.0)
    if outdated:  # the compiled function still refers to deleted gradient buckets
        hooks_of(model).discard_compiled()
        model.make_train_function()


def is_inside_fit(communicator: Communicator, exclude_current: bool = False) -> bool:
    """Return whether the call stack contains a `fit` with this communicator.

    Args:
        communicator: Communicator of the ranks that call `fit`.
        exclude_current: Whether to ignore the `fit` in which the caller itself runs.
    """
    fitted = _FITTED.get(communicator)
    model = None if fitted is None else fitted()
    count, frame = 0, sys._getframe()
    while model is not None and (outer := frame.f_back) is not None:
        frame = outer
        count += frame.f_code is _FIT and frame.f_locals.get("self") is model
    return count > exclude_current
