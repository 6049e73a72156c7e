"""Tokens on disk: one flat file that all ranks and workers map into memory and share."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lit_fsdp.tasks.causal_lm.encoding import Encoded, Encoder
from lit_fsdp.tasks.causal_lm.examples import RowError, RowFormat, parse_row
from lit_fsdp.tasks.causal_lm.rows import Row

TOKENS, LEARN, ENDS, SUMMARY = "tokens.int32", "learn.bool", "ends.int64", "summary.json"
NUM_NAMED = 5  # bad rows that a warning names
NUM_AT_ONCE = 1000  # rows given to the tokenizer together


class TokenWriter:
    """Writes documents to a folder one after the other.

    Args:
        folder: Exists and is empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_tokens = 0
        self._ends: list[int] = []
        self._files = ExitStack()

    def __enter__(self) -> Self:
        self._tokens = self._files.enter_context((self.folder / TOKENS).open("wb"))
        self._learn = self._files.enter_context((self.folder / LEARN).open("wb"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def add(self, document: Encoded) -> None:
        """Append a document."""
        self._tokens.write(np.asarray(document.ids, dtype=np.int32).tobytes())
        self._learn.write(np.asarray(document.learn, dtype=np.bool_).tobytes())
        self.num_tokens += len(document.ids)
        self._ends.append(self.num_tokens)

    def finish(self, **summary: Any) -> None:
        """Write where documents end, and what is worth telling again on every later use."""
        np.asarray(self._ends, dtype=np.int64).tofile(self.folder / ENDS)
        (self.folder / SUMMARY).write_text(json.dumps(summary))


class TokenStore:
    """Documents as tokens, read from disk as needed.

    Args:
        folder: Was written by ``TokenWriter``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends: NDArray[np.int64] = np.fromfile(folder / ENDS, dtype=np.int64)
        self.lengths: NDArray[np.int64] = np.diff(self.ends, prepend=0)
        self.summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
        self._map()

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return ids of a document and whether each is learned; views of the file, not copies."""
        end = self.ends[document]
        begin = end - self.lengths[document]
        return self._tokens[begin:end], self._learn[begin:end]

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array would be sent to a spawned worker by value, all of it.
        return {name: value for name, value in vars(self).items() if name not in {"_tokens", "_learn"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()

    def _map(self) -> None:
        self._tokens = np.memmap(self.folder / TOKENS, dtype=np.int32, mode="r")
        self._learn = np.memmap(self.folder / LEARN, dtype=np.bool_, mode="r")


def write_tokens(
    folder: Path, rows: Iterable[Row], *, tokenizer: Any, row_format: RowFormat, skip_bad_rows: bool
) -> None:
    """Tokenize rows into a folder for ``TokenStore``.

    Raises:
        ValueError: On the first bad row, or with ``skip_bad_rows`` if no row is good.
    """
    encoder = Encoder(tokenizer, row_format)
    bad: list[str] = []
    num_bad = 0
    with TokenWriter(folder) as writer:
        for row, result in _encode(rows, encoder):
            if isinstance(result, Encoded):
                writer.add(result)
                continue
            num_bad += 1
            if len(bad) < NUM_NAMED:
                bad.append(f"{row.where}: {result}")
            if not skip_bad_rows:
                raise ValueError(bad[0])
        if not writer.num_tokens:
            raise ValueError(f"all {num_bad} rows are bad, the first: {bad[0]}" if bad else "there are no rows")
        writer.finish(num_bad=num_bad, bad=bad)


def _encode(rows: Iterable[Row], encoder: Encoder) -> Iterator[tuple[Row, Encoded | RowError]]:
    for chunk in _chunk(rows):
        parsed = [_parse(row, encoder.row_format) for row in chunk]
        encoded = iter(encoder.encode([p for p in parsed if not isinstance(p, RowError)]))
        for row, example in zip(chunk, parsed, strict=True):
            result = example if isinstance(example, RowError) else next(encoded)
            if isinstance(result, Encoded) and not result.ids:
                result = RowError("gives no tokens; remove the row or set bad_rows: skip")
            yield row, result


def _parse(row: Row, row_format: RowFormat) -> Any:
    if row.problem is not None:
        return RowError(row.problem)
    try:
        return parse_row(row.fields, row_format)
    except RowError as error:
        return error


def _chunk(rows: Iterable[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == NUM_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
