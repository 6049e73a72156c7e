"""Rows of data, and what they mean: plain text, a prompt with its completion, or a chat."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lit_fsdp.tasks.row_files import Row, describe

Format = Literal["auto", "text", "prompt_completion", "chat"]
LossOn = Literal["auto", "all", "completion"]
ROLES = ("system", "developer", "user", "assistant", "tool")


class RowError(ValueError):
    """What is wrong with one row, without saying which; whoever reads the rows adds file and line."""


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How rows are read.

    Args:
        format: ``auto`` decides row by row: ``messages`` makes a chat, ``prompt`` and ``completion`` together
            a pair, anything else must be plain text.
        text_field: The field that holds plain text.
        loss_on: ``auto`` takes all of plain text, and completions of others; ``completion`` needs rows that have one.
        is_prompt: Rows are prompts to continue, not documents to learn.
    """

    format: Format = "auto"
    text_field: str = "text"
    loss_on: LossOn = "auto"
    is_prompt: bool = False


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
    """Messages for a chat template, and the tools that they may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


Example = Text | PromptCompletion | Chat


def parse_row(row: Row, row_format: RowFormat) -> Example:
    """Return what a row means; raise ``RowError`` with the reason if it was not read or does not fit the format."""
    if row.problem is not None:
        raise RowError(row.problem)
    fields = row.fields
    kind = _get_kind(fields) if row_format.format == "auto" else row_format.format
    if kind == "chat":
        return _parse_chat(fields, row_format)
    if row_format.is_prompt:
        name = "prompt" if kind == "prompt_completion" or "prompt" in fields else row_format.text_field
        return Text(text=_get_text(fields, name))
    if kind == "prompt_completion":
        completion = _get_text(fields, "completion")
        return PromptCompletion(prompt=_get_text(fields, "prompt", may_be_empty=True), completion=completion)
    text = Text(text=_get_text(fields, row_format.text_field))
    if row_format.loss_on == "completion":
        raise RowError("plain text has no completion; set loss_on: auto, or use prompt and completion")
    return text


def list_texts(example: Example) -> list[str]:
    """Return all that a person or model wrote in an example, to train a tokenizer on."""
    if isinstance(example, Text):
        return [example.text]
    if isinstance(example, PromptCompletion):
        return [example.prompt, example.completion]
    return [message.get("content") or "" for message in example.messages]


def _get_kind(fields: Mapping[str, Any]) -> Format:
    if "messages" in fields:
        return "chat"
    return "prompt_completion" if "prompt" in fields and "completion" in fields else "text"


def _get_text(fields: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    if name not in fields:
        has = ", ".join(map(str, fields)) or "no fields"
        raise RowError(f'"{name}" is missing (the row has: {has}); set text_field or format')
    value = fields[name]
    if not isinstance(value, str):
        raise RowError(f'"{name}" must be a string, it is {describe(value)}')
    if not may_be_empty and not value.strip():
        raise RowError(f'"{name}" is empty; remove the row or set bad_rows: skip')
    return value


def _parse_chat(fields: Mapping[str, Any], row_format: RowFormat) -> Chat:
    if "messages" not in fields:
        has = ", ".join(map(str, fields)) or "no fields"
        raise RowError(f'"messages" is missing (the row has: {has}); set format')
    messages = fields["messages"]
    if not isinstance(messages, list):
        raise RowError(f'"messages" must be a list, it is {describe(messages)}')
    if not messages:
        raise RowError('"messages" is empty; remove the row or set bad_rows: skip')
    parsed = [_parse_message(number, message) for number, message in enumerate(messages, start=1)]
    last = parsed[-1]["role"]
    if row_format.is_prompt and last == "assistant":
        raise RowError("the last message is by the assistant; a prompt must end before its answer")
    if not row_format.is_prompt and row_format.loss_on != "all" and last != "assistant":
        needs = f"loss_on: {row_format.loss_on} needs the assistant's answer last"
        raise RowError(f'the last message is by "{last}"; {needs}; or set loss_on: all')
    return Chat(messages=parsed, tools=fields.get("tools") or None)


def _parse_message(number: int, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(f"message {number} must be an object with role and content, it is {describe(message)}")
    # Parquet gives every message all the keys that any message has.
    message = {name: value for name, value in message.items() if value is not None}
    if message.get("role") not in ROLES:
        raise RowError(f"message {number} has the role {message.get('role')!r}; known are {', '.join(ROLES)}")
    if "content" not in message and "tool_calls" in message:
        return message
    if not isinstance(message.get("content"), str):
        raise RowError(f'message {number}: "content" must be a string, it is {describe(message.get("content"))}')
    return message
