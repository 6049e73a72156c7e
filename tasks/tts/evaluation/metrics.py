"""What validation of speech counts, over all ranks: losses, accuracy of each codebook, ends that were predicted."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_fsdp.tasks.tts.families.family import SpeechOutput
from lit_fsdp.tasks.tts.utterance import Batch


class SpeechMetrics(Metric):
    """Losses and accuracies under the true codes.

    Args:
        num_codebooks: Codes in a frame.
        weights: Of the talker's and the predictor's loss.
    """

    full_state_update = False
    talker_loss: Tensor
    predictor_loss: Tensor
    num_tokens: Tensor
    num_frames: Tensor
    num_ends: Tensor
    found_ends: Tensor
    correct: Tensor  # [codebooks]

    def __init__(self, num_codebooks: int, weights: tuple[float, float]) -> None:
        super().__init__()
        self.weights = weights
        for name in ("talker_loss", "predictor_loss", "num_tokens", "num_frames", "num_ends", "found_ends"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("correct", torch.zeros(num_codebooks, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, output: SpeechOutput, batch: Batch) -> None:
        """Add a batch."""
        weights, frame_weights = batch["label_weights"].double(), batch["frame_weights"].double()
        is_end, right = output.is_end, (output.logits.argmax(-1) == output.labels) * weights
        self.correct[0] += right[~is_end].sum()
        self.found_ends += right[is_end].sum()
        self.num_ends += weights[is_end].sum()
        if output.is_frame is not None:
            frame_weights = frame_weights * output.is_frame
        others = output.predictor_logits.argmax(-1) == output.predictor_labels
        self.correct[1:] += (others * frame_weights[:, None]).sum(0)
        for name in ("talker_loss", "predictor_loss", "num_tokens", "num_frames"):
            getattr(self, name).add_(getattr(output, name).double())

    def compute(self) -> dict[str, Tensor]:
        """Return all of it by name, without a prefix."""
        talker = self.talker_loss / self.num_tokens.clamp(min=1)
        predictor = self.predictor_loss / self.num_frames.clamp(min=1)
        loss = self.weights[0] * talker + self.weights[1] * predictor
        found = {"loss": loss, "talker_loss": talker, "sub_talker_loss": predictor}
        found["eos_recall_pct"] = 100 * self.found_ends / self.num_ends.clamp(min=1)
        shares = 100 * self.correct / (self.num_tokens - self.num_ends).clamp(min=1)
        found |= {f"accuracy_codebook_{i:02}_pct": share for i, share in enumerate(shares)}
        return {name: value.float() for name, value in found.items()}
