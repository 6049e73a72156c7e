"""Qwen3-TTS: talker, code predictor and speaker encoder as one model, its loss, and how it speaks.

Note [Loss of speech]: the loss is the talker's cross-entropy over all frames and ends, plus ``0.3`` times the code
predictor's over codebooks 1 and up of all frames. Each is a mean of its own over the whole optimizer step, all ranks
and micro-batches, so the model returns sums and counts. The two counts differ (an utterance has one end), and the
ratio between them must be known before backward: see ``StepCounts``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fsdp.tasks.tts.config import SpeechConfig
from lit_fsdp.tasks.tts.families.family import SpeechOutput
from lit_fsdp.tasks.tts.families.qwen3_runs import ModuleRun, StepRun, Steps, build_steps
from lit_fsdp.tasks.tts.families.qwen3_talker import Talker
from lit_fsdp.tasks.tts.families.speaker_encoder import SpeakerEncoder
from lit_fsdp.tasks.tts.generation import Chooser, Frame, SamplingValues, Speech, cut_at_ends, is_any
from lit_fsdp.tasks.tts.utterance import Batch

PREDICTOR_WEIGHT = 0.3


class Qwen3TTS(nn.Module):
    """The speech model of a checkpoint, without its codec, under the official names.

    Args:
        config: Sizes and ids.
        attention: Implementation of attention, a name of Transformers'.
    """

    def __init__(self, config: SpeechConfig, attention: str = "sdpa") -> None:
        super().__init__()
        for part in (config.talker, config.predictor):
            part._attn_implementation = attention
        self.config = config
        self.talker = Talker(config)
        self.speaker_encoder = SpeakerEncoder(config.speaker_encoder) if config.speaker_encoder is not None else None
        if self.speaker_encoder is not None:
            self.speaker_encoder.requires_grad_(False)
        self.steps: Steps | None = None

    def prepare_speaking(self) -> None:
        """Arrange the weights for speaking only, where Note [Steps by hand] holds; afterwards they must not move."""
        self.steps = build_steps(self.talker)

    def get_input_embeddings(self) -> nn.Module:
        """Return the text embedding, the largest one."""
        return self.talker.model.text_embedding

    def _init_weights(self, module: nn.Module) -> None:
        """Draw what lies outside the transformers: as those draw theirs, convolutions by torch's default."""
        std = self.config.talker.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv1d):
            module.reset_parameters()

    def forward(self, batch: Batch) -> SpeechOutput:
        """Return losses and logits under the true codes; see Note [Loss of speech].

        Args:
            batch: From ``collate_training``.
        """
        states = self.compute_states(batch).flatten(0, 1)  # [batch * length, size]
        codes = batch["codes"].flatten(0, 1)[batch["frame_index"]]  # [frames, codebooks]
        logits = self.talker.codec_head(states[batch["state_index"]])
        # Not at the frame: there the talker has read all its codebooks.
        before = states[batch["frame_index"] - 1]
        embedded = self.talker.embed_codes(codes)[:-1]
        predicted = self.talker.code_predictor(before, embedded)  # [frames, codebooks - 1, vocabulary]
        losses = F.cross_entropy(logits.float(), batch["labels"], reduction="none")
        others = F.cross_entropy(predicted.flatten(0, 1).float(), codes[:, 1:].flatten(), reduction="none")
        others = others.view(len(codes), -1).mean(1)
        return SpeechOutput(
            talker_loss=(losses * batch["label_weights"]).sum(),
            predictor_loss=(others * batch["frame_weights"]).sum(),
            num_tokens=batch["label_weights"].sum(),
            num_frames=batch["frame_weights"].sum(),
            logits=logits,
            predictor_logits=predicted,
            labels=batch["labels"],
            is_end=batch["labels"] == self.config.ids.eos,
            predictor_labels=codes[:, 1:],
        )

    def compute_states(self, batch: Batch) -> Tensor:
        """Return the states of the talker [batch, length, size] over whole utterances."""
        inputs = self.embed_tracks(batch)
        frame_mask = batch["frame_mask"].unsqueeze(-1)
        for embedded in self.talker.embed_codes(batch["codes"])[1:]:
            inputs = inputs + embedded * frame_mask
        # No mask: padding is on the right, where causal attention does not look.
        return self.talker.run(inputs, None, use_cache=False).last_hidden_state

    def embed_tracks(self, batch: Batch) -> Tensor:
        """Return the sum of text and codec track [batch, length, size].

        Of frames that are learned codebook 0 is included, of frames to go on from all are.
        """
        text = self.talker.embed_text(batch["text_ids"]) * batch["attention_mask"].unsqueeze(-1)
        codec = self.talker.model.codec_embedding(batch["codec_ids"]) * batch["codec_mask"].unsqueeze(-1)
        if "speaker" in batch:  # added by a mask: writing in place would break the gradient of the embedding
            speaker = batch["speaker"].to(codec.dtype).unsqueeze(1)
            codec = codec + speaker * batch["speaker_mask"].unsqueeze(-1)
        if "context_codes" in batch:  # added up in the order of the official inference, so that bits are equal
            frames = torch.stack(self.talker.embed_codes(batch["context_codes"]), dim=2).sum(2)
            codec = codec + frames * batch["context_mask"].unsqueeze(-1)
        return text + codec


def generate_qwen3(model: Qwen3TTS, batch: Batch, sampling: SamplingValues) -> list[Speech]:
    """Write the frames of a batch of prompts; see ``Family.generate``.

    Args:
        model: In evaluation mode.
        batch: From ``collate_prompts``.
        sampling: How codes are chosen.
    """
    written = list(write_qwen3(model, batch, sampling))
    none = torch.zeros(len(batch["text_ids"]), 0, model.config.num_codebooks, dtype=torch.int64)
    frames = [frame.codes for frame in written if frame.codes is not None]
    return cut_at_ends(torch.stack(frames, dim=1) if frames else none, torch.stack([f.is_end for f in written], dim=1))


@torch.no_grad()
def write_qwen3(model: Qwen3TTS, batch: Batch, sampling: SamplingValues) -> Iterator[Frame]:
    """Yield the frames of a batch of prompts as they are written; see ``Family.write``.

    Args:
        model: In evaluation mode.
        batch: From ``collate_prompts``.
        sampling: How codes are chosen.
    """
    config, talker = model.config, model.talker
    device = batch["text_ids"].device
    generator = torch.Generator(device=device).manual_seed(sampling.seed)
    choose = Chooser(sampling, generator, suppressed=config.suppressed_ids, late=config.ids.eos)
    run = ModuleRun(talker) if model.steps is None else StepRun(model.steps)
    state = run.begin(model.embed_tracks(batch), batch["attention_mask"])
    trailing = talker.embed_text(batch["trailing_ids"])
    pad = talker.embed_text(torch.tensor([[config.ids.tts_pad]], device=device))
    is_open = torch.ones(len(state), dtype=torch.bool, device=device)
    firsts: list[Tensor] = []  # of codebook 0, ends included
    while True:
        first = choose.pick_first(talker.codec_head(state).float(), firsts)
        first = torch.where(is_open, first, config.ids.eos)
        firsts.append(first)
        is_end = first == config.ids.eos
        is_open = is_open & ~is_end
        num_frames = len(firsts) - 1
        # One frame less than picks, so that the last pick may be the end.
        if not is_any(is_open) or num_frames == sampling.max_frames:
            yield Frame(codes=None, is_end=is_end)
            return
        codes, embedded = _predict_others(model, run, first, state, choose)
        yield Frame(codes=codes, is_end=is_end)
        text = trailing[:, num_frames : num_frames + 1] if num_frames < trailing.shape[1] else pad
        state = run.advance(embedded.sum(1, keepdim=True) + text)


def _predict_others(
    model: Qwen3TTS, run: ModuleRun | StepRun, first: Tensor, state: Tensor, choose: Chooser
) -> tuple[Tensor, Tensor]:
    """Return the codes [batch, codebooks] of a frame and their embeddings [batch, codebooks, size]."""
    talker, predictor = model.talker, model.talker.code_predictor
    embedded = [talker.model.codec_embedding(first)]
    codes = [first]
    inputs = torch.stack([state, embedded[0]], dim=1)
    run.begin_frame()
    for head, table in zip(predictor.lm_head, predictor.model.codec_embedding, strict=True):
        hidden = run.advance_frame(predictor.small_to_mtp_projection(inputs))
        # As of codebook 0: the head may have rows for more codes than the codec.
        codes.append(choose.pick_other(head(hidden)[:, : model.config.codebook_size].float()))
        embedded.append(table(codes[-1]))
        inputs = embedded[-1].unsqueeze(1)
    return torch.stack(codes, dim=1), torch.stack(embedded, dim=1)
