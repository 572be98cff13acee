"""After a fit that failed on some ranks, or on all, the next one begins as if there were none."""

from __future__ import annotations

import inspect
import sys
from weakref import WeakKeyDictionary, ref

import keras

from labkit.communicator import Communicator
from labkit.communicator.reserve import Reserve
from labkit.exchange.hooks import seam
from labkit.keras.optimizer import distributed_optimizers

_RESERVES: WeakKeyDictionary[Communicator, Reserve] = WeakKeyDictionary()
_FIT = inspect.unwrap(keras.Model.fit).__code__  # not that of a class which overrides it
_FITTED: WeakKeyDictionary[Communicator, ref[keras.Model]] = WeakKeyDictionary()  # under way


def prepare_restarts(communicator: Communicator) -> None:
    """From now on let fits of all ranks begin anew after a failure (collective)."""
    from mpi4py import MPI

    if communicator.size > 1:
        _RESERVES[communicator] = Reserve(MPI.COMM_WORLD, communicator)


def begin_fit(model: keras.Model, communicator: Communicator) -> None:
    """Wait for all ranks; after a failure, make anew what they share (collective).

    A fit inside another one, in a callback, begins without this.
    """
    fitted = _FITTED.get(communicator)
    own = fitted is not None and fitted() is model
    if not is_inside_fit(communicator, own):
        _meet(model, communicator)
        _FITTED[communicator] = ref(model)


def begin_evaluation(model: keras.Model, communicator: Communicator) -> None:
    """Likewise."""
    if not is_inside_fit(communicator):
        _meet(model, communicator)


def end_fit(model: keras.Model, communicator: Communicator) -> None:
    """Know that a fit has come to its end on this rank."""
    fitted = _FITTED.get(communicator)
    if fitted is not None and fitted() is model:
        del _FITTED[communicator]


def _meet(model: keras.Model, communicator: Communicator) -> None:
    reserve = _RESERVES.get(communicator)
    if reserve is None:
        return
    failure = str(communicator.patience.trouble or "")
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
    if outdated:  # what was compiled holds buckets that are no more
        seam(model).forget()
        model.make_train_function()


def is_inside_fit(communicator: Communicator, own: bool = False) -> bool:
    """Whether a fit of these ranks is on the stack, besides the one that begins."""
    fitted = _FITTED.get(communicator)
    model = None if fitted is None else fitted()
    count, frame = 0, sys._getframe()
    while model is not None and (outer := frame.f_back) is not None:
        frame = outer
        count += frame.f_code is _FIT and frame.f_locals.get("self") is model
    return count > own
