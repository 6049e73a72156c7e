"""Rows of preferences, and what they mean: pairs of a chosen and a rejected completion, or completions with a label.

Each becomes one or two prompts with a completion, which :mod:`lit_fsdp.tasks.text.rows` reads like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from typing_extensions import override

from lit_fsdp.tasks.row_files import Row, describe
from lit_fsdp.tasks.text.messages import MessageFields, RowError, parse_messages
from lit_fsdp.tasks.text.pairs import QUESTIONS, get_prompt, keep_rest, name_fields, split_pair, wrap_message
from lit_fsdp.tasks.text.rows import PAIR, RowFormat, describe_fields

# What a document is, beside its tokens. A rejected one follows its chosen one.
CHOSEN, REJECTED, DESIRABLE, UNDESIRABLE = "cr10"
_LABELLED = ("completion", "label")
# What a table may call these, to guess a mapping by.
_WORDS = {
    "prompt": (*QUESTIONS, "context", "problem", "user"),
    "chosen": ("chosen", "prefer", "accept", "better", "good", "best", "win", "positive", "response_w"),
    "rejected": ("reject", "dispref", "worse", "bad", "worst", "lose", "loss", "negative", "response_l"),
}
_UNPAIRED_WORDS = {
    "prompt": _WORDS["prompt"],
    "completion": ("answer", "response", "output", "reply", "text"),
    "label": ("desirable", "thumbs", "rating", "feedback", "is_good", "liked"),
}
_MANUAL = "pydoc topic "  # how the rows of Python's manual are called
_NUM_WORDS, _NUM_PROMPT = 24, 8  # of a pair made of it, and of its prompt


@dataclass(frozen=True, kw_only=True)
class PreferenceColumns:
    """The fields of your rows, where they have names of their own.

    Args:
        prompt: Text, or messages, that the completions follow.
        chosen: The better completion: text, or messages.
        rejected: The worse one, in the same form.
        completion: A single completion with a ``label``.
        label: Whether that is a good one: true or false.
        role: Of a message: who speaks.
        content: Of a message: what is said.
        system: A system message beside the others.
        tools: The tools of a chat, as a list or its JSON.
    """

    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    completion: str | None = None
    label: str | None = None
    role: str | None = None
    content: str | None = None
    system: str | None = None
    tools: str | None = None


@dataclass(frozen=True, kw_only=True)
class PreferenceFormat(RowFormat):
    """How rows of preferences are read.

    Args:
        names: What fields are called; ``columns`` keeps those of messages.
    """

    names: PreferenceColumns = PreferenceColumns()

    @override
    def expand(self, rows: Iterable[Row]) -> Iterable[Row]:
        """Yield two prompts with a completion for each pair, and one for each labelled completion."""
        for row in rows:
            if row.problem is not None:
                yield row
                continue
            try:
                if self.is_prompt:
                    yield replace(row, fields=_name_prompt(row.fields, self.names))
                elif row.where.startswith(_MANUAL):
                    yield from _make_pairs(row)
                else:
                    yield from _split(row, self.names)
            except RowError as error:
                yield replace(row, fields={}, problem=str(error))


def _split(row: Row, columns: PreferenceColumns) -> list[Row]:
    """Return the prompts with a completion that a row means; those of a pair have the same place."""
    names = _list_names(columns)
    fields = name_fields(row.fields, names)
    present = {name for name, value in fields.items() if value is not None}
    if present.issuperset(PAIR):
        return [
            Row(where=row.where, fields=one, mark=mark)
            for one, mark in zip(split_pair(fields), (CHOSEN, REJECTED), strict=True)
        ]
    prompt, completion = get_prompt(fields), wrap_message(fields.get("completion"))
    if "label" in present and completion is None and isinstance(prompt, list):
        prompt, completion = _split_chat(prompt, columns)
    if "label" in present and completion is not None:
        if prompt is None:
            raise RowError(f"{describe_fields(row.fields)}: a completion needs its prompt; set columns.prompt")
        mark = DESIRABLE if _get_label(fields["label"]) else UNDESIRABLE
        fields = {**keep_rest(fields), "prompt": prompt, "completion": completion}
        return [Row(where=row.where, fields=fields, mark=mark)]
    for layout in sorted((PAIR, _LABELLED), key=present.isdisjoint):
        if fields.keys() >= set(layout):
            empty = next(name for name in layout if name not in present)
            raise RowError(f'"{names.get(empty, empty)}" is empty; remove the row or set bad_rows: skip')
    raise RowError(_explain_layout(row.fields, present))


def _split_chat(messages: list[Any], columns: PreferenceColumns) -> tuple[list[Any], list[Any]]:
    """Return the prompt and the answer of a chat with a label, as LLaMA-Factory has them."""
    parsed, _ = parse_messages(messages, "messages", MessageFields(role=columns.role, content=columns.content))
    if parsed[-1]["role"] != "assistant":
        raise RowError(
            f'the last message is by "{parsed[-1]["role"]}": expected the answer that "label" is of; add it, or a '
            '"completion" beside "label"'
        )
    if len(parsed) == 1:
        raise RowError("the answer is the only message: expected its prompt before it")
    return messages[:-1], messages[-1:]


def _name_prompt(fields: Mapping[str, Any], columns: PreferenceColumns) -> dict[str, Any]:
    """Return the fields of a prompt to continue."""
    of_prompts = ("prompt", "system", "tools")
    return name_fields(fields, {ours: name for ours, name in _list_names(columns).items() if ours in of_prompts})


def _list_names(columns: PreferenceColumns) -> dict[str, str]:
    """Return the fields of rows that the user has named, not those of messages."""
    found = asdict(columns).items()
    return {ours: theirs for ours, theirs in found if theirs is not None and ours not in ("role", "content")}


def _get_label(value: object) -> bool:
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false", "0", "1"):  # of tables of text
        return value.lower() in ("true", "1")
    raise RowError(f'"label" must be true or false, it is {describe(value)}')


def _explain_layout(fields: Mapping[str, Any], present: set[str]) -> str:
    known = "prompt, chosen and rejected, or prompt, completion and label, or messages and label"
    is_flag = [name for name, value in fields.items() if isinstance(value, bool)]
    if len(is_flag) == 1 and "label" not in present and isinstance(get_prompt(fields), list):
        return f"{describe_fields(fields)}: expected {known}; set columns, such as columns: {{label: {is_flag[0]}}}"
    words = _UNPAIRED_WORDS if present & {"completion", "label"} else _WORDS
    guess: dict[str, str] = {}
    left = [str(name) for name in fields]
    for whole in (True, False):  # exact names first
        for ours, hints in words.items():
            found = next((n for n in left if _is_like(n.lower(), ours, hints, whole=whole)), None)
            if ours not in guess and found is not None:
                guess[ours] = found
                left.remove(found)
    for ours in words:
        guess.setdefault(ours, left.pop(0) if left else "...")
    mapping = ", ".join(f"{ours}: {guess[ours]}" for ours in words)
    return f"{describe_fields(fields)}: expected {known}; set columns, such as columns: {{{mapping}}}"


def _is_like(name: str, ours: str, hints: Iterable[str], *, whole: bool) -> bool:
    return name in (ours, *hints) if whole else any(hint in name for hint in (ours, *hints))


def _make_pairs(row: Row) -> Iterator[Row]:
    """Yield pairs made of text: how a piece of it goes on is better than the same words in reverse."""
    words = str(row.fields["text"]).split()
    for begin in range(0, len(words) - _NUM_WORDS + 1, _NUM_WORDS):
        piece = words[begin : begin + _NUM_WORDS]
        prompt, end = piece[:_NUM_PROMPT], piece[_NUM_PROMPT:]
        for completion, mark in ((end, CHOSEN), (end[::-1], REJECTED)):
            fields = {"prompt": " ".join(prompt), "completion": f" {' '.join(completion)}"}
            yield Row(where=f"{row.where} words from {begin + 1}", fields=fields, mark=mark)
