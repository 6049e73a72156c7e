"""``Qwen3TTS``: talker, code predictor and speaker encoder as one model, and its loss.

Note [Loss of speech]: the loss is the talker's cross-entropy over all frames and ends, plus ``0.3`` times the code
predictor's over codebooks 1 and up of all frames. Each is a mean of its own over the whole optimizer step, all ranks
and micro-batches, so the model returns sums and counts. The two counts differ (an utterance has one end), and the
ratio between them must be known before backward: see ``step_counts`` in ``task.py``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fsdp.tasks.tts.config import SpeechConfig
from lit_fsdp.tasks.tts.families.family import SpeechOutput
from lit_fsdp.tasks.tts.families.qwen3_talker import Talker, set_attention
from lit_fsdp.tasks.tts.families.speaker_encoder import SpeakerEncoder
from lit_fsdp.tasks.tts.layout import Batch

PREDICTOR_WEIGHT = 0.3


class Qwen3TTS(nn.Module):
    """The speech model of a checkpoint, without its codec, under the official names.

    Args:
        config: Sizes and ids.
        attention: Implementation of attention, a name of Transformers'.
    """

    def __init__(self, config: SpeechConfig, attention: str = "sdpa") -> None:
        super().__init__()
        set_attention(config, attention)
        self.config = config
        self.talker = Talker(config)
        self.speaker_encoder = SpeakerEncoder(config.speaker_encoder) if config.speaker_encoder is not None else None
        if self.speaker_encoder is not None:
            self.speaker_encoder.requires_grad_(False)

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
        """Return the sum of text and codec track [batch, length, size], codebook 0 of frames included."""
        text = self.talker.embed_text(batch["text_ids"]) * batch["attention_mask"].unsqueeze(-1)
        codec = self.talker.model.codec_embedding(batch["codec_ids"]) * batch["codec_mask"].unsqueeze(-1)
        if "speaker" in batch:  # added by a mask: writing in place would break the gradient of the embedding
            speaker = batch["speaker"].to(codec.dtype).unsqueeze(1)
            codec = codec + speaker * batch["speaker_mask"].unsqueeze(-1)
        return text + codec


def list_parts(model: Qwen3TTS) -> dict[str, nn.Module | None]:
    """Return the parts of a model by name."""
    talker = model.talker
    return {
        "talker layers": talker.model.layers,
        "text_embedding": talker.model.text_embedding,
        "codec_embedding": talker.model.codec_embedding,
        "text_projection": talker.text_projection,
        "norm": talker.model.norm,
        "codec_head": talker.codec_head,
        "code_predictor": talker.code_predictor,
        "speaker_encoder": model.speaker_encoder,
    }


def load_model(folder: Path, *, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Qwen3TTS:
    """Return a model with the weights of a folder, on the CPU, whole: for what is not trained.

    Raises:
        ValueError: The files do not fit, tensor by tensor.
    """
    from lit_fsdp.tasks.tts.config import read_config
    from lit_fsdp.weights.load import load_weights, materialize

    with torch.device("meta"):
        model = Qwen3TTS(read_config(folder), attention).to(dtype)
    materialize(model, torch.device("cpu"))
    load_weights(model, folder)
    return model.eval()
