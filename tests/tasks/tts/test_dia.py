"""Dia: its loss is that of Transformers, sharded as on one device, and what it learned it speaks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from speech_families import DIA, build_model, fit, make_rows, make_utterances, speak_unequally, train_plainly
from torch import Tensor
from training import Result
from transformers import DiaConfig, DiaForConditionalGeneration, DiaProcessor

from lit_fsdp.tasks.tts.dia import Dia
from lit_fsdp.tasks.tts.families import parse_family
from lit_fsdp.tasks.tts.generation import GREEDY, SamplingValues
from lit_fsdp.tasks.tts.prepared import write_shard
from lit_fsdp.tasks.tts.tokenizer import build_byte_tokenizer
from ranks import run_ranks

PLAIN = {"repetition_penalty": 1.0, "guidance_scale": 1.0}
IDS = {"bos": 66, "eos": 64, "pad": 65}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_shard(folder / "shard-00000.parquet", make_rows(4))
    return folder


@pytest.fixture(scope="module")
def truth() -> Result:
    return train_plainly(DIA, {})


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
    own, other = family.weigh_losses(config)
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


@pytest.mark.parametrize(
    ("world_size", "accumulate"), [(1, 1), (2, 1), (1, 3), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_training_is_the_same_on_any_number_of_ranks(
    prepared: Path, tmp_path: Path, truth: Result, world_size: int, accumulate: int
) -> None:
    run_ranks(fit, DIA, prepared, tmp_path, accumulate, {}, world_size=world_size)
    result = Result(**torch.load(tmp_path / "result.pt"))
    for own, wanted in ((result.losses, truth.losses), (result.grad_norms, truth.grad_norms)):
        assert max(abs(a - b) / abs(b) for a, b in zip(own, wanted, strict=True)) < 1e-6
    assert result.weights.keys() == truth.weights.keys()
    assert max(float((result.weights[n] - w).abs().max()) for n, w in truth.weights.items()) < 1e-5


@pytest.fixture(scope="module")
def learned() -> Any:
    """A model that knows two clips of unequal length by heart."""
    family, config = parse_family(DIA)
    model, utterances = build_model(DIA), make_utterances(DIA, make_rows(4, 2), {})
    batch = family.collate(utterances, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(150):
        output = model(batch)
        loss = (output.talker_loss + 3 * output.predictor_loss) / output.num_tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss) < 0.1
    return model.eval(), utterances


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


def test_speech_that_does_not_end_is_cut(learned: Any) -> None:
    model, utterances = learned
    family, config = parse_family(DIA)
    prompts = family.collate_prompts(utterances, config)
    spoken = family.generate(model, prompts, SamplingValues(**GREEDY, **PLAIN, max_frames=5))
    assert [len(speech.codes) for speech in spoken] == [min(5, len(u.codes)) for u in utterances]
    assert [speech.has_ended for speech in spoken] == [len(u.codes) <= 5 for u in utterances]
    for speech, utterance in zip(spoken, utterances, strict=True):
        assert speech.codes.tolist() == utterance.codes[:5].tolist()


def find_heads(model: Dia) -> list[Any]:
    return [model.logits_dense]


def test_ranks_whose_speech_ends_at_different_frames_do_not_wait_for_each_other(prepared: Path, tmp_path: Path) -> None:
    run_ranks(speak_unequally, DIA, prepared, tmp_path, find_heads, IDS["eos"], world_size=2, timeout_s=60.0)
    (early, late) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert early == ([0, 0], [True, True])
    assert late == ([5, 5], [False, False])


def test_a_text_without_a_speaker_is_the_first_ones() -> None:
    family, config = parse_family(DIA)
    tokenizer = build_byte_tokenizer()
    texts = [tokenizer.decode(family.encode_text(tokenizer, text, config, None)) for text in ("ab", "[S2] ab")]
    assert texts == ["[S1] ab", "[S2] ab"]
    with pytest.raises(ValueError, match="text: got 105 tokens: expected up to 64"):
        family.encode_text(tokenizer, "a" * 100, config, None)
