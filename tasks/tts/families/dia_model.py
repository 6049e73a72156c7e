"""Dia: Transformers' encoder and decoder, their loss, and how they speak.

Note [Delay pattern]: the decoder writes all codebooks at once, but codebook ``c`` of a frame ``delay_pattern[c]``
positions after codebook 0. Before its first code a codebook has ``bos``, after its last one ``eos``, then ``pad``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DiaForConditionalGeneration, DynamicCache, EncoderDecoderCache

# Not in Transformers' public face, seen in 5.23: what it chooses the codes of Dia with.
from transformers.generation.logits_process import (
    DiaClassifierFreeGuidanceLogitsProcessor,
    DiaEOSChannelFilterLogitsProcessor,
)

from lit_fsdp.tasks.tts.families.family import SpeechOutput
from lit_fsdp.tasks.tts.generation import SamplingValues, Speech, build_warpers, is_any
from lit_fsdp.tasks.tts.utterance import Batch


class Dia(DiaForConditionalGeneration):
    """An encoder that reads bytes of text, and a decoder that writes all codebooks, under the official names."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of the codes, the largest one."""
        return self.model.decoder.embeddings.embed

    def forward(self, batch: Batch) -> SpeechOutput:
        """Return losses and logits under the true codes; see Note [Two losses] and Note [Delay pattern].

        All codebooks have an end, so their losses have as many targets.

        Args:
            batch: From ``DiaFamily.collate``.
        """
        states = self.model(
            input_ids=batch["text_ids"],
            attention_mask=batch["text_mask"],
            decoder_input_ids=batch["decoder_ids"],
            decoder_attention_mask=batch["attention_mask"],
            use_cache=False,
        ).last_hidden_state
        targets, places = batch["targets"], batch["state_index"]  # [frames and ends, codebooks]
        logits = self.logits_dense(states).flatten(0, 1).unflatten(1, (self.num_channels, self.vocab_size))
        logits = logits[places, torch.arange(self.num_channels, device=places.device)]
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape)
        return SpeechOutput.add_up(batch, losses[:, 0], losses[:, 1:], logits[:, 0], logits[:, 1:])


@torch.no_grad()
def generate_dia(model: Dia, batch: Batch, sampling: SamplingValues) -> list[Speech]:
    """Write the frames of a batch of prompts; see ``Family.generate`` and Note [Delay pattern].

    Args:
        model: In evaluation mode.
        batch: From ``DiaFamily.collate_prompts``.
        sampling: How codes are chosen.
    """
    config: Any = model.config
    ids, mask, decoder = batch["text_ids"], batch["text_mask"], config.decoder_config
    num_prompts, num_copies = len(ids), 1 if sampling.guidance_scale == 1 else 2
    if num_copies == 2:  # the second half has no text
        ids, mask = torch.cat([ids, torch.zeros_like(ids)]), mask.repeat(2, 1)
    encoded = model.model.encoder(input_ids=ids, attention_mask=mask)
    cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    choose = _build_chooser(decoder, sampling, ids.device)
    delays = torch.tensor(config.delay_pattern, device=ids.device)
    row = torch.full((num_prompts, len(delays)), decoder.bos_token_id, device=ids.device)
    never = sampling.max_frames + 1  # here speech is cut, at the place of the end
    end = torch.full((num_prompts,), never, device=ids.device)
    has_ended = torch.zeros(num_prompts, dtype=torch.bool, device=ids.device)
    rows: list[Tensor] = []
    while True:
        output = model.model(
            attention_mask=mask,
            encoder_outputs=encoded,
            decoder_input_ids=row.unsqueeze(1).repeat(num_copies, 1, 1),
            past_key_values=cache,
            use_cache=True,
        )
        logits = model.logits_dense(output.last_hidden_state[:, -1]).float()
        row = choose(logits.view(-1, decoder.vocab_size)).view(num_prompts, -1)
        step = len(rows) + 1  # the place that codebook 0 writes: frames from 1 on
        is_found = (row[:, 0] == decoder.eos_token_id) & (end >= step) & ~has_ended
        end, has_ended = torch.where(is_found, step, end), has_ended | is_found
        place = step - delays
        row = torch.where(place <= 0, decoder.bos_token_id, row)
        row = torch.where(place == end.unsqueeze(1), decoder.eos_token_id, row)
        row = torch.where(place > end.unsqueeze(1), decoder.pad_token_id, row)
        rows.append(row)
        if not is_any(step < end + delays.max()):
            break
    return _take_frames(torch.stack(rows, dim=1).cpu(), delays.tolist(), end.tolist(), has_ended.tolist())


def _build_chooser(decoder: Any, sampling: SamplingValues, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function from logits [copies * prompts * codebooks, vocabulary] to codes, as Transformers chooses."""
    generator = torch.Generator(device=device).manual_seed(sampling.seed)
    is_ending = DiaEOSChannelFilterLogitsProcessor(decoder.num_channels, decoder.eos_token_id)
    warpers: list[Any] = [is_ending]
    if sampling.do_sample:
        temperature, *others = build_warpers(sampling.temperature, sampling.top_k, sampling.top_p, keep_all=True)
        warpers = [temperature, is_ending, *others]
    top_k = min(sampling.top_k, decoder.vocab_size) or None
    if sampling.guidance_scale != 1:
        warpers.insert(0, DiaClassifierFreeGuidanceLogitsProcessor(sampling.guidance_scale, top_k))

    def choose(scores: Tensor) -> Tensor:
        num_rows = len(scores) if sampling.guidance_scale == 1 else len(scores) // 2
        before = torch.zeros(num_rows, 0, dtype=torch.int64, device=scores.device)  # only counted
        for warp in warpers:
            scores = warp(before, scores)
        if not sampling.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(1)

    return choose


def _take_frames(rows: Tensor, delays: list[int], ends: list[int], has_ended: list[bool]) -> list[Speech]:
    """Return codes without their delays."""
    speech = []
    for own, end, is_whole in zip(rows, ends, has_ended, strict=True):
        parts = [own[delay : delay + end - 1, i] for i, delay in enumerate(delays)]
        speech.append(Speech(codes=torch.stack(parts, dim=1), has_ended=is_whole))
    return speech
