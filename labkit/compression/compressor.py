"""The base class of gradient compressors, which yield requests for collectives."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple, TypeAlias

import numpy as np
from pydantic import BeforeValidator, PlainSerializer

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.options import lookup
from labkit.common.validated import Checked

if TYPE_CHECKING:
    import tensorflow as tf


Tensor: TypeAlias = "tf.Tensor"
Payload: TypeAlias = "Mapping[str, tf.Tensor | np.ndarray]"  # named vectors

# An element count of the type `COUNT` precedes each part of a serialized payload.
COUNT = np.dtype("<i4")


def to_bytes(payload: Payload) -> np.ndarray:
    """Serialize the parts, each after its element count, into a uint8 array (nbytes,)."""
    pieces: list[np.ndarray] = []
    for part in payload.values():
        array = np.asarray(part)
        # The element count is stored, because ranks may send different numbers of elements.
        pieces += [np.array([array.size], COUNT).view(np.uint8), array.view(np.uint8)]
    return np.concatenate(pieces)


def from_bytes(
    data: np.ndarray, like: Payload, start: int = 0
) -> tuple[dict[str, np.ndarray], int]:
    """Return the payload that starts at a byte offset, and the byte offset of its end.

    Args:
        data: The bytes, uint8.
        like: A template payload with the names and dtypes of the parts in the bytes.
        start: The byte offset at which the payload starts.
    """
    parts: dict[str, np.ndarray] = {}
    for name, dtype in _dtypes(like).items():
        count = int(data[start : start + COUNT.itemsize].copy().view(COUNT)[0])
        start += COUNT.itemsize
        stop = start + count * dtype.itemsize
        # The part is copied, because its bytes in `data` may not be aligned for the dtype.
        parts[name] = data[start:stop].copy().view(dtype)
        start = stop
    return parts, start


def nbytes(payload: Payload) -> int:
    """Return the size of a payload in bytes, including the element counts."""
    return sum(COUNT.itemsize + np.asarray(part).nbytes for part in payload.values())


def _dtypes(payload: Payload) -> Mapping[str, np.dtype]:
    return {name: np.asarray(part).dtype for name, part in payload.items()}


class ExpectedResidual:
    r"""A rank's expected residual: the sum of all gradients minus the sum of all sent tensors.

    The residual \(e_T = \sum_t g_t - \sum_t s_t\) is computed in float64. The residual's symbols
    are gradients g and sent tensors s. The computation does not use the compressor's state.
    """

    def __init__(self) -> None:
        self._sum: np.ndarray | float = 0.0

    def after(self, gradient: np.ndarray, sent: np.ndarray) -> np.ndarray:
        """Return the expected residual after one more step; all arrays have shape (n,)."""
        residual: np.ndarray = self._sum + gradient.astype(np.float64) - sent
        self._sum = residual
        return residual


# A compressor's state is a tensor, a tuple of tensors, or a nested tuple of tensors.
State: TypeAlias = "tf.Tensor | tuple[tf.Tensor, ...]"
# The answer to a `Mean` or `SparseMean` request is the dense mean over all ranks. The answer to a
# `Gather` request contains the payloads (compressed gradients) of all ranks. The first answer that
# a compressor's generator receives is None, which only starts the generator.
Answer: TypeAlias = "tf.Tensor"


@dataclass(frozen=True)
class Mean:
    """A request for an allreduce that computes the mean of the ranks' tensors of equal shape."""

    value: Tensor


@dataclass(frozen=True)
class Gather:
    """A request that gathers the payloads of all ranks, in rank order."""

    payload: Payload


@dataclass(frozen=True)
class SparseMean:
    """A request for the mean of the ranks' sparse vectors, as a dense tensor (length,).

    The allreduce for this request merges sparse vectors instead of adding dense vectors.

    Args:
        indices: The indices of the stored elements, int32 (k,), in ascending order, without
            duplicates.
        values: The values of the stored elements, an array of shape (k,).
        length: The length of the dense vector.
    """

    indices: Tensor
    values: Tensor
    length: int


Request: TypeAlias = Mean | Gather | SparseMean


class Reduced(NamedTuple):
    """The result of a compressed reduction on one rank.

    Attributes:
        mean: The gradient that the optimizer applies, the same on all ranks.
        sent: The contribution of this rank, as the receivers decode it. For most compressors, the
            optimizer applies the mean of all contributions.
        state: The compressor's state for the next training step.
    """

    mean: Tensor
    sent: Tensor
    state: State


class PeerMessage(NamedTuple):
    """A compressed tensor for a single receiver.

    Attributes:
        payload: The named vectors that the sender sends.
        sent: The tensor that the receiver decodes.
        state: The compressor's state for the next message.
    """

    payload: Payload
    sent: Tensor
    state: State


Reduction: TypeAlias = Generator[Request, Answer, Reduced]


class Compressor(Checked):
    """The base class of compressors; its fields are the options that a user sets.

    A simple compressor defines `encode` and `decode` and inherits `reduce`; any other compressor
    defines `reduce` itself. `encode` and `decode` are TensorFlow functions without side effects.
    Everything that a compressor stores between training steps is in `state`. Tensors are flat, of
    shape (n,), and float32 or float64. If `by_layer` is true, each tensor has its layer's shape
    instead.

    Constant characteristics of a method, such as `linear`, are class attributes. Characteristics
    that depend on fields are properties; this base class defines their defaults.

    Attributes:
        paper: The first author, year and arXiv number of the source; the docstring contains the
            full citation.
        votes: Whether `mean` differs from the mean of the sent tensors, because the ranks vote on
            signs.
        sparse: Whether only a few elements are sent, unchanged, in the payload's floating-point
            part "values".
        memory: Whether the state contains the `residual`, the part of the gradient that was not
            sent.
        conserves: Whether the equation sent + residual = tensor + old residual holds in each step.
        xla: Whether XLA compiles encode and decode.
        eager: The names of methods that are not compiled, because tensor shapes differ between
            training steps.
    """

    paper: ClassVar[str] = ""
    votes: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    memory: ClassVar[bool] = False
    conserves: ClassVar[bool] = False
    xla: ClassVar[bool] = False
    eager: ClassVar[tuple[str, ...]] = ()

    @property
    def family(self) -> str:
        """The family of the compressor: a name of `labkit.compression.FAMILIES`."""
        raise NotImplementedError(f"{type(self).__name__} must define family")

    @property
    def linear(self) -> bool:
        """Whether payloads have one floating-point part, "values", that an allreduce may sum."""
        return False

    @property
    def unbiased(self) -> bool:
        """Whether the decoded tensor is an unbiased estimate of the encoder's input."""
        return False

    @property
    def by_layer(self) -> bool:
        """Whether the compressor handles each layer in its own shape, instead of a flat bucket."""
        return False

    @property
    def shared(self) -> bool:
        """Whether random choices are the same on all ranks."""
        return False

    @property
    def expansive(self) -> bool:
        """Whether the norm of the error can exceed the input's; error feedback then diverges."""
        return False

    @property
    def rounding(self) -> float:
        """The relative rounding error of an allreduce that adds low-precision payloads."""
        return 0.0

    def check(self, optimizer: str, options: Mapping[str, JSON]) -> None:
        """Raise InvalidInput if the compressor does not support the optimizer and its arguments."""

    def start(self, shape: Sequence[int], rank: int = 0, seed: int = 0, ranks: int = 1) -> State:
        """Return the state before the first step; the base class returns a random key, int32 (2,).

        Args:
            shape: The shape of the tensors.
            rank: The rank whose state is returned; random choices differ between ranks, unless
                `shared` is true.
            seed: The seed of random choices.
            ranks: The number of ranks.
        """
        import tensorflow as tf

        # The prime factor 65,537 exceeds any number of ranks. Keys of different ranks therefore
        # never collide, even if seeds differ by 1.
        first = (seed * 65_537 + (0 if self.shared else rank + 1)) % 2**31
        return tf.constant([first, 0], tf.int32)

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Encode a tensor and return its payload.

        Args:
            tensor: The flat tensor, (n,).
            key: The key of random choices, int32 (2,), different in each step.
        """
        raise NotImplementedError(f"{type(self).__name__} defines reduce instead")

    def decode(self, payload: Payload) -> Tensor:
        """Decode a payload into a flat tensor (n,), without any other information."""
        raise NotImplementedError(f"{type(self).__name__} defines reduce instead")

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """Compute the mean over ranks in a generator that yields requests and returns `Reduced`."""
        payload = compiled(self, "encode")(tensor, state)
        decode = compiled(self, "decode")
        if self.linear:
            # Linear payloads (compressed gradients) are summed before they are decoded, so that
            # each rank decodes only the sum.
            mean = decode({**payload, "values": (yield Mean(payload["values"]))})
            sent = decode(payload)
        else:
            sent, mean = decode(payload), self.average((yield Gather(payload)))
        return Reduced(mean, sent, next_key(state))

    def collectives(
        self, shape: Sequence[int], payload: float
    ) -> tuple[tuple[type[Request], float], ...]:
        """Return the requests that `reduce` yields for a tensor, each with the bytes sent per rank.

        Args:
            shape: The shape of the float32 tensor.
            payload: The size of the tensor's payload, in bytes.
        """
        return ((Mean if self.linear else Gather, payload),)

    def unsupported_reason(self) -> str:
        """Return why the compressor cannot encode messages to a single receiver; "" if it can."""
        if self.votes:
            return (
                "takes a majority vote of all ranks, but a server receives the message of "
                "one rank at a time"
            )
        if self.expansive:
            return (
                "has an error whose norm can exceed the tensor's norm, so errors in a server's "
                "replies would accumulate without bound"
            )
        return ""

    @property
    def without_memory(self) -> Compressor:
        """The same compressor without a residual."""
        return self

    def compress(self, tensor: Tensor, state: State) -> PeerMessage:
        """Compress a tensor for a single receiver; `unsupported_reason` must be empty."""
        import tensorflow as tf

        payload = compiled(self, "encode")(tensor, state)
        sent = tf.cast(tf.reshape(self.decompress(payload), tensor.shape), tensor.dtype)
        return PeerMessage(payload, sent, next_key(state))

    def decompress(self, payload: Payload) -> Tensor:
        """Decode a payload from a single sender into a flat tensor."""
        return compiled(self, "decode")(payload)

    def residual(self, state: State) -> Tensor | None:
        """Return the residual in the state, or None for a compressor without memory."""
        return None

    def expected_residual(self, ranks: int) -> ExpectedResidual | None:
        """Return an `ExpectedResidual` for verification, or None if no conservation law holds.

        Args:
            ranks: The number of ranks.
        """
        return ExpectedResidual() if self.conserves else None

    def to_json(self) -> dict[str, JSON]:
        """Return the compressor's name and its fields as a JSON object."""
        return {"name": type(self).__name__, **self.model_dump(mode="json")}

    def average(self, payloads: Sequence[Payload]) -> Tensor:
        """Return the mean of the decoded payloads of all ranks."""
        decode = compiled(self, "decode")
        # Payloads are decoded one by one, so that only one decoded tensor is in memory at a time.
        total = decode(payloads[0])
        for payload in payloads[1:]:
            total = total + decode(payload)
        return total / len(payloads)


def next_key(key: Tensor) -> Tensor:
    """Return the key of the next step's random choices."""
    import tensorflow as tf

    # The first number of a random key stays constant. Keys that differ between ranks at the start
    # therefore never become equal.
    return key + tf.constant([0, 1], tf.int32)


@lru_cache(maxsize=256)
def compiled(compressor: Compressor, method: str) -> tf.types.experimental.PolymorphicFunction:
    """Return a method of a compressor as a compiled TensorFlow function."""
    import tensorflow as tf

    if method in compressor.eager:
        return getattr(compressor, method)
    # AutoGraph is off, because the methods have no Python control flow to convert.
    return tf.function(getattr(compressor, method), jit_compile=compressor.xla, autograph=False)


def run_fused(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Run a function as a separate XLA-compiled cluster inside a traced TensorFlow function.

    XLA fuses all operations of one cluster into one pass over memory. XLA repeats a shared
    computation for each consumer of its result.
    """
    import tensorflow as tf

    if tf.executing_eagerly():  # Eager execution avoids one compilation per tensor shape.
        return function(*tensors)
    return tf.function(function, jit_compile=True, autograph=False)(*tensors)


# The table `COMPRESSORS` maps names to compressor classes; the package's `__init__` fills the
# table.
COMPRESSORS: dict[str, type[Compressor]] = {}


def parse(value: Compressor | Mapping[str, JSON] | str) -> Compressor:
    """Return the compressor that is given as an object, a name, or a mapping of name and fields.

    Raises:
        InvalidInput: The name is unknown, or the compressor lacks one of the given fields.
    """
    if isinstance(value, Compressor):
        return value
    if isinstance(value, str):
        return lookup(COMPRESSORS, value, "compressor")()
    if isinstance(value, Mapping):
        # The caller's mapping is copied, because the entry "name" is removed from the copy.
        fields = dict(value)
        return lookup(COMPRESSORS, fields.pop("name", None), "compressor")(**fields)
    raise InvalidInput(
        f"{value!r} is not a compressor: give a compressor object, a compressor's name ('TopK'), "
        "or a mapping of its name and fields ({'name': 'TopK', 'ratio': 0.01})"
    )


# A field of the type `Nested` contains a compressor. A `Nested` field accepts an object, a name, or
# the JSON form.
Nested = Annotated[
    Compressor, BeforeValidator(parse), PlainSerializer(lambda compressor: compressor.to_json())
]
