"""One stage on its rank: forward and backward of a micro-batch, and what is kept between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import keras
import tensorflow as tf

from labkit.model_parallel.functional import Nest, is_masked, mask_of, masked
from labkit.model_parallel.losses import Weighted
from labkit.model_parallel.stages.compiled import Compiled, Compute, Computed, Values
from labkit.model_parallel.stages.ledger import Ledger
from labkit.model_parallel.stages.microbatches import Rows
from labkit.model_parallel.stages.traced import Specs

# Of targets, predictions, and what targets bring with them: sample weights, or `Weighted` ones.
Loss: TypeAlias = Callable[..., tf.Tensor]
Targets: TypeAlias = "tuple[Nest, Nest | Weighted | None]"  # and their sample weights
# A nest of what a computation is given; None where there is nothing.
Given: TypeAlias = "Rows | Sequence[Given] | None"
# What a model takes or gives: a tensor alone, or several in a list.
Passed: TypeAlias = "Rows | Sequence[Rows | None] | None"


class Stage:
    r"""A part of a model with the activations of the micro-batches that are under way.

    Inputs and outputs are tensors where the model has one, else lists of them. Gradients are those
    of numbers: masks and integers go forward alone.

    The objective of the stage is \(\langle y, \bar y \rangle\) with the gradient \(\bar y\) that
    the next stage returns, or the loss at the end; layers' own losses are added. Gradients of
    micro-batches add up. What a backward pass needs is kept as it was in the forward pass, the
    weights included, so that weights may change between both.

    Forward, backward and the two parts of backward are functions of one graph, see `Compiled`,
    which is traced once for any number of rows.

    Args:
        model: a part of the whole model, see `Chain.part`.
        loss: of (targets, predictions, sample weights) at the last stage; None elsewhere.
        first: whether nobody asks for the gradient with respect to an input.
        recompute: keep only the input, and go forward a second time before going back.
        read: of each input, whether it is read from the batch, so that nobody asks for its
            gradient; None: if first, all are.

    Attributes:
        variables: the weights that are trained.
        most_kept: micro-batches at a time.
        own_loss: what layers have added in the latest forward pass, by the share of its rows; None
            where they add nothing, and at the last stage, whose loss has it.
        ledger: counts what is kept.
        computing: stands around each pass, see `labkit.communicator.computing`.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: Loss | None = None,
        first: bool = False,
        recompute: bool = False,
        read: Sequence[bool] | None = None,
    ) -> None:
        self.model, self._loss, self._first, self._recompute = model, loss, first, recompute
        own_read = [first] * len(model.inputs) if read is None else read
        pairs = zip(model.inputs, own_read, strict=True)
        self._asked = [is_number(x) and not there for x, there in pairs]
        self._answered = [] if loss is not None else [is_number(y) for y in model.outputs]
        self.variables = list(model.trainable_variables)
        self._all, own = list(model.variables), {id(variable) for variable in self.variables}
        # Of dropout and normalisation: a second forward pass begins with it as the first one did.
        self._state = [v for v in self._all if recompute and id(v) not in own]
        # One for each kind of arguments: a last batch without weights, say, is another computation.
        self._compiled: dict[tuple[Hashable, ...], Compiled] = {}
        # By micro-batch: several are under way, and they go back in an order of the schedule's own.
        self._kept: dict[int, tuple[Compiled, Values]] = {}
        # Arguments and state, to go forward with again.
        self._given: dict[int, tuple[Compiled, list[tf.Tensor], list[tf.Tensor]]] = {}
        self._waiting: dict[int, tuple[Compiled, Values]] = {}  # for their weight gradients
        self._gradients: list[tf.Tensor] | None = None
        self.most_kept = 0
        self.own_loss: tf.Tensor | None = None
        self.ledger = Ledger()
        self.computing: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(
        self, number: int, x: Passed, share: float, targets: Targets | None = None
    ) -> Passed:
        """The output of a micro-batch; at the last stage its part of the loss, a scalar.

        Args:
            number: of the micro-batch.
            x: its input.
            share: of its rows in the batch, by which losses count.
            targets: (y, sample weights) at the last stage.
        """
        with self.computing():
            given = listed(x), self._aims(targets), self._share(share)
            self.own_loss, *found = self._go(number, self._compute, *given)
        return plain(found)

    def backward(self, number: int, gradient: Passed, weights_later: bool = False) -> Passed:
        """The gradient with respect to each input; None for those of which nobody asks for it.

        Args:
            number: of the micro-batch.
            gradient: with respect to the output; None at the last stage.
            weights_later: leave the gradients of the weights to `backward_weight`.
        """
        with self.computing():
            compiled, kept = self._recall(number)
            seeds = self._seeds(gradient)
            if weights_later:
                dx, left = compiled.backward_input(kept, seeds)
                self._waiting[number] = compiled, left
                self.ledger.keep(self, number, left.values(), self._all)
            else:
                dx, dw = compiled.backward(kept, seeds)
                self._add(number, dw)
        return self._returns(dx)

    def backward_weight(self, number: int) -> None:
        """Add the gradients of the weights of a micro-batch whose `backward` left them."""
        with self.computing():
            compiled, left = self._waiting.pop(number)
            self._add(number, compiled.backward_weight(left))

    def take_gradients(self) -> list[tf.Tensor]:
        """The sum over the micro-batches since the last call, one tensor a variable."""
        found, self._gradients = self._gradients, None
        if found is None:
            return [tf.zeros_like(variable.value) for variable in self.variables]
        return found

    def _go(self, number: int, compute: Compute, *given: Given) -> list[tf.Tensor | None]:
        """Forward; the results of the computation."""
        arguments = [_tensor(each) for each in tf.nest.flatten(given) if each is not None]
        compiled = self._of(compute, given, arguments)
        state = [tf.identity(variable.value) for variable in self._state]
        results, kept = compiled.forward(arguments)
        tensors = list(kept.values())
        # What `kept` holds is let go of here, which is all that recomputing saves.
        if self._recompute:
            self._given[number] = compiled, arguments, state
            tensors = [*arguments, *state]
        else:
            self._kept[number] = compiled, kept
        self.ledger.keep(self, number, tensors, self._all)
        self.most_kept = max(self.most_kept, len(self._kept) + len(self._given))
        return results

    def _recall(self, number: int) -> tuple[Compiled, Values]:
        """What a forward pass has kept, or would have kept."""
        if not self._recompute:
            return self._kept.pop(number)
        compiled, arguments, state = self._given.pop(number)
        # Other micro-batches have gone forward since, and have moved statistics and random seeds
        # on: the second pass begins where the first one did, and leaves no trace of its own.
        now = [tf.identity(variable.value) for variable in self._state]
        self._put(state)
        _, kept = compiled.forward(arguments)
        self._put(now)
        self.ledger.keep(self, number, kept.values(), self._all)
        return compiled, kept

    def _put(self, state: list[tf.Tensor]) -> None:
        for variable, value in zip(self._state, state, strict=True):
            variable.assign(value)

    def _of(self, compute: Compute, given: tuple[Given, ...], tensors: list[tf.Tensor]) -> Compiled:
        """The computation for arguments of this kind: it is traced once for any number of rows."""
        there = tuple(each is not None for each in tf.nest.flatten(given))
        key = compute, there, *((x.dtype, *x.shape[1:]) for x in tensors)
        if key not in self._compiled:
            left = iter(tensors)
            specs = [_spec(next(left)) if each else None for each in there]
            nest = tf.nest.pack_sequence_as(given, specs)
            self._compiled[key] = Compiled(compute, nest, self._inputs, self.variables)
        return self._compiled[key]

    def _inputs(self, x: Sequence[tf.Tensor], *others: Given) -> list[tf.Tensor]:
        return [each for each, asked in zip(x, self._asked, strict=True) if asked]

    def _seeds(self, gradient: Passed) -> list[tf.Tensor]:
        """Gradients with respect to the outputs that have one."""
        given = zip(listed(gradient), self._answered, strict=True) if self._answered else ()
        return [each for each, answered in given if answered]

    def _returns(self, dx: Sequence[tf.Tensor]) -> Passed:
        left = iter(dx)
        return plain([next(left) if asked else None for asked in self._asked])

    def _share(self, share: float) -> tf.Tensor:
        # Of the precision of the losses: a Python number would become a float32 in any case.
        return tf.constant(share, keras.config.floatx())

    def _aims(self, targets: Targets | None) -> Targets | None:
        return None if self._loss is None else targets

    def _compute(
        self, x: Sequence[tf.Tensor], targets: Targets | None, share: tf.Tensor
    ) -> Computed:
        y = answer(self.model, x, training=True)
        objective = self._objective(y, targets, share)
        # The loss needs no gradient from outside; outputs wait for those of the next stages.
        if self._loss is not None:
            return [None, objective], [], objective
        found = keras.tree.flatten(y)
        ends = [each for each, answered in zip(found, self._answered, strict=True) if answered]
        return [objective if self.model.losses else None, *found], ends, objective

    def _objective(self, y: tf.Tensor, targets: Targets | None, share: tf.Tensor) -> tf.Tensor:
        """What the layers add here, and the loss at the end."""
        parts = list(self.model.losses)
        if self._loss is not None and targets is not None:
            parts.append(self._loss(targets[0], y, targets[1]))
        # Under a mixed policy losses come in several types; the sum is of the wide one.
        objective = tf.zeros((), share.dtype)
        for part in parts:
            objective += tf.cast(part, share.dtype)
        return objective * share

    def _add(self, number: int, found: list[tf.Tensor]) -> None:
        if self._gradients is not None:
            found = [a + b for a, b in zip(self._gradients, found, strict=True)]
        self._gradients = found
        self.ledger.gather(self, found)
        self.ledger.drop(self, number)


def answer(model: keras.Model, x: Sequence[tf.Tensor], training: bool) -> Nest:
    """The outputs of a part of a model, with the masks that they have in the whole one."""
    places = {id(spec): value for spec, value in zip(model.inputs, x, strict=True)}
    for spec, value in zip(model.inputs, x, strict=True):
        masked(value, places.get(id(mask_of(spec))))
    y = model(plain(x), training=training)
    for spec, value in zip(model.outputs, keras.tree.flatten(y), strict=True):
        # A model hands the mask of its input on to an output that has none, as no layer in it does.
        if not is_masked(spec):
            masked(value, None)
    return y


def is_number(tensor: keras.KerasTensor) -> bool:
    """Whether a tensor has gradients."""
    return "float" in tensor.dtype


def listed(passed: Passed) -> list[Rows | None]:
    """One tensor, or several, as a list."""
    return list(passed) if isinstance(passed, list | tuple) else [passed]


def plain(tensors: Sequence[Rows | None]) -> Passed:
    """One tensor as it is, several as a list: as Keras has inputs and outputs."""
    return tensors[0] if len(tensors) == 1 else list(tensors)


def _tensor(value: Rows) -> tf.Tensor:
    return value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)


def _spec(tensor: tf.Tensor) -> Specs:
    """What is like a tensor, of any number of rows."""
    shape = [None, *tensor.shape[1:]] if tensor.shape.rank else []
    return tf.TensorSpec(shape, tensor.dtype)
