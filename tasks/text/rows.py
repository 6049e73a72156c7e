"""Rows of data, and what they mean: plain text, a prompt with its completion, or a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lit_fsdp.tasks.row_files import Row, describe
from lit_fsdp.tasks.text.messages import MessageFields, RowError, parse_messages, parse_tools

PAIR = ("chosen", "rejected")  # read by lit_fsdp.tasks.text.pairs
Format = Literal["auto", "text", "prompt_completion", "chat"]
LossOn = Literal["auto", "all", "completion"]
# The fields that make a layout, the first that fits. All but the last may be messages or text.
_LAYOUTS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"), ("text",))
_BESIDE = ("system", "tools", "input")
_OF_CHATS = ("system", "tools")  # of these
_OPTIONAL = (*_BESIDE, "role", "content")  # the last two are fields of a message
# What a table may call these, to guess a mapping by.
_WORDS = {
    "instruction": ("question", "query", "problem", "user", "task", "request"),
    "output": ("answer", "response", "solution", "assistant", "target", "reply", "completion"),
    "system": ("system_prompt", "system_message"),
}
_MESSAGE = {"role": ("role", "from"), "content": ("content", "value")}  # which need no mapping
# How Alpaca was trained, for tokenizers without a chat template.
_INSTRUCTION = "Below is an instruction that describes a task"
_WITH_INPUT = ", paired with an input that provides further context"
_RESPONSE = "Write a response that appropriately completes the request."


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The fields of your rows, where they have names of their own.

    Args:
        text: Plain text.
        prompt: Text, or messages, that ``completion`` follows.
        completion: What is to be learned, in the same form as ``prompt``.
        messages: A list of messages.
        role: Of a message: who speaks.
        content: Of a message: what is said.
        instruction: A request, which becomes the message of a user.
        input: What the request is about, if it is about something.
        output: The answer to it.
        system: A system message beside messages or an instruction.
        tools: The tools of a chat, as a list or its JSON.
    """

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None
    role: str | None = None
    content: str | None = None
    instruction: str | None = None
    input: str | None = None
    output: str | None = None
    system: str | None = None
    tools: str | None = None


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How rows are read.

    Args:
        format: ``auto`` decides row by row, by the fields there are; ``chat`` also makes pairs of strings one, and
            texts that are prompts.
        columns: What fields are called.
        loss_on: ``auto`` takes all of plain text, and completions of others; ``completion`` needs rows that have one.
        is_prompt: Rows are prompts to continue, not documents to learn.
    """

    format: Format = "auto"
    columns: Columns = Columns()
    loss_on: LossOn = "auto"
    is_prompt: bool = False

    def expand(self, rows: Iterable[Row]) -> Iterable[Row]:
        """Return the rows of which each becomes a document; several of one row have its ``where``."""
        return rows


@dataclass(frozen=True, kw_only=True)
class Text:
    """A document, or a prompt to continue."""

    text: str


@dataclass(frozen=True, kw_only=True)
class PromptCompletion:
    """A prompt and what should follow it."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Messages for a chat template.

    Args:
        messages: Each with ``role`` and ``content``.
        tools: That they may call.
        context: The numbers of answers that are read, not learned.
        plain: What it is for a tokenizer without a chat template, if it can be anything.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    context: frozenset[int] = frozenset()
    plain: Text | PromptCompletion | None = None


Example = Text | PromptCompletion | Chat


def parse_row(row: Row, row_format: RowFormat) -> Example:
    """Return what a row means; raise ``RowError`` with the reason if it was not read or does not fit the format."""
    if row.problem is not None:
        raise RowError(row.problem)
    fields = _name_fields(row.fields, row_format.columns)
    layout = _find_layout(fields, row_format)
    _refuse_unused(fields, layout, row_format)
    if _is_chat(fields, layout):
        return _parse_chat(fields, layout, row_format)
    if layout == "text" and row_format.format != "chat":
        text = Text(text=_get_text(fields, "text"))
        if row_format.loss_on == "completion" and not row_format.is_prompt:
            raise RowError("plain text has no completion; set loss_on: auto, or use prompt and completion")
        return text
    if layout == "instruction" or row_format.format == "chat":
        return _parse_instruction(fields, layout, row_format)
    if row_format.is_prompt:
        return Text(text=_get_text(fields, "prompt"))
    completion = _get_text(fields, "completion")
    return PromptCompletion(prompt=_get_text(fields, "prompt", may_be_empty=True), completion=completion)


def list_optional(columns: Columns) -> dict[str, str]:
    """Return the columns that the user has named and that not each row needs, by names of ours."""
    found = ((name, getattr(columns, name)) for name in _BESIDE)
    return {name: theirs for name, theirs in found if theirs is not None}


def list_unread(row: Row, row_format: RowFormat) -> list[str]:
    """Return which fields of a row that was parsed a chat would have read, but not a prompt with its completion."""
    if not any(row.fields.get(name) for name in _OF_CHATS):
        return []
    fields = _name_fields(row.fields, row_format.columns)
    layout = _find_layout(fields, row_format)
    places = _find_places(fields, layout, row_format)
    return [name for name in _OF_CHATS if layout != "text" and fields.get(name) and not places[name]]


def list_texts(example: Example) -> list[str]:
    """Return all that a person or model wrote in an example, to train a tokenizer on."""
    if isinstance(example, Text):
        return [example.text]
    if isinstance(example, PromptCompletion):
        return [example.prompt, example.completion]
    return [message.get("content") or "" for message in example.messages]


def _name_fields(fields: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return the fields of a row by the names of ours."""
    given = {name: theirs for name, theirs in asdict(columns).items() if theirs is not None}
    taken = {name: fields[theirs] for name, theirs in given.items() if theirs in fields}
    for name, theirs in given.items():
        if theirs not in fields and name not in _OPTIONAL:
            raise RowError(f'"{theirs}" is missing ({describe_fields(fields)}); set columns.{name}')
    return {name: value for name, value in fields.items() if name not in given.values()} | taken


def _find_layout(fields: Mapping[str, Any], row_format: RowFormat) -> str:
    """Return the first field of the layout that a row has."""
    kept: Sequence[tuple[str, ...]] = {
        "auto": _LAYOUTS,
        "text": _LAYOUTS[-1:],
        "prompt_completion": _LAYOUTS[2:4],
        "chat": _LAYOUTS if row_format.is_prompt else _LAYOUTS[:4],
    }[row_format.format]
    given = {name for name, theirs in asdict(row_format.columns).items() if theirs is not None}
    kept = sorted(kept, key=given.isdisjoint)  # what the user has named comes first
    # Parquet and data sets give every row all the fields that any row has.
    for present in ({name for name, value in fields.items() if value is not None}, set(fields)):
        for layout in kept:
            if present.issuperset(layout[:1] if row_format.is_prompt else layout):
                return layout[0]
    if present.issuperset(PAIR):
        raise RowError('"chosen" and "rejected" are a preference pair; PreferenceTuning and PreferenceData learn it')
    found = describe_fields(fields)
    if any(set(fields).issuperset(layout) for layout in _LAYOUTS):
        raise RowError(f"{found}, which format: {row_format.format} does not read; set format: auto")
    if "input_ids" in fields:
        raise RowError(f"{found}: rows of tokens are not read; name data with the text that they were made of")
    wanted = [layout[:1] if row_format.is_prompt else layout for layout in kept]
    known = ", ".join(" and ".join(layout) for layout in wanted)
    raise RowError(f"{found}: expected {known}; set columns, such as {suggest_columns(fields, wanted)}")


def _is_chat(fields: Mapping[str, Any], layout: str) -> bool:
    return layout in ("messages", "conversations") or (layout == "prompt" and isinstance(fields["prompt"], list))


def _find_places(fields: Mapping[str, Any], layout: str, row_format: RowFormat) -> dict[str, bool]:
    """Return of what may stand beside a layout whether it is read."""
    is_chat = _is_chat(fields, layout)
    is_instruction = layout == "instruction"
    has_system = is_chat or is_instruction or row_format.format == "chat"
    has_tools = has_system and (is_chat or row_format.format != "prompt_completion")
    return {"input": is_instruction, "system": has_system, "tools": has_tools}


def _refuse_unused(fields: Mapping[str, Any], layout: str, row_format: RowFormat) -> None:
    """Refuse a row whose layout has no place for what a column of the user's holds in it."""
    places = _find_places(fields, layout, row_format)
    for name, theirs in list_optional(row_format.columns).items():
        if not places[name] and fields.get(name):
            is_pair = layout in ("prompt", "instruction")
            kind = "a prompt with its completion" if is_pair else f"a row of {layout}"
            fix = "name instruction and output instead" if name == "input" else "set format: chat"
            raise RowError(f'columns.{name}: "{theirs}" has no place in {kind}; {fix}, or leave columns.{name} out')


def suggest_columns(fields: Mapping[str, Any], wanted: Sequence[tuple[str, ...]]) -> str:
    """Return a mapping that may be meant, as YAML: a wanted layout, if only the case of its names differs."""
    for name, value in fields.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            names = {name for known in _MESSAGE.values() for name in known}
            others = iter([key for key, text in value[0].items() if isinstance(text, str) and key not in names])
            asked = [ours for ours, known in _MESSAGE.items() if value[0].keys().isdisjoint(known)]
            of_message = [f"{ours}: {theirs}" for ours, theirs in zip(asked, others, strict=False)]
            return f"columns: {{{', '.join([f'messages: {name}', *of_message])}}}"
    in_any_case = {str(name).lower(): str(name) for name in fields}
    if same := next((layout for layout in wanted if in_any_case.keys() >= set(layout)), None):
        return f"columns: {{{', '.join(f'{ours}: {in_any_case[ours]}' for ours in same)}}}"
    texts = [str(name) for name, value in fields.items() if isinstance(value, str)] or [str(name) for name in fields]
    guess = {
        ours: next((name for name in texts if name.lower() in (ours, *words)), None) for ours, words in _WORDS.items()
    }
    rest = iter([name for name in texts if name not in guess.values()])
    if len(texts) < 2 or all(layout[0] != "instruction" for layout in wanted):
        return f"columns: {{text: {texts[0] if texts else '...'}}}"
    guess = {ours: name or (None if ours == "system" else next(rest, None)) for ours, name in guess.items()}
    guess["input"] = next((name for name in rest if name.lower() in ("input", "context")), None)
    return f"columns: {{{', '.join(f'{ours}: {name}' for ours, name in guess.items() if name)}}}"


def describe_fields(fields: Mapping[str, Any]) -> str:
    """Return which fields a row has, for an error."""
    return f"the row has: {', '.join(map(str, fields)) or 'no fields'}"


def _get_text(fields: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise RowError(f'"{name}" must be a string, it is {describe(value)}')
    if not may_be_empty and not value.strip():
        raise RowError(f'"{name}" is empty; remove the row or set bad_rows: skip')
    return value


def _parse_chat(fields: Mapping[str, Any], layout: str, row_format: RowFormat) -> Chat:
    names = MessageFields(role=row_format.columns.role, content=row_format.columns.content)
    messages, context = parse_messages(fields[layout], layout, names)
    if layout == "prompt" and not row_format.is_prompt:
        answers, skipped = parse_messages(fields["completion"], "completion", names)
        context = frozenset(range(len(messages))) | {len(messages) + number for number in skipped}
        messages += answers
    if system := _get_system(fields, messages):
        messages, context = [*system, *messages], frozenset(number + 1 for number in context)
    last = messages[-1]["role"]
    if row_format.is_prompt and last == "assistant":
        raise RowError("the last message is by the assistant; a prompt must end before its answer")
    if not row_format.is_prompt and row_format.loss_on != "all":
        if last != "assistant":
            needs = f"loss_on: {row_format.loss_on} needs the assistant's answer last"
            raise RowError(f'the last message is by "{last}"; {needs}; or set loss_on: all')
        if all(n in context for n, message in enumerate(messages) if message["role"] == "assistant"):
            raise RowError("all answers have the weight 0, so nothing is learned; remove the row or set bad_rows: skip")
    return Chat(messages=messages, tools=parse_tools(fields.get("tools")), context=context)


def _parse_instruction(fields: Mapping[str, Any], layout: str, row_format: RowFormat) -> Example:
    """Return a request with its answer: a chat, or the text that Alpaca made of it."""
    request = _get_text(fields, layout)
    about = get_input(fields) if layout == "instruction" else ""
    question = {"role": "user", "content": f"{request}\n{about}" if about else request}
    earlier = _read_history(fields.get("history")) if layout == "instruction" else []
    messages = [*_get_system(fields, []), *earlier, question]
    head = f"{_INSTRUCTION}{_WITH_INPUT if about else ''}. {_RESPONSE}\n\n### Instruction:\n{request}\n\n"
    prompt = f"{head}### Input:\n{about}\n\n### Response:\n" if about else f"{head}### Response:\n"
    plain: Text | PromptCompletion = Text(text=prompt)
    if not row_format.is_prompt:
        answer = _get_text(fields, "output" if layout == "instruction" else "completion")
        messages.append({"role": "assistant", "content": answer})
        plain = PromptCompletion(prompt=prompt, completion=answer)
    if row_format.format == "prompt_completion":
        if messages[0] is not question:
            raise RowError("a system message or history has no place in a prompt; set format: chat")
        return plain
    is_single = row_format.format == "auto" and len(messages) <= 2 and messages[0] is question
    return Chat(messages=messages, tools=parse_tools(fields.get("tools")), plain=plain if is_single else None)


def get_input(fields: Mapping[str, Any]) -> str:
    """Return what a request is about, the field ``input``; nothing where there is nothing.

    Raises:
        RowError: It is no text.
    """
    if fields.get("input") is None:
        return ""
    about = _get_text(fields, "input", may_be_empty=True)
    return about if about.strip() else ""


def _read_history(turns: object) -> list[dict[str, Any]]:
    """Return the questions and answers before an instruction, as messages."""
    if not turns:
        return []
    if not isinstance(turns, list) or not all(
        isinstance(turn, Sequence) and len(turn) == 2 and all(isinstance(text, str) for text in turn) for turn in turns
    ):
        raise RowError(f'"history" must be a list of a question and its answer each, it is {describe(turns)}')
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


def _get_system(fields: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the system message that a row has beside its messages."""
    text = fields.get("system")
    if text is None or text == "":
        return []
    own = {"role": "system", "content": _get_text(fields, "system", may_be_empty=True)}
    if not messages or messages[0]["role"] != "system":
        return [own]
    if messages[0].get("content") != own["content"]:
        raise RowError('"system" is not what message 1, of the system, says; remove one of them')
    return []
