"""Rows of a text with a label, or of a better and a worse answer; and their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from typing_extensions import override

from lit_fsdp.tasks.row_files import Row, name_class, show_controls
from lit_fsdp.tasks.sequence_classification.labels import LabelWriter, Value, read_label
from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.pairs import name_fields, split_pair
from lit_fsdp.tasks.text.rows import (
    PAIR,
    Columns,
    Example,
    PromptCompletion,
    RowFormat,
    Text,
    describe_fields,
    list_texts,
    list_unread,
    parse_row,
    suggest_columns,
)
from lit_fsdp.tasks.text.sources import Part, PydocPart
from lit_fsdp.tasks.text.tokens import NUM_AT_ONCE, NUM_NAMED, Encoded, Encoder, TokenWriter

OF_PAIRS = ("prompt", *PAIR)  # columns
_OF_TEXTS = ("text", "messages", "role", "content", "system", "tools")
_LAYOUTS = (("text",), ("messages",), ("conversations",))
_OTHER_LAYOUTS = ("prompt", "instruction")  # which begin those of TextData that have no place for a label
_NUM_TOPICS = 8
_LEAST = 40  # characters of a paragraph that says what it is about


@dataclass(frozen=True, kw_only=True)
class LabeledColumns:
    """The fields of your rows, where they have names of their own.

    Args:
        text: The text that has a label.
        messages: A list of messages, instead of a text.
        prompt: Of a pair: text, or messages, that both answers follow.
        chosen: Of a pair: the better answer, text or messages.
        rejected: The worse one, in the same form.
        role: Of a message: who speaks.
        content: Of a message: what is said.
        system: A system message beside the others.
        tools: The tools of a chat, as a list or its JSON.
    """

    text: str | None = None
    messages: str | None = None
    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    role: str | None = None
    content: str | None = None
    system: str | None = None
    tools: str | None = None


@dataclass(frozen=True, kw_only=True)
class LabeledFormat:
    """How rows are read.

    Args:
        columns: What fields are called.
        label: The field of the label.
        is_pair: Rows are a better and a worse answer, instead of a text with a label.
        is_labeled: Whether rows need a label.
    """

    columns: LabeledColumns = field(default_factory=LabeledColumns)
    label: str = "label"
    is_pair: bool = False
    is_labeled: bool = True


@dataclass(frozen=True, kw_only=True)
class LabeledRow:
    """A row: one text with its label, or the two of a pair, the better one first."""

    texts: list[Example]
    label: list[Value] | Value | None


class PydocParagraphs(PydocPart):
    """Paragraphs of the language reference that CPython ships, labelled with the topic they are from, of the longest.

    A classifier can learn that without a download.
    """

    @override
    def identify(self) -> Any:
        return [super().identify(), _NUM_TOPICS, _LEAST]

    @override
    def iterate_rows(self) -> Iterator[Row]:
        longest = sorted(super().iterate_rows(), key=lambda row: -len(row.fields["text"]))[:_NUM_TOPICS]
        for row in longest:
            label = row.where.split('"')[1]
            paragraphs = [" ".join(part.split()) for part in row.fields["text"].split("\n\n")]
            for number, text in enumerate((p for p in paragraphs if len(p) >= _LEAST), start=1):
                yield Row(where=f"{row.where} paragraph {number}", fields={"text": text, "label": label})


def find_class_names(parts: Sequence[Part], field: str) -> list[str] | None:
    """Return the names that sources have for the numbers of a field; ``None`` where some have none, or others."""
    first, *others = [part.list_class_names(field) for part in parts]
    return first if all(names == first for names in others) else None


def name_labels(rows: Iterable[Row], field: str, names: Sequence[str]) -> Iterator[Row]:
    """Yield rows with names in place of the numbers of a field; -1, of which data sets make no label, becomes none."""

    def name(value: Any) -> Any:
        return [name(one) for one in value] if isinstance(value, list) else name_class(value, names)

    for row in rows:
        yield replace(row, fields={**row.fields, field: name(row.fields.get(field))})


def parse_labeled(row: Row, labeled: LabeledFormat) -> LabeledRow:
    """Return what a row means.

    Raises:
        RowError: It was not read, or means nothing.
    """
    if row.problem is not None:
        raise RowError(row.problem)
    names = {ours: theirs for ours, theirs in asdict(labeled.columns).items() if theirs is not None}
    if labeled.is_pair:
        return LabeledRow(texts=_parse_pair(row, names), label=None)
    if labeled.is_labeled and labeled.label not in row.fields and set(PAIR) <= row.fields.keys():
        raise RowError('"chosen" and "rejected" make a reward model; set problem_type: reward')
    example = _parse_text(row, names, labeled.label)
    if not labeled.is_labeled:
        return LabeledRow(texts=[example], label=None)
    if row.fields.get(labeled.label) is None:
        raise RowError(
            f'"{labeled.label}" is missing ({describe_fields(row.fields)}); set label to the field of the label'
        )
    return LabeledRow(texts=[example], label=read_label(row.fields[labeled.label]))


def _parse_text(row: Row, names: Mapping[str, str], label: str) -> Example:
    """Return the text or chat of a row."""
    names = {ours: theirs for ours, theirs in names.items() if ours in _OF_TEXTS}  # others are of pairs
    fields = {name: value for name, value in row.fields.items() if name != label}
    if not any(names.get(name, name) in fields for (name,) in _LAYOUTS):
        is_pair = sum(isinstance(value, str) for value in fields.values()) > 1
        join = "; texts in several fields, such as pairs, are not read: join them in one" if is_pair else ""
        raise RowError(
            f"{describe_fields(row.fields)}: expected text, or messages; set columns, such as "
            f"{suggest_columns(fields, _LAYOUTS[:2])}{join}"
        )
    if "text" not in names and fields.get("text_pair"):
        raise RowError('"text_pair" is not read; join it to "text", or leave it out with columns: {text: text}')
    fields = {name: value for name, value in fields.items() if name in names.values() or name not in _OTHER_LAYOUTS}
    return parse_row(replace(row, fields=fields), RowFormat(columns=Columns(**names), loss_on="all"))


def _parse_pair(row: Row, names: Mapping[str, str]) -> list[Example]:
    """Return the two answers of a pair, each with the prompt before it."""
    of_rows = {ours: theirs for ours, theirs in names.items() if ours not in ("text", "role", "content")}
    fields = name_fields(row.fields, of_rows)
    if missing := next((name for name in PAIR if name not in fields), None):
        raise RowError(f'"{missing}" is missing ({describe_fields(row.fields)}); set columns.{missing}')
    row_format = RowFormat(columns=Columns(role=names.get("role"), content=names.get("content")), loss_on="all")
    texts: list[Example] = []
    for answer in split_pair(fields, needs_prompt=False):
        one = replace(row, fields=answer)
        text = parse_row(one, row_format)
        if unread := list_unread(one, row_format):
            raise RowError(f'"{unread[0]}" has no place in a pair of texts; give prompt and answers as messages')
        texts.append(Text(text=text.prompt + text.completion) if isinstance(text, PromptCompletion) else text)
    return texts


def list_labeled_texts(rows: Iterable[Row], labeled: LabeledFormat, *, skip_bad_rows: bool) -> Iterator[str]:
    """Yield the texts of rows, to train a tokenizer on.

    Raises:
        RowError: Of the first bad row, with its place, unless these are left out.
    """
    for row in rows:
        parsed = _parse(row, labeled)
        if isinstance(parsed, LabeledRow):
            yield from (text for example in parsed.texts for text in list_texts(example))
        elif not skip_bad_rows:
            raise RowError(show_controls(f"{row.where}: {parsed}"))


class LabeledEncoder:
    """Turns texts into tokens, just as a pipeline of Transformers will: with the tokenizer's special tokens.

    Chats are rendered by the tokenizer's template. What is too long is cut as the tokenizer cuts.

    Args:
        tokenizer: A tokenizer of Transformers.
        seq_length: Tokens that are kept.
    """

    def __init__(self, tokenizer: Any, seq_length: int) -> None:
        self.tokenizer, self.seq_length = tokenizer, seq_length
        self._chats = Encoder(tokenizer, RowFormat(loss_on="all"))

    def encode(self, examples: Sequence[Example]) -> list[tuple[list[int], bool] | RowError]:
        """Return the tokens of each, and whether it is cut; or what is wrong. Many at once are faster."""
        texts = [example.text for example in examples if isinstance(example, Text)]
        ids = iter(self.tokenizer(texts, verbose=False)["input_ids"] if texts else [])
        return [
            self._cut(next(ids), example.text) if isinstance(example, Text) else self._encode_chat(example)
            for example in examples
        ]

    def _encode_chat(self, chat: Example) -> tuple[list[int], bool] | RowError:
        (found,) = self._chats.encode([chat])
        if not isinstance(found, Encoded):
            return found
        is_cut = len(found.ids) > self.seq_length
        kept = slice(-self.seq_length, None) if self.tokenizer.truncation_side == "left" else slice(self.seq_length)
        return (found.ids[kept], is_cut)

    def _cut(self, ids: list[int], text: str) -> tuple[list[int], bool]:
        if len(ids) <= self.seq_length:
            return ids, False
        options = {"truncation": True, "max_length": self.seq_length}  # which keeps the special tokens
        return self.tokenizer(text, verbose=False, **options)["input_ids"], True


def write_labeled(
    folder: Path, rows: Iterable[Row], *, encoder: LabeledEncoder, labeled: LabeledFormat, skip_bad_rows: bool
) -> None:
    """Write tokens and labels of rows into a folder that exists and is empty.

    Pairs that are too long are left out and counted: of an answer that is cut nobody could say whether it is better.

    Raises:
        ValueError: On the first bad row, or with ``skip_bad_rows`` if no row is good.
    """
    counts = {"num_bad": 0, "num_cut": 0, "num_long": 0}
    bad: list[str] = []
    labels, places = LabelWriter(), list[int]()
    with TokenWriter(folder) as writer:
        for place, (row, result) in enumerate(_encode_rows(rows, encoder, labeled)):
            if isinstance(result, RowError):
                counts["num_bad"] += 1
                bad += [show_controls(f"{row.where}: {result}")] * (len(bad) < NUM_NAMED)
                if not skip_bad_rows:
                    raise ValueError(bad[0])
                continue
            label, texts = result
            is_cut = any(cut for _, cut in texts)
            if is_cut and labeled.is_pair:
                counts["num_long"] += 1
                continue
            counts["num_cut"] += is_cut
            places.append(place)
            for ids, _ in texts:
                writer.add(Encoded(ids=ids, learn=[True] * len(ids)))
            if label is not None:
                labels.add(label)
        if not writer.num_tokens:
            raise ValueError(_describe_none(bad, counts))
        labels.finish(folder)
        found = {"places": places} if counts["num_bad"] and not labeled.is_labeled else {}
        writer.finish(bad=bad, **counts, **found)


def _describe_none(bad: Sequence[str], counts: Mapping[str, int]) -> str:
    if counts["num_long"]:
        return f"all {counts['num_long']} pairs are longer than seq_length; raise it"
    return f"all {counts['num_bad']} rows are bad, the first: {bad[0]}" if bad else "there are no rows"


_Result = tuple[list[Value] | Value | None, list[tuple[list[int], bool]]]


def _encode_rows(
    rows: Iterable[Row], encoder: LabeledEncoder, labeled: LabeledFormat
) -> Iterator[tuple[Row, _Result | RowError]]:
    """Yield each row with its label and tokens, or with what is wrong with it."""
    rows = iter(rows)
    while chunk := list(islice(rows, NUM_AT_ONCE)):
        parsed = [_parse(row, labeled) for row in chunk]
        found = iter(encoder.encode([text for one in parsed if isinstance(one, LabeledRow) for text in one.texts]))
        for row, one in zip(chunk, parsed, strict=True):
            if isinstance(one, RowError):
                yield row, one
                continue
            texts = [next(found) for _ in one.texts]
            wrong = next((text for text in texts if isinstance(text, RowError)), None)
            yield row, wrong or (one.label, [text for text in texts if not isinstance(text, RowError)])


def _parse(row: Row, labeled: LabeledFormat) -> LabeledRow | RowError:
    try:
        return parse_labeled(row, labeled)
    except RowError as error:
        return error
