"""Prepared rows whose codes and embeddings stay on disk: read as they are needed, once for all ranks of a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from lit_fsdp.cache import build_once, hash_files, make_key
from lit_fsdp.files import UnwritableError
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow, check_finished, list_shards, read_rows

_CODES, _EMBEDDINGS, _ROWS = "codes.npy", "embeddings.npy", "rows.jsonl"
_TEXTS = ("audio", "text", "seconds", "speaker", "language", "instruct", "ref_text", "where")
_LAYOUT = 3  # of these files, and how rows are read


def map_rows(source: str, cache_dir: Path) -> list[PreparedRow]:
    """Return the rows that ``read_rows`` gives, with arrays that are pages of a file; codes in as few bytes as will do.

    The first process that comes reads all rows and writes that file; others, and later runs, read it.

    Args:
        source: Prepared folder, or one of its shards.
        cache_dir: Where the file is kept. Where it takes none, the arrays are in memory.

    Raises:
        ValueError: A row is not as it should be.
    """
    shards = list_shards(source)
    names = [str(shard) for shard in shards]  # errors name them

    def build(folder: Path) -> None:
        _write(folder, read_rows(source))

    try:
        key = make_key(layout=_LAYOUT, names=names, contents=hash_files(cache_dir, shards))
        folder = build_once(cache_dir / "speech" / key, build)
    except UnwritableError as error:
        rank_zero_warn(f"{error}: each rank keeps the codes of {source} in its memory")
        return read_rows(source)
    rows = _map(folder)
    check_finished(Path(source).expanduser(), len(rows))
    return rows


def _write(folder: Path, rows: list[PreparedRow]) -> None:
    # [frames of all rows, codebooks]; what a row goes on from stands before its own.
    codes = np.concatenate([part for row in rows for part in (row.ref_codes, row.codes) if part is not None])
    np.save(folder / _CODES, codes.astype(_choose_dtype(codes)))
    embeddings = np.concatenate([row.speaker_embedding for row in rows])
    if len(embeddings):  # an empty file has no pages
        np.save(folder / _EMBEDDINGS, embeddings)
    with (folder / _ROWS).open("w", encoding="utf-8") as file:
        for row in rows:
            fields = {name: getattr(row, name) for name in _TEXTS}
            num_before = None if row.ref_codes is None else len(row.ref_codes)
            sizes = [num_before, len(row.codes), len(row.speaker_embedding)]
            file.write(json.dumps([fields, *sizes]) + "\n")


def _choose_dtype(codes: NDArray[Any]) -> type[np.integer[Any]]:
    largest = max(int(codes.max()), -int(codes.min()))  # what is below 0 is refused by name later
    return next((kind for kind in (np.int16, np.int32) if largest <= np.iinfo(kind).max), np.int64)


def _map(folder: Path) -> list[PreparedRow]:
    # As plain arrays: slices of them are small, those of a memmap are not.
    codes = np.asarray(np.load(folder / _CODES, mmap_mode="r"))
    embeddings = np.zeros(0, dtype=np.float32)
    if (folder / _EMBEDDINGS).is_file():
        embeddings = np.asarray(np.load(folder / _EMBEDDINGS, mmap_mode="r"))
    rows, frame, number = [], 0, 0
    with (folder / _ROWS).open(encoding="utf-8") as file:
        for line in file:
            fields, num_before, num_frames, size = json.loads(line)
            before = None if num_before is None else codes[frame : frame + num_before]
            frame += num_before or 0
            own, voice = codes[frame : frame + num_frames], embeddings[number : number + size]
            rows.append(PreparedRow(**fields, codes=own, speaker_embedding=voice, ref_codes=before))
            frame, number = frame + num_frames, number + size
    return rows
