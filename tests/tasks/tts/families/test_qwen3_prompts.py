"""Speech to go on from, instructions and designed voices, against the official package, and in training."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from speech_golden import (
    CONFIG,
    FILE,
    fill,
    make_contexts,
    make_instruction,
    make_samples,
    make_voices,
    project_alone,
    record_talker,
)
from torch import Tensor

from lit_fsdp.tasks.tts.config import parse_config
from lit_fsdp.tasks.tts.families.qwen3_layout import collate_prompts, collate_training, encode_instruct, encode_text
from lit_fsdp.tasks.tts.families.qwen3_model import Qwen3TTS, generate_qwen3
from lit_fsdp.tasks.tts.generation import GREEDY, Chooser, SamplingValues
from lit_fsdp.tasks.tts.tokenizer import build_byte_tokenizer
from lit_fsdp.tasks.tts.utterance import Utterance

GOLDEN = load_file(FILE)
NEAR = {"atol": 2e-5, "rtol": 1e-4}  # as other machines round; on the one that wrote the file it is 0.0


def build(**changes: Any) -> Qwen3TTS:
    model = Qwen3TTS(parse_config(deepcopy({**CONFIG, **changes}))).eval()
    fill(model)
    return model


def make_clones(*, num_contexts: int = 2) -> list[Utterance]:
    """Return prompts of which the first ones go on from speech, and the others only take its voice."""
    english = parse_config(deepcopy(CONFIG)).get_language_id("english")
    parts = zip(make_samples(), make_voices(), (None, english), make_contexts(), strict=True)
    clones = []
    for i, ((text, _), voice, language, (said, codes)) in enumerate(parts):
        own = Utterance(text_ids=text[:-5], speaker=voice.numpy(), language=language)
        is_context = i < num_contexts
        clones.append(replace(own, context_ids=said[:-2], context_codes=codes.numpy()) if is_context else own)
    return clones


def speak(model: Qwen3TTS, prompts: list[Utterance], name: str, sampling: SamplingValues, *, streams: bool) -> None:
    """Speak, and compare with what the official package was fed, computed and wrote."""
    project_alone(model.talker)
    batch = collate_prompts(prompts, model.config, is_streaming=streams)
    with record_talker(model.talker) as record:
        spoken = generate_qwen3(model, batch, sampling)
    if f"{name} prompt" in GOLDEN:
        prompt = record.prompt * batch["attention_mask"].unsqueeze(-1)  # padding holds anything
        torch.testing.assert_close(prompt, GOLDEN[f"{name} prompt"], **NEAR)
        torch.testing.assert_close(record.compute_logits(), GOLDEN[f"{name} logits"], **NEAR)
    for i, speech in enumerate(spoken):
        assert torch.equal(speech.codes, GOLDEN[f"{name} {i}"])


@pytest.mark.full(after=1)
@pytest.mark.parametrize("kind", ["whole", "streaming"])
@pytest.mark.parametrize("num_contexts", [2, 1])
def test_speech_that_goes_on_from_other_speech_is_the_official_one(kind: str, num_contexts: int) -> None:
    name = "context" if num_contexts == 2 else "context and none"
    sampling = SamplingValues(**GREEDY, max_frames=15)
    speak(build(), make_clones(num_contexts=num_contexts), f"{name} {kind}", sampling, streams=kind == "streaming")


@pytest.mark.full
def test_speech_that_goes_on_from_other_speech_is_drawn_as_officially() -> None:
    sampling = SamplingValues(top_p=0.95, predictor_top_k=20, max_frames=19, seed=3)
    speak(build(), make_clones(num_contexts=1), "context sampled", sampling, streams=True)


@pytest.mark.full(after=1)
@pytest.mark.parametrize("kind", ["built-in", "designed"])
def test_a_voice_follows_instructions_as_officially(kind: str) -> None:
    model = build(tts_model_type="custom_voice" if kind == "built-in" else "voice_design")
    config, (first, second) = model.config, [text[:-5] for text, _ in make_samples()]
    told: dict[str, Any] = {"instruct_ids": make_instruction()}
    prompts = [
        Utterance(text_ids=first, language=config.get_language_id("English"), **told),
        Utterance(text_ids=second, **told),
    ]
    if kind == "built-in":
        ann, bo = config.speakers["ann"], config.speakers["bo"]
        prompts = [replace(prompts[0], speaker=ann, instruct_ids=()), replace(prompts[1], speaker=bo)]
        prompts[1] = replace(prompts[1], language=config.get_language_id("auto", "bo"))
    speak(model, prompts, f"instruct {kind}", SamplingValues(**GREEDY, max_frames=15), streams=False)


def test_templates_are_the_official_ones() -> None:
    tokenizer = build_byte_tokenizer()
    assert tokenizer.decode(encode_instruct(tokenizer, " Whisper. ")) == "<|im_start|>user\nWhisper.<|im_end|>\n"
    assert tokenizer.decode(encode_text(tokenizer, "Hi.")) == "<|im_start|>assistant\nHi."


@pytest.mark.full(after=1)
@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "num_text"),
    [
        *((0, None), (1, None)),  # with text left over beside the frames to go on from, and frames beside text
        *((0, 2), (0, 9), (0, 30)),  # shorter than the speech of 13 frames, and longer
    ],
)
def test_training_feeds_position_by_position_what_generation_feeds(
    monkeypatch: pytest.MonkeyPatch, is_streaming: bool, row: int, num_text: int | None
) -> None:
    model = build()
    codes = make_samples()[row][1]
    prompt = replace(make_clones()[row], instruct_ids=make_instruction())
    if num_text is not None:
        prompt = Utterance(text_ids=[*prompt.text_ids[:3], *range(10, 10 + num_text)], speaker=prompt.speaker)
    batch = collate_training([replace(prompt, codes=codes.numpy())], model.config, is_streaming=is_streaming)
    with record_talker(model.talker) as trained:
        output = model(batch)
    spoken = iter([*codes.flatten(), torch.tensor(model.config.ids.eos)])
    for name in ("pick_first", "pick_other"):
        monkeypatch.setattr(Chooser, name, lambda *_: next(spoken).view(1))
    with record_talker(model.talker) as generated:
        (speech,) = generate_qwen3(
            model, collate_prompts([prompt], model.config, is_streaming=is_streaming), SamplingValues()
        )
    assert torch.equal(speech.codes, codes)
    fed = torch.cat(generated.inputs, dim=1)
    torch.testing.assert_close(trained.prompt[:, :-1], fed, **NEAR)
    # What it goes on from is read and not learned.
    assert (int(output.num_tokens), int(output.num_frames)) == (len(codes) + 1, len(codes))
    assert torch.equal(output.labels[:-1], codes[:, 0])


def test_the_loss_does_not_depend_on_what_shares_a_batch() -> None:
    model = build()
    codes = [codes.numpy() for _, codes in make_samples()]
    rows = [replace(u, codes=c) for u, c in zip(make_clones(num_contexts=1), codes, strict=True)]
    both = model(collate_training(rows, model.config))
    alone = [model(collate_training([row], model.config)) for row in rows]
    for name in ("talker_loss", "predictor_loss"):
        total: Tensor = sum(getattr(output, name) for output in alone)
        torch.testing.assert_close(getattr(both, name), total, **NEAR)
    changed = [replace(rows[0], context_codes=(np.asarray(rows[0].context_codes) + 1) % 64), rows[1]]
    assert not torch.allclose(model(collate_training(changed, model.config)).talker_loss, both.talker_loss)
