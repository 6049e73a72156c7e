"""Rows of preferences, and what they mean: pairs of a chosen and a rejected completion, or completions with a label.

Each becomes one or two prompts with a completion, which :mod:`lit_fsdp.tasks.text.rows` reads like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

from typing_extensions import override

from lit_fsdp.tasks.row_files import Row, describe
from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.rows import RowFormat

# What a document is, beside its tokens. A rejected one follows its chosen one.
CHOSEN, REJECTED, DESIRABLE, UNDESIRABLE = "cr10"
_PROMPTS = ("prompt", "messages", "conversations")
_OPTIONAL = ("prompt", "role", "content", "system", "tools")
# What a table may call these, to guess a mapping by.
_WORDS = {
    "prompt": ("question", "query", "instruction", "input", "context", "problem", "user"),
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


def _split(row: Row, names: PreferenceColumns) -> list[Row]:
    """Return the prompts with a completion that a row means; those of a pair have the same place."""
    fields = _name_fields(row.fields, names)
    present = {name for name, value in fields.items() if value is not None}
    if present.issuperset(("chosen", "rejected")):
        prompt, chosen, rejected = _part_pair(fields)
        rest = {n: v for n, v in fields.items() if n not in (*_PROMPTS, "chosen", "rejected", "completion", "label")}
        return [
            Row(where=row.where, fields={**rest, "prompt": prompt, "completion": completion}, mark=mark)
            for completion, mark in ((chosen, CHOSEN), (rejected, REJECTED))
        ]
    if present.issuperset(("completion", "label")):
        prompt, completion = _get_prompt(fields), _wrap(fields["completion"])
        if prompt is None:
            raise RowError(f"{_describe_fields(row.fields)}: a completion needs its prompt; set columns.prompt")
        rest = {n: v for n, v in fields.items() if n not in (*_PROMPTS, "completion", "label")}
        mark = DESIRABLE if _get_label(fields["label"]) else UNDESIRABLE
        return [Row(where=row.where, fields={**rest, "prompt": prompt, "completion": completion}, mark=mark)]
    raise RowError(_explain_layout(row.fields, present))


def _name_prompt(fields: Mapping[str, Any], names: PreferenceColumns) -> dict[str, Any]:
    """Return the fields of a prompt to continue."""
    prompts = {ours: theirs for ours, theirs in asdict(names).items() if ours in ("prompt", "system", "tools")}
    return _name_fields(fields, PreferenceColumns(**prompts))


def _part_pair(fields: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the prompt of a pair and its two completions, without a prompt that each of them repeats."""
    chosen, rejected = _wrap(fields["chosen"]), _wrap(fields["rejected"])
    if type(chosen) is not type(rejected):
        raise RowError(f'"chosen" is {describe(chosen)} and "rejected" {describe(rejected)}: expected the same form')
    if chosen == rejected:
        raise RowError('"chosen" and "rejected" are the same; remove the row or set bad_rows: skip')
    prompt = _get_prompt(fields)
    if prompt is not None and isinstance(prompt, list) == isinstance(chosen, list):
        # Some data sets repeat the prompt in front of both.
        repeats = isinstance(prompt, list) and chosen[: len(prompt)] == prompt == rejected[: len(prompt)]
        return (prompt, chosen[len(prompt) :], rejected[len(prompt) :]) if repeats else (prompt, chosen, rejected)
    if isinstance(prompt, list):
        raise RowError(f'the prompt is a list of messages and "chosen" is {describe(chosen)}: expected the same form')
    # As UltraFeedback: whole chats, beside the text of their first message.
    num_shared = len(list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))))
    if isinstance(chosen, str) and num_shared and chosen[num_shared - 1] == " ":
        num_shared -= 1  # a space belongs to the word after it
    if not num_shared:
        fault, fix = "there is no prompt", "set columns.prompt"
        if prompt is not None:
            fault, fix = f"the prompt is {describe(prompt)}, not messages", "give all three as messages, or all as text"
        raise RowError(f'"chosen" and "rejected" have no beginning in common and {fault}; {fix}')
    if num_shared in (len(chosen), len(rejected)):
        raise RowError('one of "chosen" and "rejected" is the beginning of the other; set columns.prompt')
    return chosen[:num_shared], chosen[num_shared:], rejected[num_shared:]


def _get_prompt(fields: Mapping[str, Any]) -> Any:
    found = next((fields[name] for name in _PROMPTS if fields.get(name) is not None), None)
    return _wrap(found)


def _wrap(value: Any) -> Any:
    """Return a single message as a list of messages; all else as it is."""
    return [value] if isinstance(value, Mapping) else value


def _get_label(value: object) -> bool:
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false", "0", "1"):  # of tables of text
        return value.lower() in ("true", "1")
    raise RowError(f'"label" must be true or false, it is {describe(value)}')


def _name_fields(fields: Mapping[str, Any], names: PreferenceColumns) -> dict[str, Any]:
    """Return the fields of a row by the names of ours."""
    given = {ours: theirs for ours, theirs in asdict(names).items() if theirs is not None}
    for ours, theirs in given.items():
        if theirs not in fields and ours not in _OPTIONAL:
            raise RowError(f'"{theirs}" is missing ({_describe_fields(fields)}); set columns.{ours}')
    of_rows = {ours: theirs for ours, theirs in given.items() if ours not in ("role", "content")}
    rest = {name: value for name, value in fields.items() if name not in of_rows.values()}
    # A prompt that the user has named comes before those of other names.
    rest = {n: v for n, v in rest.items() if names.prompt is None or n not in _PROMPTS}
    return rest | {ours: fields[theirs] for ours, theirs in of_rows.items() if theirs in fields}


def _explain_layout(fields: Mapping[str, Any], present: set[str]) -> str:
    known = "prompt, chosen and rejected, or prompt, completion and label"
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
    return f"{_describe_fields(fields)}: expected {known}; set columns, such as columns: {{{mapping}}}"


def _is_like(name: str, ours: str, hints: Iterable[str], *, whole: bool) -> bool:
    return name in (ours, *hints) if whole else any(hint in name for hint in (ours, *hints))


def _describe_fields(fields: Mapping[str, Any]) -> str:
    return f"the row has: {', '.join(map(str, fields)) or 'no fields'}"


def _make_pairs(row: Row) -> Iterator[Row]:
    """Yield pairs made of text: how a piece of it goes on is better than the same words in reverse."""
    words = str(row.fields["text"]).split()
    for begin in range(0, len(words) - _NUM_WORDS + 1, _NUM_WORDS):
        piece = words[begin : begin + _NUM_WORDS]
        prompt, end = piece[:_NUM_PROMPT], piece[_NUM_PROMPT:]
        for completion, mark in ((end, CHOSEN), (end[::-1], REJECTED)):
            fields = {"prompt": " ".join(prompt), "completion": f" {' '.join(completion)}"}
            yield Row(where=f"{row.where} words from {begin + 1}", fields=fields, mark=mark)
