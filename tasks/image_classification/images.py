"""Images that are decoded one by one, when they are asked for."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image

from lit_fsdp.errors import get_first_line

SUFFIXES = (".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
UNREAD = (".dng", ".exr", ".heic", ".heif", ".j2k", ".jp2", ".jxl", ".psd", ".svg", ".tga")  # which hold images, too
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # by the orientation in EXIF


class BadImageError(Exception):
    """An image that cannot be decoded; the message says which and why."""


class UnansweredError(RuntimeError):
    """An image that a network did not give: nobody knows whether it is bad."""


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
        """Return a decoded RGB image, turned as its EXIF says.

        Raises:
            BadImageError: It cannot be read or decoded, or nobody knows what is white in it.
        """
        try:
            image = self.open(index)
            image.load()
            return _to_rgb(_turn(image))
        except UnansweredError:
            raise
        # What decoders raise for damaged data differs by format; a missing file is an OSError too.
        except (
            OSError,
            ValueError,
            SyntaxError,
            TypeError,
            EOFError,
            RuntimeError,  # of AVIF
            Image.DecompressionBombError,
        ) as error:
            reason = get_first_line(error)
            raise BadImageError(f"{self.locate(index)}: {reason}") from error


def decode(data: bytes) -> Image.Image:
    """Return an image from the bytes of its file; it is decoded later."""
    return Image.open(io.BytesIO(data))


def _turn(image: Image.Image) -> Image.Image:
    """Return an image the right way up.

    ``ImageOps.exif_transpose`` also writes the EXIF anew, which fails in many ways where other parts are damaged.
    """
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except (ValueError, SyntaxError, struct.error):  # damaged EXIF, with Pillow 13; the image is not
        return image
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("float pixels have no defined range: convert it to 8 or 16 bits")
    if image.mode in ("I;16", "I;16B", "I;16L", "I"):  # 16 bits, which convert() would cut off
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > 65_535:
            raise ValueError(
                f"32-bit pixels, here {pixels.min():,} to {pixels.max():,}, have no defined range: convert it to 8 or "
                "16 bits"
            )
        return Image.fromarray((pixels.astype(np.float32) / 257).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")
