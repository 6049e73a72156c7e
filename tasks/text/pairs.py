"""Pairs of a chosen and a rejected completion of a prompt, as rows for preferences and for reward models have them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from lit_fsdp.tasks.row_files import describe
from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.rows import PAIR, describe_fields, get_input

# Where the prompt of a pair may be, the first that a row has.
_PROMPTS = ("prompt", "messages", "conversations")
_OPTIONAL = (*_PROMPTS, "system", "tools")
# What a table may call a prompt; a row with one of these is not read without it.
QUESTIONS = ("question", "query", "instruction", "input")


def name_fields(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a row by the names of ours.

    Args:
        fields: What the row has.
        names: The fields that the user has named, by the names of ours.

    Raises:
        RowError: One that each row needs is missing.
    """
    for ours, theirs in names.items():
        if theirs not in fields and ours not in _OPTIONAL:
            raise RowError(f'"{theirs}" is missing ({describe_fields(fields)}); set columns.{ours}')
    rest = {name: value for name, value in fields.items() if name not in names.values()}
    # A prompt that the user has named comes before those of other names.
    rest = {n: v for n, v in rest.items() if "prompt" not in names or n not in _PROMPTS}
    named = {ours: fields[theirs] for ours, theirs in names.items() if theirs in fields}
    # As beside an instruction of TextData.
    if names.get("prompt") == "instruction" and isinstance(named["prompt"], str) and (about := get_input(rest)):
        named["prompt"] = f"{named['prompt']}\n{about}"
    return rest | named


def split_pair(fields: Mapping[str, Any], *, needs_prompt: bool = True) -> list[dict[str, Any]]:
    """Return the rows of the chosen and of the rejected completion, each with the prompt before it.

    Args:
        fields: Of the pair, from ``name_fields``.
        needs_prompt: Without one, take what both begin with; else both are whole texts or chats then.

    Raises:
        RowError: They are no pair, or what may be their prompt would not be read.
    """
    chosen, rejected = (_get_completion(fields, name) for name in PAIR)
    if type(chosen) is not type(rejected):
        raise RowError(f'"chosen" is {describe(chosen)} and "rejected" {describe(rejected)}: expected the same form')
    if chosen == rejected:
        raise RowError('"chosen" and "rejected" are the same; remove the row or set bad_rows: skip')
    prompt, rest = get_prompt(fields), keep_rest(fields)
    if prompt is None:
        _refuse_unread_prompt(fields, chosen, rejected)
    if prompt is None and not needs_prompt:
        if isinstance(chosen, list):
            return [{**rest, "messages": messages} for messages in (chosen, rejected)]
        prompt = ""
    prompt, *completions = _part(prompt, chosen, rejected)
    return [{**rest, "prompt": prompt, "completion": completion} for completion in completions]


def get_prompt(fields: Mapping[str, Any]) -> Any:
    """Return the prompt of a row, as text or as a list of messages, or ``None``."""
    return wrap_message(next((fields[name] for name in _PROMPTS if fields.get(name) not in (None, "")), None))


def wrap_message(value: Any) -> Any:
    """Return a single message as a list of messages; all else as it is."""
    return [value] if isinstance(value, Mapping) else value


def keep_rest(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands beside a prompt and its completions, such as ``tools``."""
    return {name: value for name, value in fields.items() if name not in (*_PROMPTS, *PAIR, "completion", "label")}


def _get_completion(fields: Mapping[str, Any], name: str) -> Any:
    value = wrap_message(fields[name])
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise RowError(f'"{name}" is empty; remove the row or set bad_rows: skip')
    if not isinstance(value, str | list):
        raise RowError(f'"{name}" is {describe(value)}: expected text, or messages')
    return value


def _refuse_unread_prompt(fields: Mapping[str, Any], chosen: Any, rejected: Any) -> None:
    """Refuse a pair whose question has a name that is not read: what is left of it would still train.

    Not where both answers begin with the question, or with more of a chat than its system message.
    """
    found = next((n for name in QUESTIONS for n in fields if str(n).lower() == name and fields[n]), None)
    if isinstance(chosen, list):
        is_read = any(_get_role(message) != "system" for message in _find_shared(chosen, rejected))
    else:
        is_read = found is not None and str(fields[found]).strip() in "".join(_find_shared(chosen, rejected))
    if found is not None and not is_read:
        raise RowError(
            f'"{found}" beside "chosen" and "rejected" is not read; set columns: {{prompt: {found}}}, or remove it'
        )


def _find_shared(chosen: Any, rejected: Any) -> list[Any]:
    """Return what both begin with, characters or messages."""
    return [one for one, _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))]


def _get_role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _part(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return the prompt and both completions, without a prompt that each of them repeats."""
    if prompt is not None and isinstance(prompt, list) == isinstance(chosen, list):
        # Some data sets repeat the prompt in front of both.
        repeats = isinstance(prompt, list) and chosen[: len(prompt)] == prompt == rejected[: len(prompt)]
        return (prompt, chosen[len(prompt) :], rejected[len(prompt) :]) if repeats else (prompt, chosen, rejected)
    if isinstance(prompt, list):
        raise RowError(f'the prompt is a list of messages and "chosen" is {describe(chosen)}: expected the same form')
    # As UltraFeedback: whole chats, beside the text of their first message.
    num_shared = len(_find_shared(chosen, rejected))
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
