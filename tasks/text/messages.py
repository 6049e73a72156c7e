"""Messages of a chat, in the layouts that data sets have them: OpenAI's, ShareGPT's, and fields that a user names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lit_fsdp.tasks.row_files import describe, parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
# What ShareGPT and its descendants call them.
_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
}
_CALL = "function_call"  # a role of its own there: the assistant calls a tool


class RowError(ValueError):
    """What is wrong with one row, without saying which; whoever reads the rows adds file and line."""


@dataclass(frozen=True, kw_only=True)
class MessageFields:
    """The fields of a message.

    Args:
        role: Who speaks; ``role``, or ``from`` where there is none, if not given.
        content: What is said; ``content``, or ``value`` where there is none, if not given.
    """

    role: str | None = None
    content: str | None = None


def parse_messages(value: object, name: str, fields: MessageFields) -> tuple[list[dict[str, Any]], frozenset[int]]:
    """Return messages as chat templates take them, and the numbers of answers that are kept from loss.

    Those have the ``weight`` 0 or, as axolotl writes it, ``train: false``.

    Args:
        value: What a row has.
        name: The field it has it in.
        fields: How a message calls its role and content.

    Raises:
        RowError: It is no list of messages, or one of them cannot be read.
    """
    if not isinstance(value, list):
        raise RowError(f'"{name}" must be a list, it is {describe(value)}')
    if not value:
        raise RowError(f'"{name}" is empty; remove the row or set bad_rows: skip')
    parsed = [_parse_message(number, message, fields) for number, message in enumerate(value, start=1)]
    for message in parsed:
        if isinstance(message.get("train"), bool):
            message.setdefault("weight", int(message.pop("train")))
    weights = [message.pop("weight", 1) for message in parsed]
    for number, weight in enumerate(weights, start=1):
        if isinstance(weight, bool) or weight not in (0, 1):
            raise RowError(f"message {number} has the weight {weight!r}: expected 0 or 1")
    return parsed, frozenset(number for number, weight in enumerate(weights) if weight == 0)


def parse_tools(value: object) -> list[Any] | None:
    """Return the tools of a chat, which tables hold as JSON text; none if there are none.

    Raises:
        RowError: It is no list.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value)
        except json.JSONDecodeError as error:
            raise RowError(f'"tools" is not valid JSON: {error.msg} at column {error.colno}') from None
    if not value:
        return None
    if not isinstance(value, list):
        raise RowError(f'"tools" must be a list, it is {describe(value)}')
    return value


def parse_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the arguments of calls, which OpenAI has as JSON text, as objects; other text stays."""

    def parse(arguments: Any) -> Any:
        try:
            value = parse_json(arguments) if isinstance(arguments, str) else None
        except json.JSONDecodeError:
            return arguments
        return value if isinstance(value, dict) else arguments

    return _change_arguments(messages, parse)


def write_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the arguments of calls as JSON text, where they are objects."""
    return _change_arguments(messages, lambda a: json.dumps(a, ensure_ascii=False) if isinstance(a, dict) else a)


def _change_arguments(messages: list[dict[str, Any]], change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    def change_call(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": change_call(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call

    return [
        {**message, "tool_calls": [change_call(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _parse_message(number: int, message: object, fields: MessageFields) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RowError(f"message {number} must be an object with role and content, it is {describe(message)}")
    # Parquet gives every message all the keys that any message has.
    message = {name: value for name, value in message.items() if value is not None}
    names = [
        fields.role or ("role" if "role" in message or "from" not in message else "from"),
        fields.content or ("content" if "content" in message or "value" not in message else "value"),
    ]
    role, content = (message.pop(name, None) for name in names)
    if role == _CALL:
        return {**message, "role": "assistant", "tool_calls": _parse_calls(number, content)}
    known = _ALIASES.get(role, role) if isinstance(role, str) else role
    if known not in ROLES:
        has = "" if role is not None else f" (it has: {', '.join(map(str, message)) or 'no fields'})"
        raise RowError(f"message {number} has the role {role!r}{has}; known are {', '.join(ROLES)}")
    if content is None and "tool_calls" in message:
        return {"role": known, **message}
    return {"role": known, "content": _read_content(number, content, names[1]), **message}


def _read_content(number: int, content: object, name: str) -> str:
    if isinstance(content, list) and content:  # OpenAI's parts
        kinds = [part.get("type") if isinstance(part, Mapping) else part for part in content]
        if other := [kind for kind in kinds if kind != "text"]:
            raise RowError(f'message {number}: "{name}" has a part of type {other[0]!r}: only text is learned')
        texts = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    if not isinstance(content, str):
        raise RowError(f'message {number}: "{name}" must be a string, it is {describe(content)}')
    return content


def _parse_calls(number: int, content: object) -> list[dict[str, Any]]:
    try:
        calls = parse_json(content) if isinstance(content, str) else content
    except json.JSONDecodeError:
        calls = None
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list) or not all(isinstance(c, Mapping) and "name" in c for c in calls) or not calls:
        raise RowError(
            f'message {number}: a {_CALL} must be like {{"name": "...", "arguments": {{...}}}}, '
            f"it is {describe(content)}"
        )
    return [{"type": "function", "function": dict(call)} for call in calls]
