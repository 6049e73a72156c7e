"""Dia: its loss is that of Transformers, sharded as on one device, and what it learned it speaks."""

from typing import Any

import pytest
import torch
from speech_families import DIA, build_model, learn, make_rows, make_utterances
from torch import Tensor
from transformers import DiaConfig, DiaForConditionalGeneration, DiaProcessor

from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.generation import GREEDY, SamplingValues
from lit_fsdp.tasks.tts.tokenizer import build_byte_tokenizer

PLAIN = {"repetition_penalty": 1.0, "guidance_scale": 1.0}
IDS = {"bos": 66, "eos": 64, "pad": 65}


def build_stock(state: dict[str, Tensor]) -> Any:
    stock = DiaForConditionalGeneration(DiaConfig.from_dict(dict(DIA))).eval()
    stock.load_state_dict(state)
    return stock


def delay(codes: Tensor) -> Tensor:
    """Delay codes [1, length, codebooks] with the official processor's own functions."""
    size = {"bsz": 1, "seq_len": codes.shape[1], "num_channels": 4}
    indices = DiaProcessor.build_indices(**size, delay_pattern=DIA["delay_pattern"])
    return DiaProcessor.apply_audio_delay(codes, IDS["pad"], IDS["bos"], indices)


def test_loss_and_gradients_are_those_of_transformers() -> None:
    family, config = parse_family(DIA)
    model, utterances = build_model(DIA), make_utterances(DIA, make_rows(4, 4), {})
    batch = family.collate(utterances, config)
    output = model(batch)
    own, other = family.get_loss_weights(config)
    loss = own * output.talker_loss / output.num_tokens + other * output.predictor_loss / output.num_frames
    loss.backward()
    stock = build_stock(model.state_dict())
    longest = max(len(u.codes) for u in utterances)
    ids = []
    for u in utterances:  # as the official processor has it, but with padding on the right
        rows = torch.full((1, longest + 2 + 4, 4), IDS["pad"])
        rows[0, 0], rows[0, 1 + len(u.codes)] = IDS["bos"], IDS["eos"]
        rows[0, 1 : 1 + len(u.codes)] = torch.from_numpy(u.codes)
        ids.append(delay(rows))
    inputs = torch.cat(ids)
    labels = inputs[:, 1:].clone()
    labels[(labels == IDS["pad"]) | (labels == IDS["bos"])] = -100
    wanted = stock(
        input_ids=batch["text_ids"],
        attention_mask=batch["text_mask"],
        decoder_input_ids=inputs[:, :-1],
        labels=labels.transpose(1, 2).reshape(4 * 4, -1).contiguous(),
    )
    wanted.loss.backward()
    torch.testing.assert_close(loss, wanted.loss, atol=1e-6, rtol=1e-6)
    assert torch.equal(batch["decoder_ids"], inputs[:, :-1])
    grads = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.fixture(scope="module")
def learned() -> Any:
    """A model that knows two clips of unequal length by heart."""
    return learn(DIA, make_rows(4, 2), {}, num_steps=150, below=0.1)


def speak_with_stock(stock: Any, text_ids: list[int], **options: Any) -> list[list[int]]:
    """Return the codes that Transformers generates for a text, without delays."""
    start = torch.full((1, 1 + 4, 4), IDS["pad"])
    start[:, 0] = IDS["bos"]
    made = stock.generate(
        input_ids=torch.tensor([text_ids]),
        attention_mask=torch.ones(1, len(text_ids), dtype=torch.int64),
        decoder_input_ids=delay(start),
        decoder_attention_mask=torch.ones(1, 1 + 4, dtype=torch.int64),
        do_sample=False,
        max_length=60,
        eos_token_id=IDS["eos"],
        pad_token_id=IDS["pad"],
        bos_token_id=IDS["bos"],
        **options,
    )[0]
    end = int((made[:, 0] == IDS["eos"]).nonzero()[0])
    return [[int(made[i + d, c]) for c, d in enumerate(DIA["delay_pattern"])] for i in range(1, end)]


@pytest.mark.full
def test_what_was_learned_by_heart_is_spoken(learned: Any) -> None:
    model, utterances = learned
    family, config = parse_family(DIA)
    prompts = family.collate_prompts(utterances, config)
    spoken = family.generate(model, prompts, SamplingValues(**GREEDY, **PLAIN, max_frames=30))
    stock = build_stock(model.state_dict())
    for speech, utterance in zip(spoken, utterances, strict=True):
        assert speech.has_ended
        assert speech.codes.tolist() == utterance.codes.tolist()
        assert speak_with_stock(stock, list(utterance.text_ids)) == utterance.codes.tolist()


@pytest.mark.full
def test_guidance_is_that_of_transformers() -> None:
    family, config = parse_family(DIA)
    model, utterances = build_model(DIA).eval(), make_utterances(DIA, make_rows(4, 2), {})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)  # so that codes depend on the text
    stock, prompts = build_stock(model.state_dict()), family.collate_prompts(utterances, config)
    # Of the likeliest code with guidance, whose probability is the one without.
    settings = {**GREEDY, "top_k": 1, "max_frames": 20}
    guided, plain = (
        family.generate(model, prompts, SamplingValues(**settings, guidance_scale=scale)) for scale in (3.0, 1.0)
    )
    assert guided[0].codes.tolist() != plain[0].codes.tolist()
    for speech, utterance in zip(guided, utterances, strict=True):
        wanted = speak_with_stock(stock, list(utterance.text_ids), guidance_scale=3.0, top_k=1)
        # Where the first codebook is cut, the others still write, and read that it has ended.
        assert speech.codes[:16].tolist() == wanted[:16]
        assert len(speech.codes) == 20


@pytest.mark.full
def test_speech_that_does_not_end_is_cut(learned: Any) -> None:
    model, utterances = learned
    family, config = parse_family(DIA)
    prompts = family.collate_prompts(utterances, config)
    spoken = family.generate(model, prompts, SamplingValues(**GREEDY, **PLAIN, max_frames=5))
    assert [len(speech.codes) for speech in spoken] == [min(5, len(u.codes)) for u in utterances]
    assert [speech.has_ended for speech in spoken] == [len(u.codes) <= 5 for u in utterances]
    for speech, utterance in zip(spoken, utterances, strict=True):
        assert speech.codes.tolist() == utterance.codes[:5].tolist()


def test_a_text_without_a_speaker_is_the_first_ones() -> None:
    family, config = parse_family(DIA)
    tokenizer = build_byte_tokenizer()
    texts = [tokenizer.decode(family.encode_text(tokenizer, text, config, None)) for text in ("ab", "[S2] ab")]
    assert texts == ["[S1] ab", "[S2] ab"]
    with pytest.raises(ValueError, match="text: got 105 tokens: expected up to 64"):
        family.encode_text(tokenizer, "a" * 100, config, None)
