"""Where labelled images are: folders, manifests, tar shards, data sets, and scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image

from lit_fsdp.checkpoint.remote import Location, UnreachableError, locate
from lit_fsdp.checkpoint.sharded import agree
from lit_fsdp.errors import get_first_line
from lit_fsdp.files import refuse_special_file
from lit_fsdp.tasks.data import DEFAULT_SPLITS, Split
from lit_fsdp.tasks.image_classification.images import SUFFIXES, UNREAD, Images, decode
from lit_fsdp.tasks.image_classification.manifests import MANIFESTS, get_label, read_table
from lit_fsdp.tasks.image_classification.shards import is_url, read_object, read_shards
from lit_fsdp.tasks.row_files import (
    Row,
    describe,
    is_saved,
    list_class_names,
    list_files,
    list_folders,
    name_class,
    open_saved,
    read_class_names,
    refuse_splits,
    tell_retries_once,
)

DIGITS = "digits"
NUM_ASKED = 16  # files at a time, as each question is a round trip on a network disk
_DIGITS_SEED = 0  # of the held-out fifth; results on it are compared


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What columns of manifests and data sets are called.

    Args:
        image: Path or bytes of the image.
        label: Its class.
    """

    image: str
    label: str


def open_images(
    source: str, *, split: str | None, split_of: Split, fields: Fields, needs_files: bool = False
) -> Images:
    """Return the images of a source, without decoding any. All ranks must call it.

    Args:
        source: As the settings of the data have it.
        split: Which split of a data set, if the user has said so.
        split_of: What the images are for.
        fields: Names of columns.
        needs_files: Refuse a table of which a file is not there.
    """
    if source == DIGITS:
        return _load_digits(split or ("train" if split_of == "train" else "test"))
    if is_url(source):
        if split is not None:
            raise ValueError(f"split {split!r}: {source} has no splits; leave it out")
        needs_labels = split_of != "predict"
        return _list_objects(source, needs_labels=needs_labels) or read_shards(source, needs_labels=needs_labels)
    path = Path(source).expanduser()
    if is_saved(path) or _is_on_hub(source):
        named = split or DEFAULT_SPLITS[split_of]
        rows, has_split = open_saved(path, named) if is_saved(path) else (_load_rows(source, named), True)
        if split is not None and not has_split:
            raise ValueError(
                f"split {split!r}: {source} is one data set without splits; leave it out, or take a slice such as "
                "train[:90%]"
            )
        return _open_data_set(f"{source} {named}", rows, fields=fields, needs_labels=split_of != "predict")
    if split is not None:
        raise ValueError(f"split {split!r}: {source} has no splits; leave it out")
    refuse_special_file(path, source)
    if not path.exists() and not any(c in source for c in "*{"):
        raise ValueError(f"{source}: no such file")
    if path.is_dir():
        return _open_folder(path, source, needs_labels=split_of != "predict")
    if path.suffix.lower() in SUFFIXES and path.is_file():
        return _open_files([path], None)
    if path.suffix in MANIFESTS:
        return _read_manifest(path, fields, needs_labels=split_of != "predict", needs_files=needs_files)
    if path.suffix == ".tar" or source.endswith("}") or "*" in source:
        return read_shards(source, needs_labels=split_of != "predict")
    raise ValueError(
        f"{source}: expected a folder with one folder for each class, a {', '.join(MANIFESTS)} or .tar file, a data "
        "set, or digits"
    )


def fetch_images(source: str, *, split: str | None, split_of: Split) -> None:
    """Download a data set of the Hub unless it is in the cache; do nothing for other sources."""
    if not is_saved(Path(source).expanduser()) and _is_on_hub(source):
        _load_rows(source, split or DEFAULT_SPLITS[split_of])


def _is_on_hub(source: str) -> bool:
    is_elsewhere = source == DIGITS or is_url(source) or any(c in source for c in "*{")
    # What ends like a file is one: else a mistyped name would be looked for on the Hub, and waited for.
    is_file = Path(source).suffix.lower() in (*MANIFESTS, *SUFFIXES, ".tar")
    return not is_elsewhere and not is_file and not Path(source).expanduser().exists()


def sort_labels(labels: Sequence[str]) -> list[str]:
    """Return the classes of these labels: numbers by value, names by alphabet."""
    names = set(labels)
    are_numbers = all(name.isascii() and name.isdigit() for name in names)
    return sorted(names, key=lambda name: (int(name), name)) if are_numbers else sorted(names)


# Digits


def _load_digits(split: str) -> Images:
    """Return scikit-learn's handwritten digits, 8 x 8 pixels, split once and for all: 1,437 and 360."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise ValueError('digits: they are part of scikit-learn: pip install -e ".[vision]"') from error
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: digits has the splits train and test")
    bunch = load_digits()
    train, test = train_test_split(
        np.arange(len(bunch.target)), test_size=0.2, stratify=bunch.target, random_state=_DIGITS_SEED
    )
    rows = train if split == "train" else test
    pixels = (bunch.images[rows] * (255 / 16)).round().astype(np.uint8)
    return Images(
        locate=lambda i: f"digits {split} image {i}",
        open=lambda i: Image.fromarray(pixels[i]),
        labels=[str(label) for label in bunch.target[rows]],
        class_names=[str(digit) for digit in range(10)],
        num_images=len(rows),
    )


# Files


def _open_folder(folder: Path, source: str, *, needs_labels: bool) -> Images:
    """Return the images of a folder, or of the shards in it."""
    shard = min((file.name for file in folder.glob("*.tar") if not file.name.startswith(".")), default=None)
    if shard is None:
        return _list_folder(folder, needs_labels=needs_labels)
    image = next((file for name in list_folders(folder) for file in list_files(folder / name, SUFFIXES)), None)
    if image is not None:
        raise _describe_both(source, shard, str(image.relative_to(folder)))
    return read_shards(source, needs_labels=needs_labels)


def _list_folder(folder: Path, *, needs_labels: bool) -> Images:
    """Return ``folder/<class>/**/<image>``; images that lie in the folder itself have no labels.

    Where labels are not needed, these leave all without.
    """
    names = list_folders(folder)
    refuse_splits(folder, [f"{name}/" for name in names])  # if all are, they would be taken for classes
    kinds = (*SUFFIXES, *UNREAD)
    there: list[tuple[Path, str | None]] = [(path, None) for path in list_files(folder, kinds, is_deep=False)]
    there += [(path, name) for name in names for path in list_files(folder / name, kinds)]
    loose = [path for path, name in there if name is None and path.suffix.lower() in SUFFIXES]
    found = [(path, name) for path, name in there if name is not None and path.suffix.lower() in SUFFIXES]
    if loose and found and needs_labels:
        raise ValueError(f"{folder}: holds images beside folders of classes, such as {loose[0].name}; move them")
    if not loose and not found:
        raise ValueError(f"{folder}: no images: expected {folder.name}/<class>/<image> with {', '.join(SUFFIXES)}")
    _warn_of_unread(folder, [path.name for path, _ in there])
    if loose:
        return _open_files([*loose, *(path for path, _ in found)], None)
    filled = {name for _, name in found}
    if empty := [name for name in names if name not in filled]:
        raise ValueError(f"{folder}: no images in {', '.join(empty[:5])}; remove empty folders, or fill them")
    return _open_files([path for path, _ in found], [name for _, name in found], class_names=sort_labels(names))


def _warn_of_unread(folder: Location, names: Sequence[str]) -> None:
    """Warn of files among images that hold some, too, and are left out."""
    unread = [name for name in names if PurePath(name).suffix.lower() in UNREAD]
    if unread:
        rank_zero_warn(
            f"{folder}: {len(unread)} files there are not read, such as {unread[0]}: expected {', '.join(SUFFIXES)}; "
            "convert them, or move them away"
        )


def _describe_both(source: str, shard: str, image: str) -> ValueError:
    return ValueError(
        f"{source}: holds shards such as {shard} beside folders of images such as {image}; name the shards alone, as "
        f"{source.rstrip('/')}/*.tar, or move them"
    )


def _list_objects(source: str, *, needs_labels: bool) -> Images | None:
    """Return the images of a folder at an address, in the layout of one on a disk; ``None`` if there are no images."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found = agree(lambda: _find_objects(source) if is_first else {})[0]  # a listing may change meanwhile
    if not found:
        return None
    urls, below = list(found), [name.split("/") for name, _ in found.values()]
    refuse_splits(locate(source), [f"{parts[0]}/" for parts in below if len(parts) > 1])
    loose = [parts for parts in below if len(parts) == 1]
    if loose and len(loose) < len(below) and needs_labels:
        raise ValueError(f"{source}: holds images beside folders of classes, such as {loose[0][0]}; move them")
    return Images(
        locate=lambda i: urls[i],
        open=lambda i: decode(read_object(urls[i])),
        labels=None if loose else [parts[0] for parts in below],
        measure=lambda i: found[urls[i]][1],
        num_images=len(urls),
    )


def _find_objects(source: str) -> dict[str, tuple[str, int]]:
    """Return the addresses of images below a folder, each with its name from there and its size in bytes."""
    where = locate(source)
    if isinstance(where, Path) or where.suffix == ".tar" or any(c in source for c in "*{"):
        return {}
    try:
        found = where.find()
    except UnreachableError as error:
        raise ValueError(f"{error}; see whether it is there, and whether you may read it") from error
    images = {
        str(path): (str(path).removeprefix(f"{where}/") if path != where else path.name, size)
        for path, (size, _) in found.items()
        if path.suffix.lower() in SUFFIXES
    }
    shard = next((path.name for path in found if path.suffix == ".tar" and path.parent == where), None)
    if shard is None:
        if images:
            _warn_of_unread(where, [path.name for path in found])
        return images
    if inside := next((name for name, _ in images.values() if "/" in name), None):
        raise _describe_both(source, shard, inside)
    return {}


def _open_files(paths: list[Path], labels: list[str] | None, class_names: list[str] | None = None) -> Images:
    def measure(i: int) -> int:
        try:
            return paths[i].stat().st_size
        except OSError:  # whoever reads it says so, or skips it
            return -1

    return Images(
        locate=lambda i: str(paths[i]),
        open=lambda i: Image.open(paths[i]),
        labels=labels,
        measure=measure,
        fetch=lambda i: paths[i].read_bytes(),
        class_names=class_names,
        num_images=len(paths),
    )


def _read_manifest(path: Path, fields: Fields, *, needs_labels: bool, needs_files: bool) -> Images:
    """Return the images of a table; paths in it are relative to its folder."""
    rows = read_table(path, image=fields.image, label=fields.label)
    if rows is None:  # images are in it
        found = _load_rows(str(path), "train")
        return _open_data_set(str(path), found, fields=fields, needs_labels=needs_labels, folder=path.parent)
    has_labels = needs_labels and any(fields.label in row.fields for row in rows)
    names = read_class_names(path, fields.label) if path.suffix == ".parquet" else None
    folder = path.parent
    paths: list[Path] = []
    labels: list[str] = []
    for row in rows:
        name = row.fields.get(fields.image)
        if not isinstance(name, str) or not name or "\0" in name:
            raise ValueError(f"{row.where}: {fields.image} is {describe(name)}: expected the path of an image")
        if is_url(name):
            raise ValueError(
                f"{row.where}: {fields.image} is {describe(name)}: expected a path of this machine; from addresses, "
                "folders of classes and tar shards are read"
            )
        if has_labels:
            value = row.fields.get(fields.label)
            value = value if names is None else name_class(value, names)
            labels.append(get_label(value, where=row.where, field=fields.label))
        paths.append(folder / name)
    if needs_files:
        _refuse_missing(path, rows, paths)
    return _open_files(paths, labels if has_labels else None, list(dict.fromkeys(names)) if names else None)


def _refuse_missing(table: Path, rows: Sequence[Row], paths: Sequence[Path]) -> None:
    """Refuse a table of which files are not there; each rank asks for its share of them, many at a time."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def find(first: int) -> list[int]:
        return [i for i in range(first, len(paths), NUM_ASKED * world_size) if not paths[i].is_file()]

    with ThreadPoolExecutor(NUM_ASKED) as threads:
        firsts = range(rank, NUM_ASKED * world_size, world_size)
        missing = sorted(chain(*agree(lambda: list(chain(*threads.map(find, firsts))))))
    if missing:
        first = missing[0]
        raise ValueError(
            f"{rows[first].where}: no such file: {paths[first]}; {len(missing):,} of {len(paths):,} are not there: "
            f"paths are relative to {table.parent.absolute()}; mend them, or set bad_images to skip"
        )


# Data sets


def _open_data_set(source: str, rows: Any, *, fields: Fields, needs_labels: bool, folder: Path = Path()) -> Images:
    """Return the images of a data set of Hugging Face; paths in it are relative to a folder.

    Where labels are not needed, one row without a class leaves all without.
    """
    import datasets

    features = rows.features
    if fields.image not in features:
        raise ValueError(f"{source}: has no column {fields.image!r}, but {', '.join(features)}; set image_field")
    # Bytes, not decoded: a bad image must be found where it can be named.
    rows = rows.cast_column(fields.image, datasets.Image(decode=False))
    labels: list[str] | None = None
    class_names: list[str] | None = None
    if fields.label in features:
        values = rows.with_format(None)[fields.label][:]
        kind = features[fields.label]
        if isinstance(kind, datasets.ClassLabel) and (names := list_class_names(kind)):
            class_names = list(dict.fromkeys(names))
            values = [name_class(value, names) for value in values]
        try:
            labels = [
                get_label(value, where=f"{source} row {number}", field=fields.label)
                for number, value in enumerate(values, start=1)
            ]
        except ValueError:
            if needs_labels:
                raise
    images = rows.select_columns([fields.image])

    def fetch(i: int) -> bytes:
        cell = images[i][fields.image] or {"bytes": None, "path": None}
        if cell["bytes"] is None and cell["path"] is None:
            raise ValueError(f"{fields.image} is null: expected an image")
        return bytes(cell["bytes"]) if cell["bytes"] is not None else (folder / cell["path"]).read_bytes()

    return Images(
        locate=lambda i: f"{source} row {i + 1}",
        open=lambda i: decode(fetch(i)),
        labels=labels,
        fetch=fetch,
        class_names=class_names,
        num_images=len(rows),
    )


def _load_rows(source: str, split: str) -> Any:
    """Return a split of a data set: from the Hub, or a file of Parquet."""
    import datasets

    try:
        if source.endswith(".parquet"):
            return datasets.load_dataset("parquet", data_files=source, split=split)
        name, _, config = source.partition(":")
        with tell_retries_once():
            return datasets.load_dataset(name, config or None, split=split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        reason = get_first_line(error)
        raise ValueError(f"{source}: no such file or folder, and not to be had as a data set: {reason}") from error
