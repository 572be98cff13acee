"""Reader of tinyshakespeare: sequences of characters, and at each the one that follows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from labkit.datasets.dataset import Array, Arrays, DatasetSpec, Rows, Shapes
from labkit.datasets.files import DataFile

CHARACTERS = 65  # distinct ones in the text
LENGTH = 1_115_394  # characters


class TextOptions(Rows):
    """Options of `shakespeare`."""

    # The test part has 111,540 characters and must hold at least one sequence.
    sequence_length: int = Field(
        64, strict=True, ge=1, le=100_000, description="characters a sequence, 1 to 100000"
    )


def read_shakespeare(options: TextOptions, paths: Sequence[Path]) -> Arrays:
    """Return codes (sequences, sequence_length) and, shifted by one, the codes that follow.

    The first nine tenths of the text train, the rest tests; sequences do not overlap. A
    character's code is its place among the sorted characters of the text. A. Karpathy 2015.
    """
    text = np.frombuffer(paths[0].read_bytes(), np.uint8)
    _, codes = np.unique(text, return_inverse=True)
    cut = len(codes) * 9 // 10
    return Arrays(
        *_sequences(codes[:cut], options.sequence_length),
        *_sequences(codes[cut:], options.sequence_length),
    )


def sequences(length: int, characters: int = LENGTH * 9 // 10) -> int:
    """How many of a length there are in so many characters, by default those that train."""
    return (characters - 1) // length  # the last sequence, too, needs a character after it


def _sequences(codes: Array, length: int) -> tuple[Array, Array]:
    count = sequences(length, len(codes))
    x = codes[: count * length].reshape(count, length)
    y = codes[1 : count * length + 1].reshape(count, length)
    return x, y


_TEXT = DataFile(
    "tinyshakespeare",
    "input.txt",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
SHAKESPEARE = DatasetSpec(
    read_shakespeare,
    lambda options: Shapes((options.sequence_length,), CHARACTERS, "next_character"),
    lambda options: sequences(options.sequence_length),
    (_TEXT,),
    options=TextOptions,
)
