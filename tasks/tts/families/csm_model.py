"""CSM: Transformers' model without its codec, its loss, and how it speaks."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CsmConfig, CsmForConditionalGeneration, DynamicCache

from lit_fsdp.tasks.tts.families.family import SpeechOutput
from lit_fsdp.tasks.tts.generation import Chooser, SamplingValues, Speech, cut_at_ends, is_any
from lit_fsdp.tasks.tts.utterance import Batch


class Csm(CsmForConditionalGeneration):
    """A backbone that writes codebook 0 and a depth decoder that writes the others, under the official names.

    The codec, which is part of the official model, is left out: training has no use for it.

    Args:
        config: Of the official model.
    """

    def __init__(self, config: CsmConfig) -> None:
        super().__init__(config)
        del self.codec_model

    def get_input_embeddings(self) -> nn.Module:
        """Return the text embedding: large enough to be a unit of its own."""
        return self.embed_text_tokens

    def forward(self, batch: Batch) -> SpeechOutput:
        """Return losses and logits under the true codes; see Note [Two losses].

        Both are the official ones: the end is a frame whose codes are all ``codebook_eos_token_id``, and both the
        backbone and the depth decoder learn it.

        Args:
            batch: From ``CsmFamily.collate``.
        """
        inputs = self.embed(batch)
        # No mask: padding is on the right, where causal attention does not look.
        states = self.backbone_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        before = states.flatten(0, 1)[batch["state_index"]]  # [frames and ends, size]
        targets = batch["targets"]  # [frames and ends, codebooks]
        logits = self.lm_head(before)
        predicted = self._predict_others(before, targets)
        losses = F.cross_entropy(logits.float(), targets[:, 0], reduction="none")
        others = F.cross_entropy(predicted.flatten(0, 1).float(), targets[:, 1:].flatten(), reduction="none")
        return SpeechOutput.add_up(batch, losses, others.view(len(targets), -1), logits, predicted)

    def embed(self, batch: Batch) -> Tensor:
        """Return texts and frames as inputs of the backbone [batch, length, size]."""
        text = self.embed_text_tokens(batch["text_ids"])
        audio = self.backbone_model.embed_tokens(batch["codes"])
        return torch.where(batch["frame_mask"].unsqueeze(-1), audio, text)

    def _predict_others(self, before: Tensor, targets: Tensor) -> Tensor:
        """Return logits [frames, codebooks - 1, vocabulary] under the true codes."""
        # The state of the backbone takes the place of the first one.
        ids = F.pad(targets[:, :-1], (1, 0))
        if len(ids) == ids.shape[1]:
            # As many frames as codebooks: its positions [length] are then taken for [frames, length], and it fails.
            # Seen in transformers 5.23.
            ids, before = torch.cat([ids, ids[:1]]), torch.cat([before, before[:1]])
        logits = self.depth_decoder(input_ids=ids, backbone_last_hidden_state=before, use_cache=False).logits
        return logits[: len(targets)]


@torch.no_grad()
def generate_csm(model: Csm, batch: Batch, sampling: SamplingValues) -> list[Speech]:
    """Write the frames of a batch of prompts; see ``Family.generate``.

    Args:
        model: In evaluation mode.
        batch: From ``CsmFamily.collate_prompts``.
        sampling: How codes are chosen.
    """
    config: Any = model.config
    eos, codebook_size = config.codebook_eos_token_id, config.codec_config.codebook_size
    mask, cache = batch["attention_mask"], DynamicCache(config=config)
    generator = torch.Generator(device=mask.device).manual_seed(sampling.seed)
    # The codec knows no codes from there on.
    choose = Chooser(sampling, generator, suppressed=list(range(codebook_size, config.vocab_size)))
    inputs = model.embed(batch)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    is_open = torch.ones(len(mask), dtype=torch.bool, device=mask.device)
    frames: list[Tensor] = []  # each [batch, codebooks], ends included
    while True:
        output = model.backbone_model(
            inputs_embeds=inputs, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        state = output.last_hidden_state[:, -1]
        first = choose.pick_first(model.lm_head(state).float(), [frame[:, 0] for frame in frames])
        codes = _write_depth(model, state, first, choose)
        codes = torch.where(is_open.unsqueeze(1), codes, eos)
        frames.append(codes)
        is_open = is_open & (codes != eos).any(1)
        # One frame more than wanted, so that the last one may be the end.
        if not is_any(is_open) or len(frames) > sampling.max_frames:
            break
        inputs = model.backbone_model.embed_tokens(codes.unsqueeze(1))
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        positions = mask.sum(-1, keepdim=True) - 1
    written = torch.stack(frames, dim=1)
    return cut_at_ends(written[:, : sampling.max_frames], (written == eos).all(-1))


def _write_depth(model: Csm, state: Tensor, first: Tensor, choose: Chooser) -> Tensor:
    """Return all codes [batch, codebooks] of a frame from the state of the backbone and its codebook 0."""
    decoder, config = model.depth_decoder, cast(Any, model.config)
    num_codebooks, codebook_size = config.num_codebooks, config.codec_config.codebook_size
    cache = DynamicCache(config=decoder.config)
    codes = [first]
    ids, before = torch.stack([torch.zeros_like(first), first], dim=1), state
    while len(codes) < num_codebooks:
        # Only the first call reads the state.
        options = {"backbone_last_hidden_state": before} if len(codes) == 1 else {}
        logits = decoder(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **options).logits
        codes.append(choose.pick_other(logits[:, -1, :codebook_size].float()))
        ids = codes[-1].unsqueeze(1)
    return torch.stack(codes, dim=1)
