from typing import Any

import pytest
from learned_tokens import learned

from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.rows import Chat, RowFormat
from lit_fsdp.tasks.text.tokenizer import TrainTokenizer, train_tokenizer
from lit_fsdp.tasks.text.tokens import Encoded, Encoder, find_turn_end

# Each has what matters here of the family that it is named after, in a few lines.
QWEN2 = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls %}{{ '\n' if m.content }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN3 = """\
{% set asked = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}
{% set asked.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip()
if '</think>' in m.content else m.reasoning_content | default('') %}
{%- if loop.last %}<think>
{{ thought }}
</think>

{% endif %}{{ m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA3 = """\
{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}<|eom_id|>
{%- else %}<|eot_id|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
GEMMA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{% set first, turns = messages[0].content + ' ', messages[1:] %}
{%- else %}{% set first, turns = '', messages %}{% endif %}
{% for m in turns %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ first if loop.first }}{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
MISTRAL = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}
{% set f = m.tool_calls[0].function %}
[TOOL_CALLS] [{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]{{ eos_token }}
{%- elif m.role == 'tool' %}
[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% else %}
 {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"""
DEEPSEEK = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}
<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|Assistant|><think>
{% endif %}"""
GEMMA4 = """\
{% for m in messages %}
{%- if m.role == 'tool' %}<|tool_response>response:add{value:<|"|>{{ m.content }}<|"|>}<tool_response|>
{%- else %}
{%- if not (m.role == 'assistant' and messages[loop.index0 - 1].role == 'tool') %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}{% endif %}
{%- for call in m.tool_calls %}<|tool_call>call:{{ call.function.name }}{
{%- for key, value in call.function.arguments | items %}{{ key }}:
{%- if value is string %}<|"|>{{ value }}<|"|>{% else %}{{ value }}{% endif %}{{ ',' if not loop.last }}{% endfor -%}
}<tool_call|>{% endfor %}{{ m.content }}{{- '<turn|>\\n' if not m.tool_calls }}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\\n' }}{% endif %}"""
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[/TOOL_RESULTS]", "<|User|>", "<|Assistant|>"),
)
END = "<|endoftext|>"
ENDS = {
    QWEN2: "<|im_end|>",
    QWEN3: "<|im_end|>",
    LLAMA3: "<|eot_id|>",
    GEMMA: "<end_of_turn>",
    MISTRAL: END,
    DEEPSEEK: END,
}
FAMILIES = [
    pytest.param(template, end, id=name)
    for name, (template, end) in zip(
        ("qwen2", "qwen3", "llama3", "gemma", "mistral", "deepseek"), ENDS.items(), strict=True
    )
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    trained = train_tokenizer(["What is two? One more than one. And three?"], TrainTokenizer(vocab_size=300))
    trained.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return trained


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def encode(tokenizer: Any, template: str, *messages: dict[str, Any]) -> Encoded:
    """Encode a chat; whatever is learned of it, it is what the tokenizer's own template makes of it."""
    tokenizer.chat_template = template
    (encoded,) = Encoder(tokenizer, RowFormat(loss_on="completion")).encode([Chat(messages=list(messages))])
    if isinstance(encoded, RowError):
        raise encoded
    assert encoded.ids == tokenizer.apply_chat_template(list(messages))["input_ids"]
    return encoded


def find_learned(tokenizer: Any, template: str, *messages: dict[str, Any]) -> list[str]:
    """The text of each run of learned tokens."""
    return learned(tokenizer, encode(tokenizer, template, *messages))


@pytest.mark.parametrize(("template", "end"), FAMILIES)
def test_every_answer_of_a_chat_is_learned_with_its_end_and_nothing_else(
    tokenizer: Any, template: str, end: str
) -> None:
    turns = [user("two?"), assistant("one more"), user("And three?"), assistant("than two")]
    learned = find_learned(tokenizer, template, *turns, user("thanks"), assistant("bye"))
    if template is QWEN3:
        learned[-1] = learned[-1].removeprefix("<think>\n\n</think>\n\n")
    # Mistral's prompt ends before the space, so the model has to say it.
    assert [text.removeprefix(" " if template is MISTRAL else "") for text in learned] == [
        f"one more{end}",
        f"than two{end}",
        f"bye{end}",
    ]
    assert find_turn_end(tokenizer) == tokenizer.convert_tokens_to_ids(end)


@pytest.mark.parametrize(("template", "end"), FAMILIES)
def test_only_the_answer_is_learned_of_texts_that_are_alike(tokenizer: Any, template: str, end: str) -> None:
    learned = find_learned(tokenizer, template, *[user("two"), assistant("two")] * 3)
    assert [text.count("two") for text in learned] == [1, 1, 1]
    assert all(text.endswith(f"two{end}") for text in learned)


@pytest.mark.parametrize(("template", "end"), FAMILIES)
def test_of_an_empty_answer_its_end_is_learned(tokenizer: Any, template: str, end: str) -> None:
    first, second = find_learned(tokenizer, template, user("two?"), assistant(""), user("three?"), assistant("one"))
    assert first.strip() == end
    assert second.endswith(f"one{end}")


@pytest.mark.parametrize("template", [LLAMA3, GEMMA])
def test_answers_are_learned_as_a_template_strips_them_and_system_messages_are_not(
    tokenizer: Any, template: str
) -> None:
    end = ENDS[template]
    learned = find_learned(
        tokenizer, template, {"role": "system", "content": "one"}, user("two?"), assistant("\n one \n")
    )
    assert learned == [f"one{end}"]


def test_qwen3_learns_the_thoughts_of_the_last_answer_as_its_template_keeps_no_others(tokenizer: Any) -> None:
    for first, last in [
        (assistant("<think>\nhm\n</think>\n\none"), assistant("<think>\noh\n</think>\n\nthree")),
        (assistant("one", reasoning_content="hm"), assistant("three", reasoning_content="oh")),
    ]:
        learned = find_learned(tokenizer, QWEN3, user("two?"), first, user("more"), last)
        assert learned == ["one<|im_end|>", "<think>\noh\n</think>\n\nthree<|im_end|>"]


def test_an_answer_begins_after_as_much_of_the_cue_as_the_template_renders(tokenizer: Any) -> None:
    """Not after the same cue in what a user says."""
    cue = "<|Assistant|><think>\n"
    assert find_learned(tokenizer, DEEPSEEK, user(f"say {cue} two"), assistant("one")) == [f"one{END}"]


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (QWEN2, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'),
        (LLAMA3, '{"a": 1}<|eom_id|>'),
        (MISTRAL, f'[TOOL_CALLS] [{{"name": "add", "arguments": {{"a": 1}}}}]{END}'),
    ],
)
def test_calls_of_tools_are_learned_whole_and_what_tools_return_is_not(
    tokenizer: Any, template: str, learned: str
) -> None:
    call = assistant("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}])
    end = ENDS[template]
    returned = {"role": "tool", "content": f"two{END}", "name": "add"}
    turns = [user("add"), call, returned, call, returned, assistant("It is two")]
    *calls, answer = find_learned(tokenizer, template, *turns)
    assert calls == [learned, learned]
    assert answer.strip() == f"It is two{end}"


def test_calls_of_gemma_4_are_learned_whole_within_a_turn_that_holds_what_tools_return(tokenizer: Any) -> None:
    """Text in arguments stands between tokens that end no call, and no cue stands before the second call."""

    def call(*given: dict[str, Any]) -> dict[str, Any]:
        return assistant(
            "", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": a}} for a in given]
        )

    returned = {"role": "tool", "content": "two", "name": "add"}
    turns = [user("add"), call({"a": "one", "b": "two"}), returned, call({"a": "one"}, {"b": "two"}), returned]
    assert find_learned(tokenizer, GEMMA4, *turns, call({}), returned, assistant("It is two")) == [
        '<|tool_call>call:add{a:<|"|>one<|"|>,b:<|"|>two<|"|>}<tool_call|>',
        '<|tool_call>call:add{a:<|"|>one<|"|>}<tool_call|><|tool_call>call:add{b:<|"|>two<|"|>}<tool_call|>',
        "<|tool_call>call:add{}<tool_call|>",
        "It is two<turn|>",
    ]


@pytest.mark.parametrize("roles", ["['user', 'system', 'assistant']", "['user', 'system', 'assistant', 'developer']"])
def test_a_developer_is_the_system_where_the_template_knows_no_developer(tokenizer: Any, roles: str) -> None:
    tokenizer.chat_template = (
        f"{{% for m in messages if m.role in {roles} %}}<{{{{ m.role }}}}>{{{{ m.content }}}}</s>{{% endfor %}}"
    )
    chat = Chat(messages=[{"role": "developer", "content": "be kind"}, user("two?"), assistant("one")])
    (encoded,) = Encoder(tokenizer, RowFormat(loss_on="completion")).encode([chat])
    assert isinstance(encoded, Encoded)
    role = "developer" if "developer" in roles else "system"
    assert tokenizer.decode(encoded.ids).startswith(f"<{role}>be kind</s>")


def test_a_call_whose_words_stand_below_what_the_tool_returns_is_refused(tokenizer: Any) -> None:
    """All between them would be learned."""
    template = (
        "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function.arguments | tojson }}[{{ messages[loop.index].content }}]{% endif %}"
        "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    called = assistant("sure", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}])
    returned = {"role": "tool", "content": "two", "name": "add"}
    with pytest.raises(RowError, match=r"message 2 in more than one place; set bad_rows: skip"):
        encode(tokenizer, template, user("add"), called, returned, assistant("It is two"))


def test_a_template_that_wants_a_system_message_first_is_asked_with_that_of_the_chat(tokenizer: Any) -> None:
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + QWEN2
    turns = [user("two?"), assistant("one"), user("two?"), assistant("more")]
    system = {"role": "system", "content": "be kind"}
    assert find_learned(tokenizer, template, system, *turns) == ["one<|im_end|>", "more<|im_end|>"]
    with pytest.raises(RowError, match=r"refuses it: no system; set bad_rows: skip"):
        encode(tokenizer, template, *turns)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ m.content }}{{ m.content }}", "message 2 in more than one place"),
        ("{{ m.content if loop.last }}", "leaves out message 2, an answer"),
        # The header of a message counts the letters of the next one, or of the one before.
        ("{{ messages[loop.index].content | length if not loop.last }}{{ m.content }}", "2 in more than one place"),
        (
            "{{ messages[loop.index0 - 1].content | length if not loop.first }}{{ m.content }}",
            "2 in more than one place",
        ),
    ],
)
def test_answers_that_cannot_be_told_apart_are_refused_with_what_helps(
    tokenizer: Any, template: str, reason: str
) -> None:
    with pytest.raises(RowError, match=f"{reason}.*; set bad_rows: skip, loss_on: all, or chat_template to one with"):
        encode(
            tokenizer,
            f"{{% for m in messages %}}{template}\n{{% endfor %}}",
            user("two?"),
            assistant("one more"),
            user("three?"),
            assistant("than two"),
        )
