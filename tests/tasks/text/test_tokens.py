import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learned_tokens import learned

from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.rows import Chat, Example, PromptCompletion, RowFormat, Text
from lit_fsdp.tasks.text.tokenizer import TrainTokenizer, train_tokenizer
from lit_fsdp.tasks.text.tokens import LEARN, TOKENS, Encoded, Encoder, TokenStore, TokenWriter

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}"
)
FORGETFUL = "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else 'gone' }}\n{% endfor %}"
EITHER = "{% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}"
NEEDS_ID = "{% if call.id | length != 9 %}{{ raise_exception('no id') }}{% endif %}{{ c.arguments | tojson }}"
NEEDS_NAME = "{% if c.name != 'add' %}{{ raise_exception('no such tool') }}{% endif %}{{ c.arguments | tojson }}"
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


def train_spaced(kind: str) -> Any:
    """Return a tokenizer that puts a space before each text; all but "byte level" are as those of SentencePiece."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    texts = ["The", "capital", "of", "France", "is", "Paris.", "It", "is", "so.", "1+1=2", "2=2", "=2"]
    parts: dict[str, Any] = {"show_progress": False, "special_tokens": ["<unk>", "<s>", "</s>"]}
    if kind == "byte level":
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
        parts["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    else:
        inner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        parts["initial_alphabet"] = ["▁"]
        parts["special_tokens"] += [f"<0x{byte:02X}>" for byte in range(256)]
        if kind == "prepend":
            inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        inner.decoder = decoders.Sequence(spaces)
    inner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=320, **parts))
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["prepend", "always", "first", "never", "byte level"])
@pytest.mark.parametrize("is_instruction", [False, True])
def test_no_space_comes_between_a_prompt_and_its_completion(kind: str, is_instruction: bool) -> None:
    tokenizer = train_spaced(kind)
    assert tokenizer.tokenize("is") == {"never": ["is"], "byte level": ["Ġis"]}.get(kind, ["▁is"])
    texts = [("The capital is", " Paris."), ("1+1=", "2"), ("It", "'s"), ("It ", "is"), ("It:\n", "  so"), ("A", "é😀")]
    for prompt, completion in [*texts, ("", "Paris."), ("1\n", "\n</s>")]:
        pair = PromptCompletion(prompt=prompt, completion=completion)
        encoded = encode(tokenizer, Chat(messages=CHAT.messages, plain=pair) if is_instruction else pair)
        begin = encoded.learn.index(True)
        assert encoded.learn == [False] * begin + [True] * (len(encoded.ids) - begin)
        assert encoded.ids[:begin] == ([1] if not prompt else tokenizer(prompt)["input_ids"])
        whole = tokenizer.decode(encoded.ids, clean_up_tokenization_spaces=False).removeprefix("<s>")
        assert whole.lstrip(" ") == f"{prompt}{completion}</s>"
        assert encode(tokenizer, pair, loss_on="all").ids == encoded.ids
    joint = tokenizer("The capital is Paris.")["input_ids"]
    assert encode(tokenizer, PromptCompletion(prompt="The capital is", completion=" Paris.")).ids == [*joint, 2]


def test_a_tokenizer_that_drops_what_it_does_not_know_loses_no_word_of_a_completion() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.train_from_iterator(["hello world"], trainers.BpeTrainer(vocab_size=60, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    encoded = encode(tokenizer, PromptCompletion(prompt="hello", completion="world"))
    learned_ids = [token for token, is_learned in zip(encoded.ids, encoded.learn, strict=True) if is_learned]
    assert tokenizer.decode(learned_ids).replace(" ", "").strip("▁") == "world"


def test_completions_of_other_tokenizers_are_tokens_of_their_own(tokenizer: Any) -> None:
    encoded = encode(tokenizer, PromptCompletion(prompt="What is t", completion="wo?"))
    assert encoded.ids == [token for text in ("What is t", "wo?") for token in tokenizer(text)["input_ids"]] + [0]
    assert encoded.ids != tokenizer("What is two?<|endoftext|>")["input_ids"]


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
        (
            MARKED.replace("{{ m.content }}</s>{% endgen", "{% endgen"),
            "marks nothing in the answers .*; set bad_rows: skip",
        ),
        (REFUSING, "chat template refuses it: roles must alternate"),
    ],
)
def test_a_template_that_cannot_do_it_is_refused(tokenizer: Any, template: str | None, reason: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(RowError, match=reason):
        encode(tokenizer, CHAT, loss_on="completion")


def test_marks_around_an_answer_that_the_template_leaves_out_are_refused(tokenizer: Any) -> None:
    """Its end alone would be learned, such as that of a call of a tool which the template does not know."""
    tokenizer.chat_template = MARKED
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(RowError, match=r"the chat template leaves out message 2, an answer; set bad_rows: skip"):
        encode(tokenizer, Chat(messages=[CHAT.messages[0], called, *CHAT.messages[2:]]))


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 100 is below 258"):
        TrainTokenizer(vocab_size=100)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_that_are_context_are_read_and_not_learned(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    chat = Chat(messages=CHAT.messages, context=frozenset({1}))
    encoded = encode(tokenizer, chat)
    assert encoded.ids == encode(tokenizer, CHAT).ids
    assert [text.rstrip() for text in learned(tokenizer, encoded)] == ["One more than two.</s>"]


def test_an_instruction_is_a_text_for_a_tokenizer_without_a_template(tokenizer: Any) -> None:
    pair = PromptCompletion(prompt="What is two?", completion=" One more.")
    chat = Chat(messages=CHAT.messages, plain=pair)
    assert tokenizer.chat_template is None
    assert encode(tokenizer, chat) == encode(tokenizer, pair)
    tokenizer.chat_template = PLAIN
    assert encode(tokenizer, chat) == encode(tokenizer, CHAT)


@pytest.mark.parametrize(
    ("arguments", "given", "shown"),
    [
        ("{{ c.arguments | tojson }}", '{"a":1}', '{"a": 1}'),
        (EITHER, '{"a":1}', '{"a":1}'),
        ("{{ '' + c.arguments }}", '{"a":1}', '{"a":1}'),  # which takes no objects
        ("{{ c.arguments | tojson }}", {"a": 1}, '{"a": 1}'),
        (EITHER, {"a": 1}, '{"a": 1}'),
        ("{{ '' + c.arguments }}", {"a": 1}, '{"a": 1}'),
        ("{{ c.arguments }}", {"a": 1}, '{"a": 1}'),  # or it were what Python writes
        (NEEDS_ID, '{"a":1}', '{"a": 1}'),
        (NEEDS_ID, {"a": 1}, '{"a": 1}'),
        (NEEDS_NAME, {"a": 1}, '{"a": 1}'),
    ],
)
def test_arguments_of_calls_are_json_once_whatever_a_template_takes(
    tokenizer: Any, arguments: str, given: Any, shown: str
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for call in m.tool_calls | default([]) %}{% set c = call.function %}" + arguments + "{% endfor %}</s>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    calls = [{"type": "function", "id": "123456789", "function": {"name": "add", "arguments": given}}]
    chat = Chat(messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}])
    encoded = encode(tokenizer, chat)
    assert tokenizer.decode(encoded.ids) == f"<user>?</s><assistant>{shown}</s>"
    assert learned(tokenizer, encoded) == [f"{shown}</s>"]


def test_learned_tokens_are_counted_in_parts(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3, 1, 7, 2, 40, 5]
    with TokenWriter(tmp_path) as writer:
        for length in lengths:
            writer.add(Encoded(ids=[1] * length, learn=[n % 2 == 0 for n in range(length)]))
        writer.finish()
    store = TokenStore(tmp_path)
    for most in (1, 8, 1000):
        monkeypatch.setattr("lit_fsdp.tasks.text.tokens._COUNTED_AT_ONCE", most)
        assert store.count_learned(np.arange(6)) == sum(-(-length // 2) for length in lengths)
        assert store.count_learned(np.array([4, 0])) == 20 + 2
        assert store.count_learned(np.array([4, 0]), longest=5) == 3 + 2


def test_counting_learned_tokens_takes_no_memory_for_each(tmp_path: Path) -> None:
    num = 1 << 25
    with TokenWriter(tmp_path) as writer:
        np.zeros(num, dtype=np.int32).tofile(tmp_path / TOKENS)
        np.ones(num, dtype=np.bool_).tofile(tmp_path / LEARN)
        writer._ends = list(range(1 << 15, num + 1, 1 << 15))
        writer.finish()
    store = TokenStore(tmp_path)
    tracemalloc.start()
    assert store.count_learned(np.arange(len(store))) == num
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * num
