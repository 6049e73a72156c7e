"""Images that are decoded one by one, when they are asked for."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


class BadImageError(Exception):
    """An image that cannot be decoded; the message says which and why."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images that are read one by one, and their labels.

    Args:
        locate: Names an image by its number, for messages.
        open: Opens an image by its number; it may still fail when it is decoded.
        labels: Name of the class of each; ``None`` where there are no labels.
        measure: Returns the bytes of an image's file at the cost of a ``stat``, -1 where there is none; ``None`` where
            only reading them would tell.
        fetch: Returns the bytes of an image's file; ``None`` where images are not from files, or lie far away.
        class_names: In the order that the source has, if it has one.
        num_images: How many there are.
    """

    locate: Callable[[int], str]
    open: Callable[[int], Image.Image]
    labels: Sequence[str] | None
    measure: Callable[[int], int] | None = None
    fetch: Callable[[int], bytes] | None = None
    class_names: list[str] | None = None
    num_images: int

    def __len__(self) -> int:
        return self.num_images

    def read(self, index: int) -> Image.Image:
        """Return a decoded RGB image.

        Raises:
            BadImageError: It cannot be read or decoded.
        """
        try:
            image = self.open(index)
            image.load()
            return _to_rgb(image)
        # What decoders raise for damaged data differs by format; a missing file is an OSError too.
        except (OSError, ValueError, SyntaxError, TypeError, EOFError, Image.DecompressionBombError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise BadImageError(f"{self.locate(index)}: {reason}") from error


def decode(data: bytes) -> Image.Image:
    """Return an image from the bytes of its file; it is decoded later."""
    return Image.open(io.BytesIO(data))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I;16", "I;16B", "I;16L", "I"):  # 16 bits, which convert() would cut off
        scaled = np.asarray(image).astype(np.float32) / 257
        return Image.fromarray(scaled.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")
