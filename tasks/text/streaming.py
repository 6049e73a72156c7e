"""Text that is read and tokenized while the model trains: nothing is kept on disk, and a resumed run goes on exactly.

Note [Stream]: all ranks read the same rows in the same order, and tokenize all of them, so that each can tell where a
packed row begins. Of each slice of rows a rank keeps its part, as Note [Global order] has it. So the rows of a step
are the same on any number of ranks, no rank runs out before the others, and a place is the same for all of them.

The files, or shards of a data set, come in an order drawn for each pass. Of what follows each other in that order,
blocks are shuffled, each by a seed of its own. The buffer of ``IterableDataset.shuffle`` cannot be entered in its
middle: ``datasets`` fills it anew on a resume, seen in 5.2. A block can: by where it begins, and how much is used up.

Sources with weights each go on pass after pass by themselves; a block has rows of all of them, spread evenly, so that
each has given its share of all rows so far to within about half as many rows as there are sources. Bad rows count.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Generator
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from lit_fsdp.cache import make_key
from lit_fsdp.strategy.trainer_settings import refuse_overfit
from lit_fsdp.tasks.data import count_stream_batches
from lit_fsdp.tasks.loading import (
    NEW_RUN,
    get_data,
    is_epoch_over,
    is_on_gpu,
    mix_seeds,
    read_loader_states,
    restore_epoch,
    shift_progress,
)
from lit_fsdp.tasks.row_files import Row, show_controls
from lit_fsdp.tasks.shares import Share, split_rows
from lit_fsdp.tasks.text.batches import Batch, DocumentRows, PackedRows, TokenRow
from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.rows import RowFormat, list_unread
from lit_fsdp.tasks.text.sources import Part
from lit_fsdp.tasks.text.tokens import NUM_NAMED, Encoded, Encoder, describe_unread, encode_rows

Document = tuple[NDArray[np.int32], NDArray[np.bool_]]  # ids, and whether each is learned


class ReadRow(NamedTuple):
    """A row, how it is read, and the number of its source."""

    row: Row
    row_format: RowFormat
    source: int


_ROWS_AT_ONCE = 64  # that a worker tokenizes and hands over together
_PREVIEWED = 1000  # rows


def check_streaming(validation_fraction: float, *, share: Share, trains_tokenizer: bool, group_by_length: bool) -> None:
    """Refuse settings that data which is not read before training cannot keep.

    Raises:
        ValueError: With the setting and what to set instead.
    """
    if validation_fraction:
        raise ValueError("validation_fraction: a stream has no share to hold out: set validation")
    if trains_tokenizer:
        raise ValueError("tokenizer: a stream is not read to train one: name a model or folder, or leave streaming out")
    if share == "auto":
        raise ValueError("share: got 'auto' with streaming: give a number for each rank, such as [3, 1]")
    if group_by_length:
        raise ValueError("group_by_length: got true with streaming, which knows no lengths; leave one out")


class HeldDocuments:
    """Some documents in memory, as ``PackedRows`` and ``DocumentRows`` read them."""

    def __init__(
        self, documents: Iterable[Document], bad: Sequence[str] = (), num_unread: Mapping[str, int] | None = None
    ) -> None:
        self.documents = list(documents)
        self.lengths = np.array([len(ids) for ids, _ in self.documents], dtype=np.int64)
        self.summary: dict[str, Any] = {
            "num_bad": len(bad),
            "bad": list(bad[:NUM_NAMED]),
            "num_unread": num_unread or {},
        }

    def __getitem__(self, document: int) -> Document:
        return self.documents[document]

    def count_learned(self, documents: NDArray[np.int64], longest: int | None = None) -> int:
        """Return how many tokens of some documents are learned; of each only the first ones, if it is longer."""
        return sum(int(self.documents[number][1][:longest].sum()) for number in documents)


@dataclass(frozen=True, kw_only=True)
class StreamSource:
    """Parts that are read pass after pass.

    Args:
        parts: Each with how its rows are read.
        weight: Share of all rows that come from here, in proportion to those of other sources.
    """

    parts: Sequence[tuple[Part, RowFormat]]
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SourcePlace:
    """Where a source goes on.

    Args:
        num_passes: Whole passes over its parts before this one.
        part: Which part it is in, in the order of the pass.
        row: How many rows of that part have come.
        num_rows: How many have come of all parts in all passes.
    """

    num_passes: int = 0
    part: int = 0
    row: int = 0
    num_rows: int = 0

    @property
    def is_begin(self) -> bool:
        """Whether a pass begins here."""
        return not self.part and not self.row


@dataclass(frozen=True, kw_only=True)
class StreamPlace:
    """Where a stream goes on.

    Args:
        sources: Where each source is as the block begins that this place is in.
        block: Blocks before that one.
        num_used: Rows of that block, in its own order, that are used up.
        num_tokens: Tokens of the next row that are used up.
    """

    sources: tuple[SourcePlace, ...] = ()
    block: int = 0
    num_used: int = 0
    num_tokens: int = 0

    @property
    def num_passes(self) -> int:
        """Whole passes over all sources before the block."""
        return min(place.num_passes for place in self.sources)

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> StreamPlace:
        """Return the place that ``asdict`` made this of."""
        return cls(**{**state, "sources": tuple(SourcePlace(**place) for place in state["sources"])})


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Rows of a stream that follow each other in a block, as tokens.

    Args:
        place: Of the first of them.
        documents: Each row as a document, or what is wrong with it.
        sources: The number of the source of each.
        num_unread: How many of them have a field that is not read, by its name.
        problem: Why nothing more can be read; what a worker raises would reach nobody as one line.
    """

    place: StreamPlace
    documents: list[Document | str]
    sources: list[int] = field(default_factory=list)
    num_unread: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""


class TextStream(IterableDataset[Chunk]):
    """Rows of sources, pass after pass without an end, tokenized in chunks. Workers take turns, see Note [Stream].

    Args:
        sources: Where rows come from. One alone has all its rows in each pass.
        tokenizer: A tokenizer of Transformers.
        shuffle: Take parts in a new order each pass, and shuffle blocks of rows; else all come as they lie.
        buffer_size: Rows of a block that is shuffled.
        seed: Of both.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        *,
        tokenizer: Any,
        shuffle: bool,
        buffer_size: int,
        seed: int,
    ) -> None:
        self.sources, self.tokenizer = sources, tokenizer
        self.shuffle, self.buffer_size, self.seed = shuffle, buffer_size, seed
        self.place = self.begin  # where the next iterator begins

    @property
    def begin(self) -> StreamPlace:
        """Where the first pass begins."""
        return StreamPlace(sources=(SourcePlace(),) * len(self.sources))

    def __iter__(self) -> Iterator[Chunk]:
        return self._tokenize(self.place)

    def name(self, source: int) -> str:
        """Return which source it is, for an error; nothing of one alone."""
        return f" of source {source + 1} of {len(self.sources)}" if len(self.sources) > 1 else ""

    def take(self, *, skips_bad_rows: bool) -> HeldDocuments:
        """Return what the first rows of the first pass are.

        Raises:
            ValueError: Training would stop at one of them.
        """
        found: list[Document | str] = []
        sources: list[int] = []
        num_unread: Counter[str] = Counter()
        for chunk in self._tokenize(self.begin):
            if chunk.problem:
                raise ValueError(f"train: {chunk.problem}")
            if chunk.place.num_passes or len(found) >= _PREVIEWED:
                break
            found += chunk.documents
            sources += chunk.sources
            num_unread.update(chunk.num_unread)
        documents, bad = [d for d in found if not isinstance(d, str)], [d for d in found if isinstance(d, str)]
        if bad and not skips_bad_rows:
            raise ValueError(f"train: {bad[0]}")
        for source in range(len(self.sources)):
            own = [document for document, other in zip(found, sources, strict=True) if other == source]
            if own and all(isinstance(document, str) for document in own):
                first = f"none of the first {len(own)} rows{self.name(source)} is good, the first"
                raise ValueError(f"train: {first}: {own[0]}")
        return HeldDocuments(documents, bad, num_unread)

    def make_key(self, **facts: Any) -> str:
        """Return what changes with the rows or their order; of files, only samples are read."""
        return make_key(
            sources=[
                [source.weight, [[part.identify_unread(), asdict(row_format)] for part, row_format in source.parts]]
                for source in self.sources
            ],
            order=[self.shuffle, self.seed, self.buffer_size if self.shuffle else 0],
            **facts,
        )

    def _tokenize(self, start: StreamPlace) -> Iterator[Chunk]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        formats = {row_format for source in self.sources for _, row_format in source.parts}
        encoders = {row_format: Encoder(self.tokenizer, row_format) for row_format in formats}
        try:
            for turn, (place, rows) in enumerate(self._cut(start)):
                if turn % count == number:
                    results = _encode(rows, encoders)
                    good = (one for one, result in zip(rows, results, strict=True) if not isinstance(result, RowError))
                    num_unread = Counter(name for row, row_format, _ in good for name in list_unread(row, row_format))
                    documents = [_describe(row, result) for (row, *_), result in zip(rows, results, strict=True)]
                    sources = [row.source for row in rows]
                    yield Chunk(place=place, documents=documents, sources=sources, num_unread=num_unread)
        except ValueError as error:
            yield Chunk(place=start, documents=[], problem=str(error))

    def _cut(self, place: StreamPlace) -> Iterator[tuple[StreamPlace, list[ReadRow]]]:
        """Yield rows to tokenize together, and where they begin."""
        for begin, rows in self._read_blocks(place):
            order = range(len(rows))
            if self.shuffle:
                seed = mix_seeds(self.seed, begin.block)
                order = np.random.default_rng(seed).permutation(len(rows)).tolist()
            used = place.num_used if begin == _get_block(place) else 0
            for first in range(used // _ROWS_AT_ONCE * _ROWS_AT_ONCE, len(rows), _ROWS_AT_ONCE):
                chosen = order[first : first + _ROWS_AT_ONCE]
                yield replace(begin, num_used=first), [rows[number] for number in chosen]

    def _read_blocks(self, place: StreamPlace) -> Iterator[tuple[StreamPlace, list[ReadRow]]]:
        """Yield blocks as they lie, the first one that in which a place is."""
        size = self.buffer_size if self.shuffle else _ROWS_AT_ONCE
        begin, rows = _get_block(place), list[ReadRow]()
        places = list(begin.sources)
        readers = [self._read_source(number, place) for number, place in enumerate(places)]

        def find_turn(number: int) -> float:
            return (places[number].num_rows + 0.5) / self.sources[number].weight

        while True:
            number = min(range(len(places)), key=find_turn)
            row, places[number] = next(readers[number])
            if row is not None:
                rows.append(row)
            if len(rows) == size or (row is None and len(places) == 1):
                if rows:
                    yield begin, rows
                begin, rows = StreamPlace(sources=tuple(places), block=begin.block + 1), []

    def _read_source(self, number: int, place: SourcePlace) -> Iterator[tuple[ReadRow | None, SourcePlace]]:
        """Yield rows from a place on, and ``None`` after each pass, each with the place after it."""
        while True:
            order, begin = self._order_parts(number, place.num_passes), place
            for turn in range(begin.part, len(order)):
                part, row_format = self.sources[number].parts[order[turn]]
                num_skipped = begin.row if turn == begin.part else 0
                for seen, row in enumerate(part.read_after(num_skipped), start=num_skipped + 1):
                    place = replace(place, part=turn, row=seen, num_rows=place.num_rows + 1)
                    yield ReadRow(row, row_format, number), place
            if begin.is_begin and place == begin:
                raise ValueError(f"there are no rows{self.name(number)}")
            place = SourcePlace(num_passes=place.num_passes + 1, num_rows=place.num_rows)
            yield None, place

    def _order_parts(self, number: int, num_passes: int) -> list[int]:
        num_parts = len(self.sources[number].parts)
        if not self.shuffle:
            return list(range(num_parts))
        return np.random.default_rng(mix_seeds(self.seed, number, num_passes)).permutation(num_parts).tolist()


class RowMaker:
    """Makes rows of documents as they come: packed as ``PackedRows`` does it, or each a row of its own.

    Args:
        packing: Which of both.
        seq_length: Tokens in a packed row, or of the longest other one.
        pad_id: Of the tokenizer; no packed row is filled up with it.
    """

    def __init__(self, *, packing: bool, seq_length: int, pad_id: int) -> None:
        self.packing, self.seq_length, self.pad_id = packing, seq_length, pad_id
        self.place = StreamPlace()  # after the row that was taken last
        self._held: deque[tuple[Document, StreamPlace]] = deque()
        self._num_tokens = 0

    def add(self, document: Document, place: StreamPlace) -> None:
        """Take a document in, and the place that it begins at."""
        self._held.append((document, place))
        self._num_tokens += len(document[0])

    @property
    def has_row(self) -> bool:
        """Whether there are enough documents for a row."""
        return self._num_tokens >= self.seq_length if self.packing else bool(self._held)

    def take(self) -> TokenRow:
        """Return the next row."""
        store = HeldDocuments(document for document, _ in self._held)
        rows: PackedRows | DocumentRows = DocumentRows(store, np.arange(1), seq_length=self.seq_length)
        if self.packing:
            rows = PackedRows(store, np.arange(len(self._held)), seq_length=self.seq_length, pad_id=self.pad_id)
        row = rows[0]
        self.leave_out()
        return row

    def leave_out(self) -> None:
        """Do as if the next row were taken, without making it."""
        left = self.seq_length if self.packing else self._num_tokens
        self._num_tokens -= left
        while left:
            (ids, learn), place = self._held.popleft()
            taken = min(left, len(ids))
            left -= taken
            self.place = replace(place, num_used=place.num_used + 1, num_tokens=0)
            if taken < len(ids):
                self.place = replace(place, num_tokens=place.num_tokens + taken)
                self._held.appendleft(((ids[taken:], learn[taken:]), self.place))


class EndlessLoader(DataLoader[Any]):
    """A loader of a stream without an end: it is as long as the run, so that Lightning fetches no batch ahead.

    Lightning does that to find out which batch is the last one, and states are then one batch ahead; seen in 2.6.6.
    """

    def __init__(self, dataset: IterableDataset[Any], *, trainer: Trainer | None, **options: Any) -> None:
        # Of its own, as how often workers are started, and so seeded, depends on how often a run was resumed.
        super().__init__(dataset, generator=Generator(), **options)
        self.trainer = trainer
        if trainer is not None:
            refuse_overfit(trainer)

    def __len__(self) -> int:
        length = None if self.trainer is None else count_stream_batches(self.trainer)
        if length is None:
            raise TypeError("without a Trainer whose steps end a stream has no length")
        return length


class StreamLoader(EndlessLoader):
    """This rank's batches of a stream. Its state is the place of the batch after the one that was handed out last.

    Args:
        stream: Of which all ranks have the same.
        make_rows: Returns what makes rows of its documents.
        collate: Makes a batch of a list of rows.
        batch_size: Rows in a micro-batch of one rank, if all have as many.
        share: Of the ranks in the rows of each round, see Note [Shares].
        skips_bad_rows: Leave bad rows out, and say so, in place of an error.
        fingerprint: Tells the rows, and their order, from others.
        trainer: Gives the rank, and what it goes on from; without it there is one rank.
        num_workers: Processes that tokenize; 0 does it in the main process.
    """

    def __init__(
        self,
        stream: TextStream,
        *,
        make_rows: Callable[[], RowMaker],
        collate: Callable[[Any], Batch],
        batch_size: int,
        share: Share = None,
        skips_bad_rows: bool,
        fingerprint: str,
        trainer: Trainer | None,
        num_workers: int,
    ) -> None:
        super().__init__(stream, trainer=trainer, batch_size=None, num_workers=num_workers, collate_fn=_hand_over)
        self.stream, self.make_rows, self.collate, self.fingerprint = stream, make_rows, collate, fingerprint
        self.skips_bad_rows = skips_bad_rows
        data = get_data(trainer)
        self.rows = split_rows(share, batch_size=batch_size, num_ranks=data.count)
        self.rank, self.place = data.index, stream.begin
        self.epoch = self.samples_seen = 0
        self._num_bad, self._unread = 0, set[str]()
        if trainer is not None:
            restore_epoch(trainer)
            for state in read_loader_states(trainer):  # Lightning hands it over in the middle of an epoch only
                self.load_state_dict(state)

    @property
    def mean_batch_size(self) -> int:
        """Rows of a rank in a round, in the mean of all ranks."""
        return sum(self.rows) // len(self.rows)

    @override
    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        if self.trainer is not None and self.epoch != self.trainer.current_epoch:
            self.epoch, self.samples_seen = self.trainer.current_epoch, 0
        begin, count = sum(self.rows[: self.rank]), sum(self.rows)
        own, is_pinned = range(begin, begin + self.rows[self.rank]), is_on_gpu(self.trainer)
        maker, kept, number = self.make_rows(), list[TokenRow](), 0
        for document, place in self._read_documents(self.place):
            maker.add(document, place)
            while maker.has_row:
                if number in own:
                    kept.append(maker.take())
                else:
                    maker.leave_out()
                number += 1
                if number == count:
                    batch = self.collate(kept)
                    kept, number = [], 0
                    self.place, self.samples_seen = maker.place, self.samples_seen + count
                    yield {name: values.pin_memory() for name, values in batch.items()} if is_pinned else batch

    def _read_documents(self, start: StreamPlace) -> Iterator[tuple[Document, StreamPlace]]:
        """Yield the documents from a place on, and where each begins."""
        self.stream.place = start
        chunks = super().__iter__()
        block = first = _get_block(start)
        # Of each source, the pass within which a good row has to come; not known within a block that a resume enters.
        last_passes = dict.fromkeys(range(len(start.sources)), 0) if start == self.stream.begin else {}
        good = set[int]()  # sources that gave a good row in this block
        for chunk in chunks:
            if chunk.problem:
                raise ValueError(f"train: {chunk.problem}")
            if _get_block(chunk.place) != block:
                block = _get_block(chunk.place)
                for source, place in enumerate(block.sources):
                    if source in good or source not in last_passes:
                        last_passes[source] = place.num_passes + 1
                    elif place.num_passes > last_passes[source]:
                        whole = self.stream.name(source) or " of the whole stream"
                        raise ValueError(f"train: no row{whole} is good: expected at least one")
                good.clear()
            self._note_unread(chunk)
            num_used, num_tokens = (start.num_used, start.num_tokens) if block == first else (0, 0)
            for number, document in enumerate(chunk.documents, start=chunk.place.num_used):
                if number < num_used:
                    continue
                if isinstance(document, str):
                    self._note_bad(document)
                    continue
                good.add(chunk.sources[number - chunk.place.num_used])
                cut = num_tokens if number == num_used else 0
                yield (document[0][cut:], document[1][cut:]), replace(chunk.place, num_used=number, num_tokens=cut)

    def _note_unread(self, chunk: Chunk) -> None:
        """Say once of each field that rows have and that is not read."""
        for name in chunk.num_unread.keys() - self._unread:
            (line,) = describe_unread({name: chunk.num_unread[name]})
            rank_zero_warn(f"train: of {len(chunk.documents)} rows, {line}")
            self._unread.add(name)

    def _note_bad(self, problem: str) -> None:
        """Refuse a bad row, or warn of it: of the first one, then of each that makes ten times as many."""
        if not self.skips_bad_rows:
            raise ValueError(f"train: {problem}")
        self._num_bad += 1
        if str(self._num_bad).strip("0") == "1":
            rows = "row is" if self._num_bad == 1 else "rows are"
            rank_zero_warn(f"train: {self._num_bad} bad {rows} skipped by now, the last: {problem}")

    def state_dict(self) -> dict[str, Any]:
        """Return the place, and what it depends on; the same on every rank."""
        return {
            "epoch": self.epoch,
            "samples_seen": self.samples_seen,
            "num_samples": len(self) * sum(self.rows) if self.trainer is not None else None,
            "global_batch_size": sum(self.rows),
            "num_accumulated": self._num_accumulated,
            "fingerprint": self.fingerprint,
            "stream": asdict(self.place),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            ValueError: It was saved by another kind of loader, or of other rows, or in another order.
        """
        if "stream" not in state:
            raise ValueError(
                "streaming: got true: the checkpoint was saved without it, in an order that a stream does not have: "
                f"leave it out, or {NEW_RUN}"
            )
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                "the checkpoint was saved in a stream of other rows, or in another order: restore train, tokenizer, "
                f"format, seq_length, packing, seed, shuffle and shuffle_buffer_size, or {NEW_RUN}"
            )
        self.place = StreamPlace.load(state["stream"])
        self.epoch, self.samples_seen = state["epoch"], state["samples_seen"]
        layout = {"global_batch_size": sum(self.rows), "num_accumulated": self._num_accumulated}
        is_other = any(state.get(name, number) != number for name, number in layout.items())
        if is_other and self.trainer is not None and not is_epoch_over(state):
            shift_progress(self.trainer, self._count_done(self.trainer))

    @property
    def _num_accumulated(self) -> int:
        return 1 if self.trainer is None else self.trainer.accumulate_grad_batches

    def _count_done(self, trainer: Trainer) -> int:
        """Return the batches of the epoch that have passed, as this loader counts them.

        Where steps end the run, its length is in steps. Counted in rows, a run that goes on with fewer rows in a step
        would be over too early.
        """
        num_accumulated = trainer.accumulate_grad_batches
        if trainer.max_steps != -1 and len(self) == trainer.max_steps * num_accumulated:
            return trainer.global_step * num_accumulated
        return self.samples_seen // sum(self.rows)


def _get_block(place: StreamPlace) -> StreamPlace:
    """Return where the block begins that a place is in."""
    return replace(place, num_used=0, num_tokens=0)


def _hand_over(chunk: Chunk) -> Chunk:
    return chunk


def _encode(rows: Sequence[ReadRow], encoders: Mapping[RowFormat, Encoder]) -> list[Encoded | RowError]:
    """Return the tokens of rows, or what is wrong with them; those that are read alike are tokenized together."""
    found: dict[int, Encoded | RowError] = {}
    for row_format, encoder in encoders.items():
        own = [number for number, row in enumerate(rows) if row.row_format == row_format]
        results = encode_rows((rows[number].row for number in own), encoder)
        found |= {number: result for number, (_, result) in zip(own, results, strict=True)}
    return [found[number] for number in range(len(rows))]


def _describe(row: Row, result: Encoded | RowError) -> Document | str:
    if isinstance(result, RowError):
        return show_controls(f"{row.where}: {result}")
    return np.asarray(result.ids, dtype=np.int32), np.asarray(result.learn, dtype=np.bool_)
