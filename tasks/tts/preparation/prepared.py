"""Speech that was prepared for training: rows with codes and speaker embeddings, in shards of Parquet or JSON lines."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_fsdp.files import open_whole, refuse_special_file, write_whole
from lit_fsdp.tasks.row_files import Row, check_rows, list_files, read_jsonl, read_parquet
from lit_fsdp.tasks.tts.utterance import Codes

ShardFormat = Literal["parquet", "jsonl"]
SUMMARY = "summary.json"  # the last file written
UNNAMED = "default"  # the speaker of rows that name none
PLAN = ".prepare.json"  # the first: what the shards in a folder are made of
_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {".parquet": read_parquet, ".jsonl": read_jsonl}


@dataclass(frozen=True, kw_only=True)
class PreparedRow:
    """One clip.

    Args:
        audio: Where it came from, as the manifest names it.
        text: What is said.
        codes: [frames, codebooks].
        seconds: Of the audio.
        speaker: Name, lower-cased.
        language: Name, or ``auto``.
        speaker_embedding: Of the reference audio, or of the clip itself; empty where the model has no encoder.
        instruct: How the text is said; empty where nothing is known.
        ref_text: What is said in speech of the same voice that the row goes on from; empty where there is none.
        ref_codes: How that is said: [frames, codebooks]; ``None`` where there is none.
        where: The file and row it was read from, for errors; empty where it was made.
    """

    audio: str
    text: str
    codes: Codes
    seconds: float
    speaker: str = UNNAMED
    language: str = "auto"
    speaker_embedding: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    instruct: str = ""
    ref_text: str = ""
    ref_codes: Codes | None = None
    where: str = ""

    @property
    def num_frames(self) -> int:
        """Those of the clip and of the speech that it goes on from."""
        return len(self.codes) + (0 if self.ref_codes is None else len(self.ref_codes))

    @property
    def place(self) -> str:
        """What an error names it by."""
        return ", ".join(filter(None, (self.where, self.audio))) or "a row"

    def to_plain(self) -> dict[str, Any]:
        """Return the row as it is stored; what it does not have is left out."""
        plain: dict[str, Any] = {
            "audio": self.audio,
            "text": self.text,
            "speaker": self.speaker,
            "language": self.language,
            "seconds": self.seconds,
            "num_frames": len(self.codes),
            "audio_codes": self.codes.tolist(),
            "speaker_embedding": self.speaker_embedding.tolist(),
        }
        if self.instruct:
            plain["instruct"] = self.instruct
        if self.ref_codes is not None:
            plain |= {"ref_text": self.ref_text, "ref_codes": self.ref_codes.tolist()}
        return plain


def parse_row(fields: dict[str, Any], where: str) -> PreparedRow:
    """Return a stored row.

    Args:
        fields: Those of ``PreparedRow.to_plain``; all but text and codes may be missing.
        where: Names it in errors.

    Raises:
        ValueError: A field is missing or cannot be.
    """
    for name in ("text", "audio_codes"):
        if not fields.get(name):
            raise ValueError(f"{where}: {name}: missing or empty: expected rows that `lit_fsdp prepare tts` wrote")
    for name in ("audio", "text", "speaker", "language", "instruct", "ref_text"):
        if fields.get(name) is not None and not isinstance(fields[name], str):
            raise ValueError(f"{where}: {name}: got {fields[name]!r}: expected text")
    if bool(fields.get("ref_text")) != bool(fields.get("ref_codes")):
        missing = "ref_text" if fields.get("ref_codes") else "ref_codes"
        raise ValueError(f"{where}: {missing}: missing: expected both text and codes of the speech to go on from")
    codes = _parse_codes(fields["audio_codes"], where)
    before = _parse_codes(fields["ref_codes"], where, "ref_codes") if fields.get("ref_codes") else None
    if before is not None and before.shape[1] != codes.shape[1]:
        raise ValueError(
            f"{where}: ref_codes: got {before.shape[1]} codebooks, audio_codes has {codes.shape[1]}: expected as many"
        )
    try:
        embedding = np.asarray(fields.get("speaker_embedding") or [], dtype=np.float32)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: speaker_embedding: {error}: expected a list of numbers") from error
    if embedding.ndim != 1 or not np.isfinite(embedding).all():
        raise ValueError(f"{where}: speaker_embedding: expected a list of finite numbers")
    return PreparedRow(
        audio=fields.get("audio") or "",
        text=fields["text"],
        codes=codes,
        seconds=_parse_seconds(fields.get("seconds"), where) or len(codes) / 12.5,
        speaker=(fields.get("speaker") or "").strip().lower() or UNNAMED,
        language=(fields.get("language") or "").strip() or "auto",
        speaker_embedding=embedding,
        instruct=fields.get("instruct") or "",
        ref_text=fields.get("ref_text") or "",
        ref_codes=before,
        where=where,
    )


def _parse_seconds(given: Any, where: str) -> float:
    """Return a length in seconds, 0 where none is given."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is not None and not (is_number and 0 <= given < math.inf):
        raise ValueError(f"{where}: seconds: got {given!r}: expected a number, 0 or more, or none at all")
    return float(given or 0)


def _parse_codes(given: Any, where: str, name: str = "audio_codes") -> Codes:
    sizes = {len(frame) for frame in given if isinstance(frame, list)} if isinstance(given, list) else set()
    if len(sizes) > 1:
        raise ValueError(f"{where}: {name}: got frames of {sorted(sizes)} codes: expected as many in each")
    try:
        codes = np.asarray(given)
    except ValueError as error:
        raise ValueError(f"{where}: {name}: {error}: expected a list of frames of codes") from error
    if codes.ndim != 2 or codes.dtype.kind not in "iu":
        what = f"{codes.ndim} dimensions of {codes.dtype}"
        raise ValueError(f"{where}: {name}: got {what}: expected a list of frames of whole numbers")
    return codes.astype(np.int64)


def write_shard(path: Path, rows: Iterable[PreparedRow]) -> None:
    """Write rows into one file, by the ending of its name; complete or not at all.

    The same rows give the same bytes.
    """
    plain = [row.to_plain() for row in rows]
    if path.suffix == ".jsonl":
        write_whole(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in plain))
        return
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    codes = pa.list_(pa.list_(pa.int16()))
    columns = {"audio": pa.string(), "text": pa.string(), "speaker": pa.string(), "language": pa.string()}
    columns |= {"seconds": pa.float64(), "num_frames": pa.int64(), "audio_codes": codes}
    columns |= {"speaker_embedding": pa.list_(pa.float32())}
    schema = pa.schema({**columns, "instruct": pa.string(), "ref_text": pa.string(), "ref_codes": codes})
    with open_whole(path, "wb") as file:
        pq.write_table(pa.Table.from_pylist(plain, schema=schema), file, write_page_checksum=True)


def list_shards(source: str | Path) -> list[Path]:
    """Return the files of a prepared folder, or the one that is named.

    Raises:
        ValueError: There are none.
    """
    path = Path(source).expanduser()
    refuse_special_file(path, str(source))
    shards = list_files(path, tuple(_READERS), is_deep=False) if path.is_dir() else [path]
    shards = [s for s in shards if s.suffix.lower() in _READERS and s.is_file() and s.name != "rejects.jsonl"]
    if not shards:
        raise ValueError(
            f"{source}: no .parquet or .jsonl file in it: expected a folder that was written by "
            "`python -m lit_fsdp prepare tts`"
        )
    return shards


def read_rows(source: str | Path) -> list[PreparedRow]:
    """Return the rows of a prepared folder or of one of its shards, in order.

    Raises:
        ValueError: There are none, or one is not as it should be.
    """
    shards = list_shards(source)
    stored = (row for shard in shards for row in check_rows(_READERS[shard.suffix.lower()](shard)))
    rows = [parse_row(row.fields, row.where) for row in stored]
    if not rows:
        raise ValueError(f"{source}: its files have no rows; see rejects.jsonl there for the reasons")
    _check_same_sizes(rows, "codebooks", lambda row: row.codes.shape[1])
    check_finished(Path(source).expanduser(), len(rows))
    return rows


def check_finished(folder: Path, num_rows: int) -> None:
    """Refuse what an interrupted preparation left; a folder of other origin has neither of the two files.

    Args:
        folder: Where rows were read, or a single file.
        num_rows: How many there were.

    Raises:
        ValueError: Some are missing.
    """
    if not folder.is_dir():
        return
    again = "start the same `lit_fsdp prepare tts` again, which makes what is missing"
    try:
        num_prepared = int(json.loads((folder / SUMMARY).read_text())["num_rows"])
    except FileNotFoundError:
        if (folder / PLAN).exists():
            raise ValueError(f"{folder}: was not prepared to the end; {again}") from None
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / SUMMARY}: damaged: {error!r}; {again}") from error
    if num_rows < num_prepared:
        raise ValueError(f"{folder}: has {num_rows} rows of {num_prepared} that were prepared; {again}")


def _check_same_sizes(rows: Iterable[PreparedRow], what: str, measure: Callable[[PreparedRow], int]) -> None:
    """Refuse rows that were made with models of different sizes, of which no mean and no batch can be made."""
    sizes = ((row.where, measure(row)) for row in rows)
    first, known = next(sizes, ("", 0))
    for where, size in sizes:
        if size != known:
            raise ValueError(
                f"{where}: has {size} {what}, {first} has {known}: expected as many in each row: prepare them all with "
                "one model"
            )


def average_speakers(rows: Sequence[PreparedRow]) -> dict[str, NDArray[np.float32]]:
    """Return one embedding for each speaker: the mean over all its rows, added up in float32 or better.

    In bfloat16, as the official script would have it, the sum of some hundred rows stops growing.

    Raises:
        ValueError: They have different sizes.
    """
    given = [row for row in rows if len(row.speaker_embedding)]
    _check_same_sizes(given, "numbers in speaker_embedding", lambda row: len(row.speaker_embedding))
    found: dict[str, list[NDArray[np.float32]]] = defaultdict(list)
    for row in given:
        found[row.speaker].append(row.speaker_embedding)
    return {name: np.asarray(np.stack(g).mean(axis=0, dtype=np.float64), np.float32) for name, g in found.items()}
