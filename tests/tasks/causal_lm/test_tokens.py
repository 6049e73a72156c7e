from typing import Any

import pytest
from learned_tokens import learned

from lit_fsdp.tasks.causal_lm.rows import Chat, Example, PromptCompletion, RowError, RowFormat, Text
from lit_fsdp.tasks.causal_lm.tokenizer import TrainTokenizer, train_tokenizer
from lit_fsdp.tasks.causal_lm.tokens import Encoded, Encoder

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}"
)
FORGETFUL = "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else 'gone' }}\n{% endfor %}"
REFUSING = "{{ raise_exception('roles must alternate') }}"

CHAT = Chat(
    messages=[
        {"role": "user", "content": "What is two?"},
        {"role": "assistant", "content": "One more than one."},
        {"role": "user", "content": "And three?"},
        {"role": "assistant", "content": "One more than two."},
    ]
)


@pytest.fixture
def tokenizer() -> Any:
    return train_tokenizer(
        ["What is two? One more than one. And three? One more than two."], TrainTokenizer(vocab_size=300)
    )


def encode(tokenizer: Any, example: Example, **row_format: Any) -> Encoded:
    (encoded,) = Encoder(tokenizer, RowFormat(**row_format)).encode([example])
    if isinstance(encoded, RowError):
        raise encoded
    return encoded


def test_documents_end_with_the_end_token_and_prompts_do_not(tokenizer: Any) -> None:
    text = Text(text="What is two?")
    encoded = encode(tokenizer, text)
    assert tokenizer.decode(encoded.ids) == "What is two?<|endoftext|>"
    assert all(encoded.learn)
    assert encode(tokenizer, text, is_prompt=True).ids == encoded.ids[:-1]


def test_a_tokenizer_that_begins_and_ends_texts_itself_ends_them_once(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A <|endoftext|>", special_tokens=[("<|pad|>", 1), ("<|endoftext|>", 0)]
    )
    assert tokenizer.decode(encode(tokenizer, Text(text="two?")).ids) == "<|pad|>two?<|endoftext|>"


@pytest.mark.parametrize("row_format", [{}, {"loss_on": "completion"}])
def test_the_completion_and_the_end_token_are_learned_unless_all_shall_be(
    tokenizer: Any, row_format: dict[str, Any]
) -> None:
    pair = PromptCompletion(prompt="What is two?", completion=" One more than one.")
    assert learned(tokenizer, encode(tokenizer, pair, **row_format)) == [" One more than one.<|endoftext|>"]
    assert all(encode(tokenizer, pair, loss_on="all").learn)


@pytest.mark.parametrize("row_format", [{}, {"loss_on": "completion"}])
@pytest.mark.parametrize(("template", "end"), [(PLAIN, "</s>\n"), (MARKED, "</s>")])
def test_what_the_assistant_says_is_learned_and_its_end(
    tokenizer: Any, template: str, end: str, row_format: dict[str, Any]
) -> None:
    tokenizer.chat_template = template
    encoded = encode(tokenizer, CHAT, **row_format)
    assert learned(tokenizer, encoded) == [f"One more than one.{end}", f"One more than two.{end}"]
    assert tokenizer.decode(encoded.ids) == tokenizer.apply_chat_template(CHAT.messages, tokenize=False)
    assert all(encode(tokenizer, CHAT, loss_on="all").learn)


def test_a_chat_prompt_ends_with_the_cue_for_an_answer(tokenizer: Any) -> None:
    tokenizer.chat_template = PLAIN
    encoded = encode(tokenizer, Chat(messages=CHAT.messages[:3]), is_prompt=True)
    assert tokenizer.decode(encoded.ids).endswith("And three?</s>\n<assistant>")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "the tokenizer has no chat template"),
        (FORGETFUL, "leaves out message 2, an answer; set bad_rows: skip"),
        (REFUSING, "chat template refuses it: roles must alternate"),
    ],
)
def test_a_template_that_cannot_do_it_is_refused(tokenizer: Any, template: str | None, reason: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(RowError, match=reason):
        encode(tokenizer, CHAT, loss_on="completion")


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 100 is below 258"):
        TrainTokenizer(vocab_size=100)
