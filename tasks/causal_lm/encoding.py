"""From examples to tokens, and which of them are to be learned."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lit_fsdp.tasks.causal_lm.answers import Render, TurnMarkers, find_answers, read_turn_markers
from lit_fsdp.tasks.causal_lm.examples import Chat, Example, PromptCompletion, RowError, RowFormat, Text

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The tokens of one document.

    Args:
        ids: Token ids.
        learn: For each token whether loss is taken on it.
    """

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
        self._start = _find_start(tokenizer)
        self._end = [int(tokenizer.eos_token_id)]
        self._markers: dict[bool, TurnMarkers] = {}  # a tokenizer may have a template of its own for tools

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """Return tokens, or what is wrong, for each example. Many at once are faster: all cores work."""
        texts: list[str] = []
        for example in examples:
            if isinstance(example, Text):
                texts.append(example.text)
            elif isinstance(example, PromptCompletion):
                texts += [example.prompt, example.completion]
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
        completion = [*next(ids), *self._end]
        learn_prompt = self.row_format.loss_on == "all"
        return Encoded(ids=prompt + completion, learn=[learn_prompt] * len(prompt) + [True] * len(completion))

    def _encode_chat(self, chat: Chat) -> Encoded:
        if self.tokenizer.chat_template is None:
            raise RowError(
                "a chat, but the tokenizer has no chat template; set chat_template, or tokenizer to that of "
                "a chat model"
            )
        if self.row_format.loss_on == "all" or self.row_format.is_prompt:
            text = self._render(chat, chat.messages, add_generation_prompt=self.row_format.is_prompt)
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return Encoded(ids=ids, learn=[True] * len(ids))
        if not self.tokenizer.is_fast:
            raise RowError("only a fast tokenizer can find the answers' tokens; set loss_on: all")
        with _template_errors():
            template = self.tokenizer.get_chat_template(tools=chat.tools)
        return self._encode_marked(chat) if GENERATION_BLOCK.search(template) else self._encode_unmarked(chat)

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
        return Encoded(ids=out["input_ids"], learn=[bool(m) for m in out["assistant_masks"]])

    def _encode_unmarked(self, chat: Chat) -> Encoded:
        """Find the answers in the rendered chat, which is tokenized as one text."""
        render = partial(self._render, chat)
        whole = render(chat.messages)
        spans = find_answers(chat.messages, whole, render, self._find_markers(chat, render))
        out = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        is_answer = bytearray(len(whole))
        for begin, end in spans:
            is_answer[begin:end] = b"\1" * (end - begin)
        # A token may begin with the space before an answer.
        learn = [1 in is_answer[begin:end] for begin, end in out["offset_mapping"]]
        return Encoded(ids=out["input_ids"], learn=learn)

    def _find_markers(self, chat: Chat, render: Render) -> TurnMarkers:
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


def _find_start(tokenizer: Any) -> list[int]:
    """Return what the tokenizer puts before a text, such as ``<s>``; what it puts after is left out."""
    with_special = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    for begin in range(len(with_special) - len(plain) + 1):
        if with_special[begin : begin + len(plain)] == plain:
            return list(with_special[:begin])
    return []
