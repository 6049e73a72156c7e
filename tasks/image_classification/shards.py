"""Tar shards in the layout of WebDataset, read in place by an index: nothing is unpacked."""

from __future__ import annotations

import glob
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from lit_fsdp.tasks.image_classification.sources import SUFFIXES, Images, decode

_LABELS = ("cls", "label", "json")  # endings of members that say the class
_MAX_LABEL_BYTES = 1 << 20


def read_shards(source: str) -> Images:
    """Return the images of tar files, in the order in which they lie there.

    Members with one name but for the ending are one sample: an image, and its class in ``.cls`` (a number or
    name) or ``.json`` (its field ``label`` or ``cls``). Headers are read once, images when they are needed, from their
    place in the file: so samples are shuffled, resumed and counted as those of any other source.

    Args:
        source: A tar file, a folder of them, or a pattern such as ``shard-*.tar`` or ``shard-{000..012}.tar``.

    Raises:
        ValueError: There are none, or samples that lack what others have.
    """
    paths = _list_paths(source)
    places: list[tuple[int, int, int, str]] = []  # shard, offset and size of the image, name of the member
    labels: list[str] = []
    for number, path in enumerate(paths):
        for name, offset, size, label in _read_index(path):
            places.append((number, offset, size, name))
            if label is not None:
                labels.append(label)
    if not places:
        raise ValueError(f"{source}: no images: expected members such as 000.jpg and 000.cls")
    if labels and len(labels) != len(places):
        raise ValueError(
            f"{source}: {len(places) - len(labels)} of {len(places)} images have no .cls or .json with a label"
        )

    def open_image(i: int) -> Image.Image:
        number, offset, size, _ = places[i]
        with paths[number].open("rb") as file:  # not kept open: workers are forked, and would share its position
            file.seek(offset)
            return decode(file.read(size))

    return Images(
        locate=lambda i: f"{paths[places[i][0]]} member {places[i][3]}",
        open=open_image,
        labels=labels or None,
        num_images=len(places),
    )


def _list_paths(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        return sorted(path.glob("*.tar"))
    names = list(_expand_braces(str(path)))
    found = [Path(hit) for name in names for hit in (sorted(glob.glob(name)) if "*" in name else [name])]  # noqa: PTH207
    missing = [str(name) for name in found if not name.is_file()]
    if missing or not found:
        raise ValueError(f"{missing[0] if missing else source}: no such file, of {len(found)} shards of {source}")
    return found


def _expand_braces(pattern: str) -> Iterator[str]:
    """Yield ``a-00.tar``, ``a-01.tar`` of ``a-{00..01}.tar``, as shells and WebDataset do."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if found is None:
        yield pattern
        return
    first, last = found.groups()
    for number in range(int(first), int(last) + 1):
        yield from _expand_braces(f"{pattern[: found.start()]}{number:0{len(first)}d}{pattern[found.end() :]}")


def _read_index(path: Path) -> Iterator[tuple[str, int, int, str | None]]:
    """Yield name, offset, size and label of each image of a shard."""
    image: tuple[str, int, int] | None = None
    label: str | None = None
    key = ""
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                stem, _, ending = member.name.rpartition("/")[2].partition(".")
                folder = member.name.rpartition("/")[0]
                if key and f"{folder}/{stem}" != key:
                    if image is not None:
                        yield *image, label
                    image, label = None, None
                key = f"{folder}/{stem}"
                ending = ending.lower()
                if f".{ending}" in SUFFIXES:
                    if image is not None:
                        raise ValueError(f"{path} member {member.name}: another image of that name came before")
                    image = (member.name, member.offset_data, member.size)
                elif ending in _LABELS and member.size <= _MAX_LABEL_BYTES:
                    content = tar.extractfile(member)
                    assert content is not None
                    label = _read_label(content.read(), ending, where=f"{path} member {member.name}") or label
            if image is not None:
                yield *image, label
    except tarfile.TarError as error:
        raise ValueError(f"{path}: not readable as a tar file without compression: {error}") from error


def _read_label(content: bytes, ending: str, *, where: str) -> str | None:
    text = content.decode("utf-8", errors="replace").strip()
    if ending != "json":
        return text
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error.msg}") from error
    value = fields.get("label", fields.get("cls")) if isinstance(fields, dict) else None
    return None if value is None else str(value)
