"""CSM: its loss is that of Transformers, sharded as on one device, and what it learned it speaks."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from speech_families import CSM, build_model, learn, make_rows, make_utterances
from torch import Tensor
from transformers import CsmConfig, CsmForConditionalGeneration

from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.generation import GREEDY, SamplingValues
from lit_fsdp.tasks.tts.parts import freeze_parts

VOICES = {"kim": 0, "lee": 1}


def build_stock(state: dict[str, Tensor]) -> Any:
    stock = CsmForConditionalGeneration(CsmConfig.from_dict(deepcopy(CSM))).eval()
    left = stock.load_state_dict(state, strict=False)
    assert not left.unexpected_keys
    assert all(name.startswith("codec_model.") for name in left.missing_keys)
    return stock


def test_loss_and_gradients_are_those_of_transformers() -> None:
    family, config = parse_family(CSM)
    model, utterances = build_model(CSM), make_utterances(CSM, make_rows(6, 4), VOICES)
    output = model(family.collate(utterances, config))
    loss = output.talker_loss / output.num_tokens + output.predictor_loss / output.num_frames
    loss.backward()
    stock = build_stock(model.state_dict())
    length = max(len(u.text_ids) + len(u.codes) for u in utterances) + 1
    labels = torch.full((4, length, 6), -100)
    text, is_text = torch.zeros(4, length, dtype=torch.int64), torch.zeros(4, length, 1)
    for row, u in enumerate(utterances):  # as the official processor has it: text, frames, a frame of zeros
        begin, end = len(u.text_ids), len(u.text_ids) + len(u.codes)
        labels[row, begin:end] = torch.from_numpy(u.codes)
        labels[row, end] = 0
        text[row, :begin] = torch.tensor(u.text_ids)
        is_text[row, :begin] = 1
    audio = stock.backbone_model.embed_tokens(labels.clamp(min=0))
    wanted = stock(inputs_embeds=stock.embed_text_tokens(text) * is_text + audio * (1 - is_text), labels=labels)
    wanted.loss.backward()
    torch.testing.assert_close(output.talker_loss / output.num_tokens, wanted.backbone_loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(loss, wanted.loss, atol=1e-6, rtol=1e-6)
    grads = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    assert grads.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], atol=1e-6, rtol=1e-4, msg=name)


def test_names_that_are_numbers_keep_them() -> None:
    family, _ = parse_family(CSM)
    rows = [replace(make_rows(6, 1)[0], speaker=name) for name in ("bruno", "3", "ada", "0", "ada")]
    assert family.assign_voices(rows, {}) == {"0": 0, "3": 3, "ada": 1, "bruno": 2}


def test_as_many_frames_as_codebooks_are_nothing_special() -> None:
    family, config = parse_family(CSM)
    model, utterances = build_model(CSM), make_utterances(CSM, make_rows(6, 8), VOICES)
    one = next(u for u in utterances if len(u.codes) == 5)  # and the end
    alone, both = (model(family.collate(rows, config)) for rows in ([one], [one, one]))
    torch.testing.assert_close(2 * alone.predictor_loss, both.predictor_loss, atol=1e-5, rtol=1e-6)


@pytest.fixture(scope="module")
def learned() -> Any:
    """A model that knows two clips of unequal length by heart."""
    return learn(CSM, make_rows(6, 2), VOICES, num_steps=120, below=0.05)


@pytest.mark.full
def test_what_was_learned_by_heart_is_spoken(learned: Any) -> None:
    model, utterances = learned
    family, config = parse_family(CSM)
    prompts = family.collate_prompts(utterances, config)
    spoken = family.generate(model, prompts, SamplingValues(**GREEDY, repetition_penalty=1.0, max_frames=30))
    for speech, utterance in zip(spoken, utterances, strict=True):
        assert speech.has_ended
        assert speech.codes.tolist() == utterance.codes.tolist()
    stock = build_stock(model.state_dict())
    stock.generation_config.pad_token_id = stock.generation_config.eos_token_id = 0
    for utterance in utterances:
        codes = stock.generate(
            input_ids=torch.tensor([utterance.text_ids]),
            do_sample=False,
            depth_decoder_do_sample=False,
            max_new_tokens=30,
        )
        assert codes[0, : len(utterance.codes)].tolist() == utterance.codes.tolist()


@pytest.mark.full
def test_speech_that_does_not_end_is_cut(learned: Any) -> None:
    model, utterances = learned
    family, config = parse_family(CSM)
    prompts = family.collate_prompts(utterances, config)
    spoken = family.generate(model, prompts, SamplingValues(**GREEDY, repetition_penalty=1.0, max_frames=3))
    assert [len(speech.codes) for speech in spoken] == [min(3, len(u.codes)) for u in utterances]
    assert [speech.has_ended for speech in spoken] == [len(u.codes) <= 3 for u in utterances]


def test_codes_that_the_codec_has_not_are_never_spoken() -> None:
    family, config = parse_family(CSM)
    model, utterances = build_model(CSM).eval(), make_utterances(CSM, make_rows(6, 2), VOICES)
    with torch.no_grad():  # the likeliest ones
        model.lm_head.weight[64:] = model.lm_head.weight[:64].abs().sum(0)
        model.depth_decoder.codebooks_head.weight[..., 64:] *= 50
    prompts = family.collate_prompts(utterances, config)
    for sampling in (
        SamplingValues(**GREEDY, max_frames=6),
        SamplingValues(temperature=5.0, predictor_temperature=5.0, max_frames=6),
    ):
        assert max(int(speech.codes.max()) for speech in family.generate(model, prompts, sampling)) < 64


@pytest.mark.parametrize(
    ("freeze", "frozen"),
    [
        (["text_embedding"], {"embed_text_tokens"}),
        (["talker", "audio_embedding"], {"lm_head", "backbone_model"}),
        (["code_predictor", "text_embedding"], {"embed_text_tokens", "depth_decoder"}),
    ],
)
def test_parts_are_frozen_and_their_shared_embedding_is_one_of_its_own(freeze: list[str], frozen: set[str]) -> None:
    family, _ = parse_family(CSM)
    model = build_model(CSM)
    freeze_parts(model, family, freeze)
    assert {name.split(".")[0] for name, p in model.named_parameters() if not p.requires_grad} == frozen
    shared = model.backbone_model.embed_tokens.embed_audio_tokens.weight
    assert shared is model.depth_decoder.model.embed_tokens.weight
    assert shared.requires_grad == ("audio_embedding" not in freeze)
