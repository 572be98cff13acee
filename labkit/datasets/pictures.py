"""Reader of images (8 or 16 bits; grey, color or palette) as arrays of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.optional import optional
from labkit.datasets.dataset import Array

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
GREY = ("1", "L", "I", "F")
DEEPEST = 2**16 - 1  # value of white in a 16-bit image

Size = tuple[int, int]  # width, height


def read_pictures(
    path: Path, edge: int | None, size: Size | None = None
) -> tuple[list[Array], Array]:
    """Read images from one folder per class; return arrays (rows, columns, channels) and classes.

    Args:
        path: Folder with one folder per class.
        edge: Width and height in pixels to which images are resized; None: the size of the first
            image.
        size: Size (width, height) of images that were read earlier; overrides `edge`.

    Raises:
        InvalidInput: There are no images, or an image cannot be read.
    """
    files = sorted(
        file
        for file in path.glob("[!.]*/*")
        if file.suffix.lower() in PICTURES and not file.name.startswith("._")  # macOS metadata
    )
    if not files:
        raise InvalidInput(
            f"{path} contains no images; give a folder with one subfolder of images per "
            f"class ({', '.join(PICTURES)})"
        )
    opener = optional("PIL.Image", "datasets")
    images: list[Array] = []
    for file in files:
        try:
            with opener.open(file) as image:
                size = size or ((edge, edge) if edge else image.size)
                images.append(pixels_of(image, size))
        except (OSError, ValueError, SyntaxError, opener.DecompressionBombError) as error:
            raise InvalidInput(
                f"the image {file} cannot be read: {error}; repair or remove it"
            ) from error
    return images, np.array([file.parent.name for file in files])


def pixels_of(image: Any, size: Size) -> Array:
    """Convert a PIL image to an array (rows, columns, 1 or 3), in which black is 0 and white 1.

    Raises:
        ValueError: The image's mode does not define the value of white.
    """
    width, height = size
    if image.mode.startswith("I") or image.mode == "F":
        if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
            raise ValueError(
                f"the pixel mode {image.mode} does not define the value of white; save the "
                "image with 8 or 16 bits"
            )
        # The image is not converted to 8 bits, because PIL would clip values above 255.
        grey = np.asarray(image).astype(np.float32) / np.float32(DEEPEST)
        scaled = np.asarray(optional("PIL.Image", "datasets").fromarray(grey).resize(size))
        return scaled.clip(0, 1).reshape(height, width, 1)
    channels = 1 if image.mode in GREY else 3
    plain = image.convert("L" if channels == 1 else "RGB").resize(size)
    pixels: Array = np.asarray(plain, np.uint8).reshape(height, width, channels)
    return pixels.astype(np.float32) / np.float32(255)


def stack(*parts: Sequence[Array]) -> list[Array]:
    """Return each list of images as an array; if any image is colored, all get 3 channels."""
    channels = max(image.shape[-1] for part in parts for image in part)
    return [
        np.stack([np.broadcast_to(image, (*image.shape[:2], channels)) for image in part])
        for part in parts
    ]


def size_of(images: Sequence[Array]) -> Size:
    """Return width and height of the first image."""
    height, width = images[0].shape[:2]
    return width, height
