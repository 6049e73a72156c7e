"""Where the answers of the assistant are in a rendered chat, for chat templates that do not mark them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lit_fsdp.tasks.text.messages import RowError

Message = dict[str, Any]
Render = Callable[..., str]  # of messages; add_generation_prompt=True adds the cue for an answer
Span = tuple[int, int]

REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that Transformers knows
REMEDY = "set bad_rows: skip, loss_on: all, or chat_template to one with {% generation %} around answers"


@dataclass(frozen=True, kw_only=True)
class TurnMarkers:
    """What a template puts around every answer, and no answer is trained without.

    Args:
        cue: Ends a prompt, so that the model answers: what a template adds when asked to, else what follows a question.
        end: Ends an answer, up to its tokens if it has some: what makes the model stop. Empty where an answer lasts
            until the token that begins the next message.
        tokens: Matches the tokens that were added to the vocabulary.
        stops: Matches those of them that are special; ``</tool_call>`` is not.
        call: What stands between the cue and the name of a tool that is called; empty where the template knows none.
    """

    cue: str
    end: str
    tokens: re.Pattern[str]
    stops: re.Pattern[str]
    call: str


def read_turn_markers(render: Render, tokenizer: Any, question: list[Message]) -> TurnMarkers:
    """Ask a template for its markers, by a question and an answer.

    Args:
        render: Renders messages by the template.
        tokenizer: Of the template.
        question: Messages that an answer may follow; a template that refuses them raises ``RowError``.
    """
    added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
    tokens, stops = _match_any([t.content for t in added]), _match_any([t.content for t in added if t.special])
    mark = _choose_mark(str(question))
    question = _replace(question, len(question) - 1, _mark(question[-1], mark))
    without, prompt = render(question), render(question, add_generation_prompt=True)
    cue = prompt.removeprefix(without) if prompt.startswith(without) else ""
    rendered = render([*question, {"role": "assistant", "content": mark}])
    end = rendered.rpartition(mark)[2]
    if token := re.search(f"(?:{stops.pattern})+", end) or tokens.search(end):
        end = end[: token.end()]
    cue = cue or prompt.rpartition(mark)[2]
    call = _read_call(render, question, mark, _list_beginnings(cue, tokens))
    return TurnMarkers(cue=cue, end=end, tokens=tokens, stops=stops, call=call)


def _read_call(render: Render, question: list[Message], mark: str, cues: list[str]) -> str:
    """Return what a template puts between what is left of its cue and the name of a tool."""
    name = _choose_mark(mark + question[-1]["content"])
    call = {"type": "function", "id": "000000000", "function": {"name": name, "arguments": {}}}  # Mistral wants 9
    try:
        rendered = render([*question, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except RowError:  # of a template that knows no tools
        return ""
    before = rendered.partition(name)[0].rpartition(mark)[2] if name in rendered else ""
    return next((before.partition(cue)[2] for cue in cues if cue in before), "")


def find_answers(messages: list[Message], whole: str, render: Render, markers: TurnMarkers) -> list[Span]:
    """Return the place of each answer in the rendered chat: what the model is to generate, its end included.

    Each answer is replaced by a character that is found nowhere else, and what changes is where it stands. So it does
    not matter whether a template strips it, drops its reasoning once others follow, or renders the last one in another
    way, nor whether its text stands elsewhere, too.

    Args:
        messages: Of the chat.
        whole: These messages, rendered.
        render: Renders messages by the template.
        markers: Of the template.

    Raises:
        RowError: An answer is missing, or cannot be told from what is around it.
    """
    chat = _RenderedChat(messages, whole, render)
    spans: list[Span] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            floor = spans[-1][1] if spans else 0
            chat.check_answer(number, floor)
            spans.append((_find_begin(chat, number, floor, markers), _find_end(chat, number, markers)))
    return spans


def check_answers(messages: list[Message], whole: str, render: Render) -> None:
    """Refuse a chat of which a template that marks answers leaves one out: its mark would hold no more than its end.

    Args:
        messages: Of the chat.
        whole: These messages, rendered.
        render: Renders messages by the template.

    Raises:
        RowError: An answer is missing.
    """
    chat = _RenderedChat(messages, whole, render)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            chat.find_answer(number)


class _RenderedChat:
    """A rendered chat, and which part of it changes with a message."""

    def __init__(self, messages: list[Message], whole: str, render: Render) -> None:
        self.messages, self.whole, self.render = messages, whole, render
        self.mark = _choose_mark(whole)
        self._marked: dict[int, str] = {}

    def find_message(self, number: int) -> Span | None:
        """Return what changes with the words of a message, or nothing if the template leaves them out."""
        other = self._render_marked(number)
        return None if other == self.whole else _compare(self.whole, other, self.mark)

    def find_answer(self, number: int) -> Span:
        """Return what changes with the words of an answer.

        Raises:
            RowError: Nothing does.
        """
        span = self.find_message(number)
        if span is None:
            raise RowError(f"the chat template leaves out message {number + 1}, an answer; {REMEDY}")
        return span

    def check_answer(self, number: int, floor: int) -> None:
        """Make sure that an answer is there, once, after all before it, and changes nothing that follows."""
        span = self.find_answer(number)
        before = _find_neighbour(self, number - 1)
        message, other = self.messages[number], self._render_marked(number)
        changed = other[span[0] : len(other) - (len(self.whole) - span[1])].rstrip()
        is_once = bool(message.get("tool_calls")) or (
            changed.endswith(self.mark) and (other.count(self.mark) == 1 or any(map(message.get, REASONING)))
        )
        after = _find_neighbour(self, number + 1) if message.get("tool_calls") else None
        is_around = after is not None and span[0] <= after[0] < span[1]  # such as words below what the tool returns
        if not is_once or is_around or span[0] < max(floor, before[1] if before else 0):
            raise RowError(f"the chat template renders message {number + 1} in more than one place; {REMEDY}")

    def _render_marked(self, number: int) -> str:
        if number not in self._marked:
            message = _mark(self.messages[number], self.mark)
            self._marked[number] = self.render(_replace(self.messages, number, message))
        return self._marked[number]


def _find_begin(chat: _RenderedChat, number: int, floor: int, markers: TurnMarkers) -> int:
    """Return where the model goes on by itself: after the cue, or as much of it as is there."""
    begin, _ = chat.find_message(number) or (floor, floor)
    if chat.whole.endswith(markers.cue, floor, begin):
        return begin
    # Between cue and words the template has more, such as an empty <think>, or the cue has more than the template.
    before = _find_neighbour(chat, number - 1)
    floor = max(floor, before[1] if before else 0)
    for part in _list_beginnings(markers.cue, markers.tokens):
        place = chat.whole.rfind(part, floor, begin)
        if place >= 0:
            return place + len(part)
    if not chat.messages[number].get("tool_calls"):
        return begin
    # Of a call that follows what a tool returned, within the same turn.
    if markers.call and (place := chat.whole.find(markers.call, floor, begin)) >= 0:
        return place
    token = markers.tokens.search(chat.whole, floor, begin)
    return token.end() if token else begin


def _find_end(chat: _RenderedChat, number: int, markers: TurnMarkers) -> int:
    """Return where the model stops by itself: after the end of its turn."""
    span = chat.find_message(number)
    assert span is not None
    whole, (_, end) = chat.whole, span
    if markers.end and whole.startswith(markers.end, end):
        return end + len(markers.end)
    # Calls of tools are closed first, or end in another way than words.
    after = _find_neighbour(chat, number + 1)
    limit = len(whole) if after is None or after[0] < end else after[0]
    place = whole.find(markers.end, end, limit) if markers.end else -1
    if place >= 0:
        return place + len(markers.end)
    if token := markers.stops.search(whole, end, limit) or markers.tokens.search(whole, end, limit):
        return token.end()
    if not markers.end and number == len(chat.messages) - 1:
        return len(whole)
    # Of some templates only the last answer ends with a token.
    shortest = markers.end.rstrip()
    return end + len(shortest) if whole.startswith(shortest, end) else end


def _match_any(tokens: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _list_beginnings(cue: str, tokens: re.Pattern[str]) -> list[str]:
    """Return a cue, and what it begins with up to the end of a token or line, the longest first."""
    ends = [len(cue), *(cut.end() for cut in re.finditer(rf"{tokens.pattern}|\n", cue))]
    parts = {cue[:end] for end in ends} | {cue[:end].rstrip() for end in ends}
    return sorted(filter(str.strip, parts), key=len, reverse=True)


def _find_neighbour(chat: _RenderedChat, number: int) -> Span | None:
    if not 0 <= number < len(chat.messages):
        return None
    try:
        return chat.find_message(number)
    except RowError:  # a template that looks into what users say; then the bounds are wider
        return None


def _compare(whole: str, other: str, mark: str) -> Span:
    """Return the part of ``whole`` that is not in ``other``, which has ``mark`` in its place."""
    before, after = other.partition(mark)[0], other.rpartition(mark)[2]
    is_there = mark in other  # a template may write it in another way, such as \ue000
    begin = len(before) if is_there and whole.startswith(before) else _count_equal(whole, other)
    num_after = len(after) if is_there and whole.endswith(after) else _count_equal(whole[::-1], other[::-1])
    return begin, max(begin, len(whole) - num_after)


def _count_equal(first: str, second: str) -> int:
    """Return how many characters two texts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _choose_mark(text: str) -> str:
    """Return a character of the private use area that is not in a text."""
    return next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)


def _replace(messages: list[Message], number: int, message: Message) -> list[Message]:
    return [*messages[:number], message, *messages[number + 1 :]]


def _mark(message: Message, mark: str) -> Message:
    """Return a message with ``mark`` for all that was said, thought or handed to a tool.

    What is empty stays so, as templates ask for it, unless there is nothing else.
    """
    said = {name: mark for name in ("content", *REASONING) if str(message.get(name) or "").strip()}
    if calls := message.get("tool_calls"):
        return {**message, **said, "tool_calls": [_mark_call(call, mark) for call in calls]}
    return {**message, **(said or {"content": mark})}


def _mark_call(call: Any, mark: str) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _mark_call(call["function"], mark)}
    # Not its name, which a template may repeat beside what the tool returns. Nothing in place of something, where the
    # mark would share what stands around a value, such as <|"|> of Gemma 4, which is a token that ends nothing.
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return {**call, "arguments": mark}
    return {**call, "arguments": {} if arguments else {mark: mark}}
