"""Writes ``speech_golden.safetensors`` with the official package.

It needs an environment of its own: pip install qwen-tts==0.1.1
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration, mel_spectrogram
from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Config
from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model
from safetensors.torch import load_file, save_file
from speech_golden import (
    CODEC,
    CONFIG,
    FILE,
    fill,
    make_audio,
    make_contexts,
    make_instruction,
    make_samples,
    make_voices,
    project_alone,
    record_talker,
)
from torch import Tensor
from torch.nn import functional as F

GREEDY = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": 16}


def build(**changes: Any) -> Any:
    raw = {name: value for name, value in deepcopy({**CONFIG, **changes}).items() if name != "model_type"}
    config = Qwen3TTSConfig(**raw)
    config._attn_implementation = "sdpa"
    model = Qwen3TTSForConditionalGeneration(config).eval()
    fill(model)
    return model


def compute_losses(model: Any, speakers: Tensor, out: dict[str, Tensor]) -> None:
    """The right loss, with the official modules: one shift, the state before the frame, no shift of the others."""
    talker, length = model.talker, 0
    rows = []
    for (text, codes), speaker in zip(make_samples(), speakers, strict=True):
        ids = torch.tensor(text[:-5])
        c, config = model.config.talker_config, model.config
        tts = talker.text_projection(
            talker.model.text_embedding(
                torch.tensor([config.tts_pad_token_id, config.tts_bos_token_id, config.tts_eos_token_id])
            )
        )
        embed = talker.model.codec_embedding
        words = talker.text_projection(talker.model.text_embedding(ids))
        prefix = embed(torch.tensor([c.codec_nothink_id, c.codec_think_bos_id, c.codec_think_eos_id]))
        pad, bos, eos = (embed(torch.tensor([i])) for i in (c.codec_pad_id, c.codec_bos_id, c.codec_eos_token_id))
        tables = [embed, *talker.code_predictor.get_input_embeddings()]
        frames = embed(codes[:, 0]) + tts[:1]
        for i in range(1, 16):
            frames = frames + tables[i](codes[:, i])
        parts = [words[:3], tts[:1] + prefix, tts[:1] + speaker[None], tts[1:2] + pad]
        parts += [words[3:] + pad, tts[2:] + pad, tts[:1] + bos, frames, tts[:1] + eos]
        rows.append((torch.cat(parts), codes))
        length = max(length, len(rows[-1][0]))
    talker_losses, predictor_losses = [], []
    for i, (inputs, codes) in enumerate(rows):
        states = talker.model(inputs_embeds=inputs[None]).last_hidden_state[0]
        begin = len(inputs) - 1 - len(codes)
        logits = talker.codec_head(states[begin - 1 : -1])
        labels = torch.cat([codes[:, 0], torch.tensor([model.config.talker_config.codec_eos_token_id])])
        talker_losses.append(F.cross_entropy(logits, labels, reduction="none"))
        others, _ = talker.forward_sub_talker_finetune(codes, states[begin - 1 : -2])
        predictor_losses.append(F.cross_entropy(others.flatten(0, 1), codes[:, 1:].flatten(), reduction="none"))
        out[f"logits {i}"], out[f"predictor logits {i}"] = logits[:, :80].detach(), others[:3].detach()
    losses = torch.cat(talker_losses).mean(), torch.cat(predictor_losses).mean()
    (losses[0] + 0.3 * losses[1]).backward()
    out["losses"] = torch.stack(losses).detach()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            out[f"grad {name}"] = parameter.grad.flatten()[:: max(1, parameter.numel() // 16)][:16].clone()


def generate(model: Any, out: dict[str, Tensor], name: str, **options: Any) -> None:
    torch.manual_seed(3)
    texts = [torch.tensor([text]) for text, _ in make_samples()]
    codes, _ = model.generate(input_ids=texts, **{"repetition_penalty": 1.05, **options})
    for i, row in enumerate(codes):
        out[f"{name} {i}"] = row


def generate_from_prompts(model: Any, out: dict[str, Tensor], name: str, **options: Any) -> None:
    """Keep what the talker is fed as a prompt, and the logits of the first frames, too."""
    with record_talker(model.talker) as record:
        generate(model, out, name, **options)
    out[f"{name} prompt"], out[f"{name} logits"] = record.prompt, record.compute_logits()


def speak_from_prompts(out: dict[str, Tensor]) -> None:
    """Speech to go on from, instructions, and a voice made of one."""
    model, contexts = build(), make_contexts()
    project_alone(model.talker)
    voices = {"ref_spk_embedding": make_voices(), "ref_code": [codes for _, codes in contexts]}
    ids = [torch.tensor([text]) for text, _ in contexts]
    for name, is_context in (("context", [True, True]), ("context and none", [True, False])):
        modes = {"icl_mode": is_context, "x_vector_only_mode": [not i for i in is_context]}
        clone = {"voice_clone_prompt": {**voices, **modes}, "ref_ids": ids, "languages": ["Auto", "English"]}
        for kind in ("whole", "streaming"):
            options = {**clone, "non_streaming_mode": kind == "whole"}
            generate_from_prompts(model, out, f"{name} {kind}", **options, **GREEDY)
    sampled = {"max_new_tokens": 20, "top_p": 0.95, "subtalker_top_k": 20}
    generate(model, out, "context sampled", **{**options, **sampled})
    instruct = torch.tensor([make_instruction()])
    options = {"languages": ["English", "auto"], "non_streaming_mode": True, **GREEDY}
    built_in, designed = build(tts_model_type="custom_voice"), build(tts_model_type="voice_design")
    for other in (built_in, designed):
        project_alone(other.talker)
    given = {"instruct_ids": [None, instruct], "speakers": ["Ann", "bo"]}
    generate_from_prompts(built_in, out, "instruct built-in", **given, **options)
    generate_from_prompts(designed, out, "instruct designed", instruct_ids=[instruct, instruct], **options)


def main() -> None:
    """Write the file."""
    out: dict[str, Tensor] = {}
    model = build()
    audio = [make_audio(1.5, 130.0), make_audio(1.0, 210.0)]
    mels = [mel_spectrogram(a[None], 1024, 128, 24000, 256, 1024, 0, 12000).transpose(1, 2) for a in audio]
    speakers = torch.cat([model.speaker_encoder(m) for m in mels]).detach()
    out["mels"], out["speakers"] = mels[1][0, ::20].clone(), speakers
    compute_losses(model, speakers, out)
    voices = {"ref_spk_embedding": list(speakers), "x_vector_only_mode": [True] * 2, "icl_mode": [False] * 2}
    voices["ref_code"] = None
    clone = {"voice_clone_prompt": voices, "languages": ["Auto", "English"]}
    for is_streaming in (False, True):
        kind = "streaming" if is_streaming else "whole"
        generate(model, out, f"greedy {kind}", non_streaming_mode=not is_streaming, **clone, **GREEDY)
        options = {"max_new_tokens": 30, "top_p": 0.95, "subtalker_top_k": 20}
        generate(model, out, f"sampled {kind}", non_streaming_mode=not is_streaming, **clone, **options)
    built_in = build(tts_model_type="custom_voice")
    options = {"speakers": ["Ann", "bo"], "languages": ["English", "auto"], "non_streaming_mode": True, **GREEDY}
    generate(built_in, out, "built-in", **options)
    speak_from_prompts(out)
    codec = Qwen3TTSTokenizerV2Model(
        Qwen3TTSTokenizerV2Config(**{n: deepcopy(v) for n, v in CODEC.items() if n != "model_type"})
    ).eval()
    fill(codec)
    clips = [make_audio(3.2, 130.0), make_audio(1.6, 210.0)]  # whole frames; 80 positions, and a window of 25
    padded = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True)
    mask = torch.tensor([[1] * len(c) + [0] * (padded.shape[1] - len(c)) for c in clips])
    with torch.inference_mode():
        for i, codes in enumerate(codec.encode(padded, mask).audio_codes):
            out[f"codes {i}"] = codes.clone()
        out["audio"] = codec.decode(out["codes 0"][None]).audio_values[0][::16].clone()
        long = torch.cat([out["codes 0"]] * 9)[:330]
        out["long audio"] = codec.decode(long[None]).audio_values[0][300 * 1920 :: 64].clone()
    known = load_file(FILE) if FILE.is_file() else {}  # delete it to have all of it from one machine
    save_file({**{name: tensor.contiguous() for name, tensor in out.items()}, **known}, FILE)


if __name__ == "__main__":
    main()
