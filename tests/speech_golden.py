"""Tiny models whose weights are the same numbers on every machine, and what the official package makes of them.

``speech_golden.safetensors`` was written by ``make_speech_golden.py`` with qwen-tts 0.1.1 on Transformers 4.57.3 and
torch 2.13, on one CPU thread. On one machine our modules gave the same bits where both ran the same
batch; between machines kernels differ by rounding. What is new is added to the file, as the script does it: the rest
stays as it was.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FILE = Path(__file__).with_name("speech_golden.safetensors")

PREDICTOR = {
    "vocab_size": 64, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "num_code_groups": 16, "use_sliding_window": False,
    "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0,
}  # fmt: skip
TALKER = {
    **PREDICTOR, "vocab_size": 1088, "hidden_size": 32, "intermediate_size": 64, "text_hidden_size": 48,
    "text_vocab_size": 200, "codec_pad_id": 64, "codec_bos_id": 65, "codec_eos_token_id": 66, "codec_think_id": 67,
    "codec_nothink_id": 68, "codec_think_bos_id": 69, "codec_think_eos_id": 70,
    "codec_language_id": {"english": 71, "chinese": 72, "sichuan_dialect": 73},
    "spk_id": {"ann": 90, "bo": 91}, "spk_is_dialect": {"ann": False, "bo": "sichuan_dialect"},
    "rope_scaling": {"interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_tts", "tts_model_type": "base", "tts_model_size": "tiny",
    "tokenizer_type": "qwen3_tts_tokenizer_12hz", "im_start_token_id": 190, "im_end_token_id": 191,
    "tts_pad_token_id": 195, "tts_bos_token_id": 196, "tts_eos_token_id": 197,
    "talker_config": {**TALKER, "code_predictor_config": PREDICTOR},
    "speaker_encoder_config": {
        "mel_dim": 128, "enc_dim": 32, "enc_channels": [16, 16, 16, 16, 48], "enc_kernel_sizes": [5, 3, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 4, 1], "enc_attention_channels": 8, "enc_res2net_scale": 4, "enc_se_channels": 8,
        "sample_rate": 24000,
    },
}  # fmt: skip
CODEC: dict[str, Any] = {
    "model_type": "qwen3_tts_tokenizer_12hz", "encoder_valid_num_quantizers": 16, "input_sample_rate": 24000,
    "output_sample_rate": 24000, "decode_upsample_rate": 1920, "encode_downsample_rate": 1920,
    "encoder_config": {
        "sampling_rate": 24000, "hidden_size": 32, "num_filters": 4, "codebook_size": 64, "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16, "num_quantizers": 18, "upsample_groups": 32,
        "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "sliding_window": 25, "rope_theta": 10000.0,
        "layer_scale_initial_scale": 0.01, "use_cache": False, "upsampling_ratios": [8, 6, 5, 4],
    },
    "decoder_config": {
        "codebook_dim": 32, "codebook_size": 64, "hidden_size": 32, "latent_dim": 32, "head_dim": 16,
        "max_position_embeddings": 8000, "rope_theta": 10000, "num_attention_heads": 2, "num_key_value_heads": 2,
        "attention_bias": False, "sliding_window": 25, "intermediate_size": 64, "hidden_act": "silu",
        "layer_scale_initial_scale": 0.01, "rms_norm_eps": 1e-5, "num_hidden_layers": 1, "num_quantizers": 16,
        "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2], "decoder_dim": 32, "attention_dropout": 0.0,
    },
}  # fmt: skip


def draw(name: str, *shape: int, size: float = 1.0) -> Tensor:
    """Return numbers between ``-size`` and ``size``, of integers only, so that no library can round differently."""
    places = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()))
    mixed = (places * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)  # 24 bits
    mixed = (mixed * np.uint64(0x2545F491) + (mixed >> np.uint64(7))) & np.uint64(0xFFFFFF)
    values = mixed.astype(np.float32) / np.float32(2**23) - np.float32(1)
    return torch.from_numpy(values).view(*shape) * size


def fill(model: nn.Module) -> None:
    """Give every tensor of a model numbers that go with its name and shape."""
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith("initialized"):
            continue
        size = 1.5 / max(1, int(np.prod(tensor.shape[1:]))) ** 0.5 if tensor.dim() > 1 else 0.1
        if "embedding" in name or "embed_sum" in name or "codebook" in name:
            size = 0.5
        values = draw(name, *tensor.shape, size=size)
        is_scale = (
            name.endswith(("norm.weight", "cluster_usage", "layer_scale.scale", "gamma")) or "layernorm.w" in name
        )
        tensor.copy_(values + 1 if is_scale else values)
    model.load_state_dict(state)


def make_samples() -> list[tuple[list[int], Tensor]]:
    """Return text ids with role and tail, and codes [frames, 16], of two utterances of different lengths."""
    samples = []
    for i, (num_text, num_frames) in enumerate(((9, 13), (5, 7))):
        text = (draw(f"text {i}", num_text).abs() * 150).long().tolist()
        codes = (draw(f"codes {i}", num_frames, 16).abs() * 63).long()
        samples.append(([190, 7, 8, *text, 191, 8, 190, 7, 8], codes))
    return samples


def make_contexts() -> list[tuple[list[int], Tensor]]:
    """Return text ids with role and tail, and codes [frames, 16], of speech to go on from, for each sample.

    Beside the codes of the first one, text is left over when streaming; beside those of the second one, codes are.
    """
    contexts = []
    for i, (num_text, num_frames) in enumerate(((6, 5), (3, 17))):
        text = (draw(f"context text {i}", num_text).abs() * 150).long().tolist()
        codes = (draw(f"context codes {i}", num_frames, 16).abs() * 63).long()
        contexts.append(([190, 7, 8, *text, 191, 8], codes))
    return contexts


def make_voices() -> list[Tensor]:
    """Return an embedding [size] of who speaks, for each sample."""
    return [draw(f"voice {i}", TALKER["hidden_size"]) for i in range(2)]


def project_alone(talker: Any) -> None:
    """Let a talker project each text id alone: in a product of several rows each one is rounded by their number.

    The official package projects a prompt in pieces, ours at once. So with this both give the same bits.
    """
    project = talker.text_projection.forward

    def forward(hidden: Tensor) -> Tensor:
        rows = [project(row[None]) for row in hidden.flatten(0, -2)]
        return torch.cat(rows).view(*hidden.shape[:-1], -1)

    talker.text_projection.forward = forward


@dataclass
class TalkerRecord:
    """What a talker, official or ours, read and made of it while it generated."""

    talker: Any
    inputs: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)

    @property
    def prompt(self) -> Tensor:
        """What it was fed first [batch, length, size]."""
        return self.inputs[0].detach().clone()

    @torch.no_grad()
    def compute_logits(self) -> Tensor:
        """Return the logits of the first four frames [batch, 4, 80], from states in one product."""
        states = torch.stack([found[:, -1] for found in self.states[:4]], dim=1)
        return self.talker.codec_head(states)[..., :80].clone()


@contextmanager
def record_talker(talker: Any) -> Iterator[TalkerRecord]:
    """Record a talker."""
    record = TalkerRecord(talker)
    hooks = [
        talker.model.register_forward_pre_hook(
            lambda _, __, given: record.inputs.append(given["inputs_embeds"]), with_kwargs=True
        ),
        talker.model.register_forward_hook(lambda _, __, found: record.states.append(found.last_hidden_state)),
    ]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


def make_instruction() -> list[int]:
    """Return the ids of an instruction, with its template."""
    return [190, 9, 8, *(draw("instruction", 7).abs() * 150).long().tolist(), 191, 8]


def make_audio(seconds: float, pitch: float) -> Tensor:
    """Return a rising triangle wave with noise, at 24 kHz."""
    times = torch.arange(round(seconds * 24000), dtype=torch.float64) / 24000
    phase = (times * pitch + times**2 * 20) % 1
    wave = (4 * (phase - 0.5).abs() - 1) * 0.6
    return (wave + draw(f"noise {pitch}", len(times), size=0.1).double()).float()
