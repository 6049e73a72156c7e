"""The talker, which writes codebook 0 and the end, and its code predictor, which writes the other codebooks.

Both are Transformers' ``Qwen3Model`` with embeddings of their own, under the names of the official checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, Qwen3Model

from lit_fsdp.tasks.tts.config import SpeechConfig


class TalkerModel(Qwen3Model):
    """The transformer of the talker, with a text and a codec embedding.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__(config.talker)
        del self.embed_tokens
        self.codec_embedding = nn.Embedding(config.talker.vocab_size, config.talker.hidden_size)
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)

    def get_input_embeddings(self) -> nn.Module:
        """Return the text embedding: large enough to be a unit of its own."""
        return self.text_embedding


class CodePredictorModel(Qwen3Model):
    """The transformer of the code predictor, with an embedding for each codebook that it reads.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__(config.predictor)
        del self.embed_tokens
        shape = config.predictor.vocab_size, config.talker.hidden_size
        self.codec_embedding = nn.ModuleList(nn.Embedding(*shape) for _ in range(config.num_codebooks - 1))

    def get_input_embeddings(self) -> nn.Module:
        """Refuse: there is one for each codebook."""
        raise NotImplementedError


class TextProjection(nn.Module):
    """From the width of the text embedding to that of the talker."""

    def __init__(self, size: int, num_out: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(size, size)
        self.linear_fc2 = nn.Linear(size, num_out)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [..., text_hidden_size] to [..., hidden_size]."""
        return self.linear_fc2(F.silu(self.linear_fc1(hidden)))


class CodePredictor(nn.Module):
    """Writes codebooks 1 and up of a frame, from the state in which the talker wrote its codebook 0.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.model = CodePredictorModel(config)
        size, given = config.predictor.hidden_size, config.talker.hidden_size
        heads = (nn.Linear(size, config.predictor.vocab_size, bias=False) for _ in range(config.num_codebooks - 1))
        self.lm_head = nn.ModuleList(heads)
        self.small_to_mtp_projection = nn.Linear(given, size) if size != given else nn.Identity()

    def forward(self, hidden: Tensor, embedded: Sequence[Tensor]) -> Tensor:
        """Return logits [frames, codebooks - 1, vocabulary] under the true codes.

        Args:
            hidden: States of the talker at the position *before* each frame, which wrote its codebook 0:
                [frames, size].
            embedded: Codebooks 0 to the last but one, each [frames, size].
        """
        inputs = torch.stack([hidden, *embedded], dim=1)
        states = self.run(self.small_to_mtp_projection(inputs))
        return torch.stack([head(states[:, i]) for i, head in enumerate(self.lm_head, start=1)], dim=1)

    def run(self, inputs: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the states of the transformer over inputs of its own width [frames, length, size]."""
        output = self.model(inputs_embeds=inputs, past_key_values=cache, use_cache=cache is not None)
        return output.last_hidden_state


class Talker(nn.Module):
    """Writes codebook 0 and the end of an utterance, and holds all that writing needs.

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.model = TalkerModel(config)
        self.text_projection = TextProjection(config.text_hidden_size, config.talker.hidden_size)
        self.codec_head = nn.Linear(config.talker.hidden_size, config.talker.vocab_size, bias=False)
        self.code_predictor = CodePredictor(config)

    def embed_text(self, ids: Tensor) -> Tensor:
        """Return text ids [...] as inputs [..., size]."""
        return self.text_projection(self.model.text_embedding(ids))

    def embed_codes(self, codes: Tensor) -> list[Tensor]:
        """Return frames [..., codebooks] as one [..., size] for each codebook; a frame's input is their sum."""
        tables = [self.model.codec_embedding, *self.code_predictor.model.codec_embedding]
        return [table(codes[..., i]) for i, table in enumerate(tables)]

    def run(self, inputs: Tensor, attention_mask: Tensor | None, **options: Any) -> Any:
        """Return the output of the transformer over inputs [batch, length, size]."""
        return self.model(inputs_embeds=inputs, attention_mask=attention_mask, **options)
