"""Tokens: which of a document's are to be learned, and one flat file of them that all ranks and workers share."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_fsdp.cache import read_digests
from lit_fsdp.tasks.row_files import Row, show_controls
from lit_fsdp.tasks.text.answers import REMEDY, Render, TurnMarkers, check_answers, find_answers, read_turn_markers
from lit_fsdp.tasks.text.messages import RowError, parse_arguments, write_arguments
from lit_fsdp.tasks.text.rows import (
    Chat,
    Example,
    PromptCompletion,
    RowFormat,
    Text,
    list_optional,
    list_unread,
    parse_row,
)
from lit_fsdp.tasks.text.tokenizer import get_end_id

TOKENS, LEARN, ENDS, SUMMARY = "tokens.int32", "learn.bool", "ends.int64", "summary.json"
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")
NUM_NAMED = 5  # bad rows that a warning names
NUM_AT_ONCE = 1000  # rows given to the tokenizer together
_COUNTED_AT_ONCE = 1 << 20  # tokens
_MARK = "\ue000"  # of the private use area: no token joins it with what follows


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Token ids of one document, and for each whether loss is taken on it."""

    ids: list[int]
    learn: list[bool]


class Encoder:
    """Turns examples into tokens. Documents start as the tokenizer starts a text and end with its end token.

    Chats end as their template ends them.

    Args:
        tokenizer: A tokenizer of Transformers.
        row_format: Says on which tokens loss is taken, and whether rows are prompts.
    """

    def __init__(self, tokenizer: Any, row_format: RowFormat) -> None:
        self.tokenizer = tokenizer
        self.row_format = row_format
        self._start = _read_start(tokenizer)
        end = get_end_id(tokenizer)
        self._end = [] if end is None else [end]
        self._markers: dict[bool, TurnMarkers] = {}  # a tokenizer may have a template of its own for tools

    @cached_property
    def _mark(self) -> tuple[str, int]:
        """What a completion is tokenized behind, so that it does not begin with a space, and how many tokens it is."""
        if not _begins_with_space(self.tokenizer) or not "".join(self.tokenizer.tokenize(_MARK)).strip("\u2581\u0120"):
            return "", 0  # the second of tokenizers that drop what they do not know
        return _MARK, len(self.tokenizer(_MARK, add_special_tokens=False)["input_ids"])

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """Return tokens, or what is wrong, for each example. Many at once are faster: all cores work."""
        texts: list[str] = []
        if self.tokenizer.chat_template is None:
            examples = [e.plain or e if isinstance(e, Chat) else e for e in examples]
        for example in examples:
            if isinstance(example, Text):
                texts.append(example.text)
            elif isinstance(example, PromptCompletion):
                # Alone, a completion would begin with a space of such tokenizers, in the middle of the text.
                texts += [example.prompt, (self._mark[0] if example.prompt else "") + example.completion]
        # verbose=False: a document longer than the model's context is no reason to warn, it will be cut.
        ids = iter(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else [])
        return [self._encode_one(example, ids) for example in examples]

    def _encode_one(self, example: Example, ids: Any) -> Encoded | RowError:
        if isinstance(example, Chat):
            try:
                return self._encode_chat(example)
            except RowError as error:
                return error
        prompt = [*self._start, *next(ids)]
        if isinstance(example, Text):
            tokens = prompt if self.row_format.is_prompt else prompt + self._end
            return Encoded(ids=tokens, learn=[True] * len(tokens))
        completion = [*next(ids)[self._mark[1] if example.prompt else 0 :], *self._end]
        learn_prompt = self.row_format.loss_on == "all"
        return Encoded(ids=prompt + completion, learn=[learn_prompt] * len(prompt) + [True] * len(completion))

    def _encode_chat(self, chat: Chat) -> Encoded:
        if self.tokenizer.chat_template is None:
            raise RowError(
                "a chat, but the tokenizer has no chat template; set chat_template, or tokenizer to that of "
                "a chat model"
            )
        if any(message["role"] == "developer" for message in chat.messages) and not self._knows_developers:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in chat.messages]
            chat = replace(chat, messages=messages)
        if any(message.get("tool_calls") for message in chat.messages):
            chat = replace(chat, messages=self._change_arguments(chat.messages))
        if self.row_format.loss_on == "all" or self.row_format.is_prompt:
            text = self._render(chat, chat.messages, add_generation_prompt=self.row_format.is_prompt)
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return Encoded(ids=ids, learn=[True] * len(ids))
        if not self.tokenizer.is_fast:
            raise RowError("only a fast tokenizer can find the answers' tokens; set loss_on: all")
        with _template_errors():
            template = self.tokenizer.get_chat_template(tools=chat.tools)
        return self._encode_marked(chat) if GENERATION_BLOCK.search(template) else self._encode_unmarked(chat)

    @cached_property
    def _knows_developers(self) -> bool:
        """Whether the template shows what a developer says; others have it from the system."""
        messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "a"}]
        try:
            return "be brief" in self._render(Chat(messages=messages), messages)
        except RowError:
            return False

    @cached_property
    def _change_arguments(self) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
        """What makes of the arguments of calls what the template takes."""
        text = '{"k": 1}'
        if (rendered := self._render_call(text)) is not None and text not in rendered:
            return parse_arguments  # it makes JSON of text, which would quote it once more
        of_object = self._render_call({"k": 1})
        if of_object is None:
            return list if rendered is None else write_arguments
        # What Python writes of an object that a template puts in as it is.
        return write_arguments if "{'k': 1}" in of_object else list

    def _render_call(self, arguments: Any) -> str | None:
        function = {"name": "f", "arguments": arguments}
        call = {"type": "function", "id": "000000000", "function": function}  # Mistral wants 9
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        chat = Chat(messages=[{"role": "user", "content": "a"}, answer])
        try:
            return self._render(chat, chat.messages)
        except RowError:
            return None

    def _encode_marked(self, chat: Chat) -> Encoded:
        """Take what the template itself marks as generated."""
        with _template_errors():
            out = self.tokenizer.apply_chat_template(
                chat.messages,
                tools=chat.tools,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )
        learn = [bool(m) for m in out["assistant_masks"]]
        if chat.context:
            answers = [n for n, message in enumerate(chat.messages) if message["role"] == "assistant"]
            begins = [n for n, is_learned in enumerate(learn) if is_learned and not (n and learn[n - 1])]
            if len(begins) != len(answers):
                raise RowError(
                    f"the chat template marks {len(begins)} answers of {len(answers)}, so that those which are "
                    "context cannot be told; set bad_rows: skip"
                )
            for answer, begin, end in zip(answers, begins, [*begins[1:], len(learn)], strict=True):
                if answer in chat.context:
                    learn[begin:end] = [False] * (end - begin)
        if not any(learn):
            raise RowError(f"the chat template marks nothing in the answers as generated; {REMEDY}")
        render = partial(self._render, chat)
        check_answers(chat.messages, render(chat.messages), render)
        return Encoded(ids=out["input_ids"], learn=learn)

    def _encode_unmarked(self, chat: Chat) -> Encoded:
        """Find the answers in the rendered chat, which is tokenized as one text."""
        render = partial(self._render, chat)
        whole = render(chat.messages)
        spans = find_answers(chat.messages, whole, render, self._get_markers(chat, render))
        out = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        is_answer = bytearray(len(whole))
        answers = [n for n, message in enumerate(chat.messages) if message["role"] == "assistant"]
        for begin, end in (span for n, span in zip(answers, spans, strict=True) if n not in chat.context):
            is_answer[begin:end] = b"\1" * (end - begin)
        # A token may begin with the space before an answer.
        learn = [1 in is_answer[begin:end] for begin, end in out["offset_mapping"]]
        return Encoded(ids=out["input_ids"], learn=learn)

    def _get_markers(self, chat: Chat, render: Render) -> TurnMarkers:
        has_tools = bool(chat.tools)
        if has_tools not in self._markers:
            question = [{"role": "user", "content": "a"}]
            try:
                self._markers[has_tools] = read_turn_markers(render, self.tokenizer, question)
            except RowError:  # of this template a chat must begin in another way
                first = next(n for n, message in enumerate(chat.messages) if message["role"] == "assistant")
                if not first:
                    raise
                return read_turn_markers(render, self.tokenizer, chat.messages[:first])
        return self._markers[has_tools]

    def _render(self, chat: Chat, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        with _template_errors():
            return self.tokenizer.apply_chat_template(
                messages, tools=chat.tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )


@contextmanager
def _template_errors() -> Iterator[None]:
    """Turn what a template raises, such as "roles must alternate", into a row's error."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, TypeError, ValueError) as error:
        raise RowError(
            f"the tokenizer's chat template refuses it: {error}; set bad_rows: skip, or chat_template to one "
            "that takes it"
        ) from error


def find_turn_end(tokenizer: Any) -> int | None:
    """Return the special token with which the chat template ends an answer, if it ends with one."""
    if tokenizer.chat_template is None:
        return None
    render = partial(Encoder(tokenizer, RowFormat())._render, Chat(messages=[]))
    try:
        markers = read_turn_markers(render, tokenizer, [{"role": "user", "content": "a"}])
    except RowError:  # of a template that takes no such chat
        return None
    end = markers.stops.search(markers.end)
    return None if end is None else int(tokenizer.convert_tokens_to_ids(end.group()))


def _begins_with_space(tokenizer: Any) -> bool:
    """Return whether the tokenizer puts a space before each text, as that of Llama 2 does."""
    return "".join(tokenizer.tokenize("a")).startswith(("\u2581", "\u0120"))  # as SentencePiece and GPT-2 write it


def _read_start(tokenizer: Any) -> list[int]:
    """Return what the tokenizer puts before a text, such as ``<s>``; what it puts after is left out."""
    with_special = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    for begin in range(len(with_special) - len(plain) + 1):
        if with_special[begin : begin + len(plain)] == plain:
            return list(with_special[:begin])
    return []


class TokenWriter(ExitStack):
    """Writes documents one after the other to a folder that exists and is empty."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.num_tokens = 0
        self._ends: list[int] = []
        self._tokens, self._learn = (self.enter_context((folder / name).open("wb")) for name in (TOKENS, LEARN))

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
    """Documents that ``TokenWriter`` has written to a folder, as tokens, read from disk as needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends: NDArray[np.int64] = np.fromfile(folder / ENDS, dtype=np.int64)
        self.lengths: NDArray[np.int64] = np.diff(self.ends, prepend=0)
        self.summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
        self._map()

    @property
    def places(self) -> NDArray[np.int64]:
        """Of prompts: which row of its source each is, as bad ones between them may be left out."""
        return np.asarray(self.summary.get("places", range(len(self))), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        """Of all documents."""
        return int(self.ends[-1])

    def list_digests(self) -> list[str]:
        """Return what tells the tokens from others."""
        digests = read_digests(self.folder)
        return [digests[name] for name in (TOKENS, LEARN, ENDS)]

    def __getitem__(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return ids of a document and whether each is learned; views of the file, not copies."""
        end = self.ends[document]
        begin = end - self.lengths[document]
        return self._tokens[begin:end], self._learn[begin:end]

    def count_learned(self, documents: NDArray[np.int64], longest: int | None = None) -> int:
        """Return how many tokens of some documents are learned; of each only the first ones, if it is longer."""
        times = np.bincount(documents, minlength=len(self))
        kept = np.zeros(len(self), dtype=np.int64)
        kept[documents] = self.lengths[documents] if longest is None else np.minimum(self.lengths[documents], longest)
        begins, total, first = self.ends - self.lengths, 0, 0
        while first < len(self):  # in parts, as numpy makes a number of 8 bytes of each token
            last = max(int(np.searchsorted(self.ends, begins[first] + _COUNTED_AT_ONCE, side="right")), first + 1)
            part = slice(first, last)
            counts = np.cumsum(self._learn[begins[first] : self.ends[last - 1]], dtype=np.int64)
            before = np.append(0, counts)
            places = begins[part] - begins[first]
            total += int((before[places + kept[part]] - before[places]) @ times[part])
            first = last
        return total

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array would be sent to a spawned worker by value, all of it.
        return {name: value for name, value in vars(self).items() if name not in {"_tokens", "_learn"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()

    def _map(self) -> None:
        self._tokens = np.memmap(self.folder / TOKENS, dtype=np.int32, mode="r")
        self._learn = np.memmap(self.folder / LEARN, dtype=np.bool_, mode="r")


def describe_unread(num_unread: Mapping[str, int]) -> list[str]:
    """Return a line for each field that rows have and that is not read; ``num_unread`` counts the rows, by field."""
    return [
        f'{count:,} rows have "{name}" beside a prompt that is text, which has no place for it: it is not read; set '
        "format: chat to read it"
        for name, count in num_unread.items()
    ]


def write_tokens(
    folder: Path,
    rows: Iterable[Row],
    *,
    tokenizer: Any,
    row_format: RowFormat,
    skip_bad_rows: bool,
    has_all_columns: bool = False,
) -> None:
    """Tokenize rows into a folder for ``TokenStore``.

    Args:
        folder: It exists and is empty.
        rows: What to tokenize.
        tokenizer: A tokenizer of Transformers.
        row_format: How rows are read.
        skip_bad_rows: Leave bad rows out, and count them.
        has_all_columns: Refuse a column that the user has named and that no row has.

    Raises:
        ValueError: On the first bad row, or with ``skip_bad_rows`` if no row is good.
    """
    encoder = Encoder(tokenizer, row_format)
    bad: list[str] = []
    num_bad = 0
    num_unread: Counter[str] = Counter()
    unread, fields, marks = list_optional(row_format.columns), list[str](), list[str]()
    places: list[int] = []
    encoded = encode_rows(row_format.expand(rows), encoder)
    with TokenWriter(folder) as writer:
        groups = groupby(encoded, key=lambda pair: pair[0].where)  # documents of one row stand or fall together
        for place, (_, group) in enumerate(groups):
            documents = list(group)
            for row, _ in documents:
                if unread and row.problem is None:
                    unread = {name: theirs for name, theirs in unread.items() if theirs not in row.fields}
                    fields = list(row.fields)
            row, result = next((pair for pair in documents if not isinstance(pair[1], Encoded)), documents[0])
            if isinstance(result, Encoded):
                for row, document in documents:
                    assert isinstance(document, Encoded)
                    writer.add(document)
                    marks += row.mark
                places.append(place)
                num_unread.update(list_unread(documents[0][0], row_format))
                continue
            num_bad += 1
            if len(bad) < NUM_NAMED:
                bad.append(show_controls(f"{row.where}: {result}"))
            if not skip_bad_rows:
                raise ValueError(bad[0])
        if not writer.num_tokens:
            raise ValueError(f"all {num_bad} rows are bad, the first: {bad[0]}" if bad else "there are no rows")
        for name, theirs in unread.items() if has_all_columns else ():
            raise ValueError(f'columns.{name}: got "{theirs}": no row has it; they have: {", ".join(map(str, fields))}')
        found: dict[str, Any] = {"marks": "".join(marks)} if any(marks) else {}
        if num_bad and row_format.is_prompt:
            found["places"] = places
        writer.finish(num_bad=num_bad, bad=bad, num_unread=num_unread, **found)


def encode_rows(rows: Iterable[Row], encoder: Encoder) -> Iterator[tuple[Row, Encoded | RowError]]:
    """Yield each row with its tokens, or with what is wrong with it."""
    rows = iter(rows)
    while chunk := list(islice(rows, NUM_AT_ONCE)):
        parsed = [_parse(row, encoder.row_format) for row in chunk]
        encoded = iter(encoder.encode([p for p in parsed if not isinstance(p, RowError)]))
        for row, example in zip(chunk, parsed, strict=True):
            result = example if isinstance(example, RowError) else next(encoded)
            if isinstance(result, Encoded) and not result.ids:
                result = RowError("gives no tokens; remove the row or set bad_rows: skip")
            yield row, result


def _parse(row: Row, row_format: RowFormat) -> Example | RowError:
    try:
        return parse_row(row, row_format)
    except RowError as error:
        return error
