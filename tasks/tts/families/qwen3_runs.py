"""One generation of speech with Qwen3-TTS, position by position: through its modules, or by hand where that can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lit_fsdp.tasks.tts.families.qwen3_steps import StepCache, TransformerSteps, can_step, lay_out
from lit_fsdp.tasks.tts.families.qwen3_talker import Talker


class ModuleRun:
    """Computes talker and code predictor through their modules: sharded, adapted or quantized, as they may be.

    Args:
        talker: With its code predictor.
    """

    def __init__(self, talker: Talker) -> None:
        self._talker = talker
        self._mask = torch.empty(0)
        config: Any = talker.model.config
        self._cache, self._frame_cache = DynamicCache(config=config), DynamicCache()

    def begin(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Read prompts; return the state [batch, size] after them.

        Args:
            inputs: Embedded [batch, length, size].
            mask: 0 where a prompt is filled up on the left [batch, length].
        """
        self._mask = mask
        return self._run(inputs, (mask.cumsum(-1) - 1).clamp(min=0))

    def advance(self, inputs: Tensor) -> Tensor:
        """Read a frame [batch, 1, size]; return the state [batch, size] after it."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(inputs), 1)], dim=1)
        return self._run(inputs, self._mask.sum(-1, keepdim=True) - 1)

    def begin_frame(self) -> None:
        """Let the code predictor begin with another frame."""
        config: Any = self._talker.code_predictor.model.config
        self._frame_cache = DynamicCache(config=config)

    def advance_frame(self, inputs: Tensor) -> Tensor:
        """Read the next inputs of the code predictor [batch, length, its size]; return its state [batch, its size]."""
        return self._talker.code_predictor.run(inputs, self._frame_cache)[:, -1]

    def _run(self, inputs: Tensor, places: Tensor) -> Tensor:
        options = {"position_ids": places, "past_key_values": self._cache, "use_cache": True}
        return self._talker.run(inputs, self._mask, **options).last_hidden_state[:, -1]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Talker and code predictor by hand: Note [Steps by hand]."""

    talker: TransformerSteps
    predictor: TransformerSteps
    num_codebooks: int


def build_steps(talker: Talker) -> Steps | None:
    """Return the steps of a model that only speaks from now on; ``None`` where its modules must compute them."""
    predictor = talker.code_predictor
    if not (can_step(talker.model) and can_step(predictor.model)):
        return None
    heads = [talker.codec_head, *predictor.lm_head]
    for head in heads:
        if type(head) is nn.Linear:
            lay_out([head])
    return Steps(
        talker=TransformerSteps(talker.model),
        predictor=TransformerSteps(predictor.model),
        num_codebooks=len(heads),
    )


class StepRun:
    """The same as ``ModuleRun`` by hand.

    Args:
        steps: Of the model.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._cache: StepCache | None = None
        self._frame_cache: StepCache | None = None
        self._mask: Tensor | None = None  # None where no prompt is filled up

    def begin(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """As ``ModuleRun.begin``."""
        length = inputs.shape[1]
        self._cache = StepCache(self._steps.talker, len(inputs), 2 * length)
        self._frame_cache = StepCache(self._steps.predictor, len(inputs), self._steps.num_codebooks)
        if bool(mask.all()):
            return self._steps.talker.run(inputs, self._cache)[:, -1]
        self._mask = mask.bool()
        before = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        own = torch.eye(length, dtype=torch.bool, device=mask.device)  # a place that fills up has to see something
        seen = (before & self._mask[:, None]) | own
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        return self._steps.talker.run(inputs, self._cache, places, seen[:, None])[:, -1]

    def advance(self, inputs: Tensor) -> Tensor:
        """As ``ModuleRun.advance``."""
        assert self._cache is not None
        if self._mask is None:
            return self._steps.talker.run(inputs, self._cache)[:, -1]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(inputs), 1)], dim=1)
        places = self._mask.sum(-1, keepdim=True) - 1
        return self._steps.talker.run(inputs, self._cache, places, self._mask[:, None, None])[:, -1]

    def begin_frame(self) -> None:
        """As ``ModuleRun.begin_frame``."""
        assert self._frame_cache is not None
        self._frame_cache.reset()

    def advance_frame(self, inputs: Tensor) -> Tensor:
        """As ``ModuleRun.advance_frame``."""
        assert self._frame_cache is not None
        return self._steps.predictor.run(inputs, self._frame_cache)[:, -1]
