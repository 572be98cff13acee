"""What every compressor is: a generator between collectives, and the requests that it yields."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple, TypeAlias

from pydantic import BeforeValidator, PlainSerializer

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.options import lookup
from labkit.common.validated import Checked
from labkit.compression.payload import Payload, Tensor
from labkit.compression.residual_law import Waiting

if TYPE_CHECKING:
    import tensorflow as tf

State: TypeAlias = "tf.Tensor | tuple[tf.Tensor, ...]"  # or a nest of such
# To a mean the dense tensor, to a gather the payloads of all ranks; to begin with, None.
Answer: TypeAlias = "tf.Tensor"


@dataclass(frozen=True)
class Mean:
    """Asks for the mean of the ranks' values, summed on the way; all have the same shape."""

    value: Tensor


@dataclass(frozen=True)
class Gather:
    """Asks for the payloads of all ranks, in rank order."""

    payload: Payload


@dataclass(frozen=True)
class SparseMean:
    """Asks for the mean of sparse vectors, a dense tensor (length,); sums are merged on the way.

    Args:
        indices: int32 (k,), ascending, each once.
        values: (k,).
        length: of the dense vector.
    """

    indices: Tensor
    values: Tensor
    length: int


Request: TypeAlias = Mean | Gather | SparseMean


class Reduced(NamedTuple):
    """What a reduction returns.

    mean: what is applied, the same on all ranks. sent: what this rank has contributed, as the
    others have understood it; the mean of `sent` over the ranks is `mean`, except for votes.
    state: for the next step.
    """

    mean: Tensor
    sent: Tensor
    state: State


class TensorContext(NamedTuple):
    """What one says to another one alone.

    payload: as it travels. sent: as the other one understands it. state: for the next time.
    """

    payload: Payload
    sent: Tensor
    state: State


Reduction: TypeAlias = Generator[Request, Answer, Reduced]


class Compressor(Checked):
    """How a gradient is said in fewer bytes: fields are what a notebook names.

    A simple compressor gives `encode` and `decode`, from which `reduce` follows; others write
    `reduce` themselves. `encode` and `decode` are functions of TensorFlow without side effects:
    what they need of the past is in `state`. Tensors are flat float32 or float64, (n,), unless
    `by_layer`.

    Its facts are attributes. Where fields decide, they are properties, of which the defaults
    stand here.

    Attributes:
        paper: author, year and number of the source, which the docstring cites in full.
        votes: `mean` is not the mean of what ranks sent.
        sparse: few elements are sent as they are, in the float part "values".
        memory: the state keeps what was not sent, `residual`.
        conserves: sent + residual = tensor + old residual.
        xla: encode and decode are compiled by XLA.
        eager: methods that are not compiled, since their shapes differ from step to step.
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
        """What it says less of: a name of `labkit.compression.FAMILIES`."""
        raise NotImplementedError(f"{type(self).__name__} does not say of which family it is")

    @property
    def linear(self) -> bool:
        """Whether payloads have one float part, "values", that may be summed on the way."""
        return False

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of what is decoded is what was encoded."""
        return False

    @property
    def by_layer(self) -> bool:
        """Whether it works on each layer's tensor in its own shape, not on a flat bucket."""
        return False

    @property
    def shared(self) -> bool:
        """Whether random choices are the same on all ranks."""
        return False

    @property
    def expansive(self) -> bool:
        """Whether more may be lost than there is, so that feeding it back diverges."""
        return False

    @property
    def rounding(self) -> float:
        """Relative error of a sum on the way, where payloads are added in few bits."""
        return 0.0

    def check(self, optimizer: str, options: Mapping[str, JSON]) -> None:
        """Refuse an optimizer, by its Keras name and arguments, that contradicts the method."""

    def start(self, shape: Sequence[int], rank: int = 0, seed: int = 0, ranks: int = 1) -> State:
        """The state before the first step: here a key of random choices, int32 (2,).

        Args:
            shape: of the tensors to come.
            rank: whose state; random choices of ranks differ, unless `shared`.
            seed: of random choices.
            ranks: how many take part.
        """
        import tensorflow as tf

        # A prime above any number of ranks: no rank of one seed has the key of another of the next.
        first = (seed * 65_537 + (0 if self.shared else rank + 1)) % 2**31
        return tf.constant([first, 0], tf.int32)

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """What is sent for a tensor.

        Args:
            tensor: flat, (n,).
            key: int32 (2,), of random choices; another one in each step.
        """
        raise NotImplementedError(f"{type(self).__name__} writes its own reduce")

    def decode(self, payload: Payload) -> Tensor:
        """What a payload says, flat, (n,); it needs nothing but the payload."""
        raise NotImplementedError(f"{type(self).__name__} writes its own reduce")

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """Mean over the ranks: yields requests, receives their results, returns `Reduced`."""
        payload = compiled(self, "encode")(tensor, state)
        decode = compiled(self, "decode")
        if self.linear:
            # Summed before it is decoded: that is what `linear` allows, and what saves work on the
            # way.
            mean = decode({**payload, "values": (yield Mean(payload["values"]))})
            sent = decode(payload)
        else:
            sent, mean = decode(payload), self.average((yield Gather(payload)))
        return Reduced(mean, sent, next_key(state))

    def collectives(
        self, shape: Sequence[int], payload: float
    ) -> tuple[tuple[type[Request], float], ...]:
        """What `reduce` asks for of a tensor of this shape, and the bytes that a rank brings to it.

        Args:
            shape: of the tensor, float32.
            payload: bytes of what `encode` makes of it.
        """
        return ((Mean if self.linear else Gather, payload),)

    def unsupported_reason(self) -> str:
        """Why servers and workers cannot say vectors to each other so; "" where they can."""
        if self.votes:
            return "is a vote of all ranks, of whom a server hears one at a time"
        if self.expansive:
            return (
                "may lose more than it is given, which the next answer of a server would have to "
                "make up for, and so on without end"
            )
        return ""

    @property
    def without_memory(self) -> Compressor:
        """The same without a memory of what was not sent."""
        return self

    def say(self, tensor: Tensor, state: State) -> TensorContext:
        """What one says to another one alone; only where `unsaid` has nothing against it."""
        import tensorflow as tf

        payload = compiled(self, "encode")(tensor, state)
        sent = tf.cast(tf.reshape(self.understand(payload), tensor.shape), tensor.dtype)
        return TensorContext(payload, sent, next_key(state))

    def understand(self, payload: Payload) -> Tensor:
        """What was said, flat."""
        return compiled(self, "decode")(payload)

    def residual(self, state: State) -> Tensor | None:
        """What the state carries over to the next step, or None for compressors without memory."""
        return None

    def waiting(self, ranks: int) -> Waiting | None:
        """New books of what must wait by the method's law; None: it has no such law.

        Args:
            ranks: how many take part.
        """
        return Waiting() if self.conserves else None

    def to_json(self) -> dict[str, JSON]:
        """Name and fields."""
        return {"name": type(self).__name__, **self.model_dump(mode="json")}

    def average(self, payloads: Sequence[Payload]) -> Tensor:
        """What the payloads of all ranks say together."""
        decode = compiled(self, "decode")
        # One after the other: all decoded at a time would take ranks times the memory.
        total = decode(payloads[0])
        for payload in payloads[1:]:
            total = total + decode(payload)
        return total / len(payloads)


def next_key(key: Tensor) -> Tensor:
    """The key of the next step's random choices."""
    import tensorflow as tf

    # The first number is a rank's own, so that no two ever draw alike.
    return key + tf.constant([0, 1], tf.int32)


@lru_cache(maxsize=256)
def compiled(compressor: Compressor, method: str) -> tf.types.experimental.PolymorphicFunction:
    """A method of a compressor as a compiled function of TensorFlow."""
    import tensorflow as tf

    if method in compressor.eager:
        return getattr(compressor, method)
    # Without AutoGraph: these are operations only, and it would translate each again.
    return tf.function(getattr(compressor, method), jit_compile=compressor.xla, autograph=False)


def in_one_loop(work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """What `work` makes of tensors, by XLA in one loop, while a function is traced that is not its.

    For passes that must stay apart: XLA joins all that it is given, and computes again for each
    reader what two of them read.
    """
    import tensorflow as tf

    if tf.executing_eagerly():  # shapes differ from call to call: each would be compiled
        return work(*tensors)
    return tf.function(work, jit_compile=True, autograph=False)(*tensors)


# Name to class; filled where all members are known, in the package's `__init__`.
COMPRESSORS: dict[str, type[Compressor]] = {}


def parse(value: Compressor | Mapping[str, JSON] | str) -> Compressor:
    """The compressor that is meant: itself, its name, or a mapping of its name and fields.

    Raises:
        InvalidInput: an unknown name, or fields that the compressor does not have.
    """
    if isinstance(value, Compressor):
        return value
    if isinstance(value, str):
        return lookup(COMPRESSORS, value, "compressor")()
    if isinstance(value, Mapping):
        # A copy, for the name is taken out of it.
        fields = dict(value)
        return lookup(COMPRESSORS, fields.pop("name", None), "compressor")(**fields)
    raise InvalidInput(
        f"{value!r} is no compressor: give one, its name ('TopK'), or a mapping of its name and "
        "fields ({'name': 'TopK', 'ratio': 0.01})"
    )


# A field that holds a compressor: given as an object, as a name, or as it stands in JSON.
Nested = Annotated[
    Compressor, BeforeValidator(parse), PlainSerializer(lambda compressor: compressor.to_json())
]
