"""How a case of ``plan_cases.py`` becomes a step: its model with its loss, its batch and its settings."""

from __future__ import annotations

from typing import Any

import torch
from plan_cases import IMAGE, Case
from plan_models import FAMILIES, IMAGE_TOKENS, SPEECH
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.closed_form.model_reader import ModelReader
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import Sharding
from lit_fsdp.sharding.wrap import Unit
from lit_fsdp.tasks import TextToSpeech
from lit_fsdp.tasks.causal_lm.chunked_loss import install_chunked_loss, sum_chunked_losses
from lit_fsdp.tasks.image_classification.model import build_classifier, measure_images
from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.parts import list_outside_blocks


class Model(nn.Module):
    """A model of Transformers with the loss that it computes itself, on the meta device."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        sizes = {**FAMILIES[case.family], **case.change}
        implementation = sizes.pop("attn_implementation", "sdpa")
        config = AutoConfig.for_model(case.family, **sizes)
        if case.family in IMAGE_TOKENS:
            self.model = build_classifier(config, implementation)
        else:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        if case.mode in ("nf4", "int8"):
            quantize_model(self.model, Quantization(type=case.mode))  # type: ignore[arg-type]
        if case.mode != "full":
            add_adapters(self.model, LoRA(r=16, dropout=case.dropout, use_dora=case.mode == "dora"))
        self.is_chunked = case.loss_chunks > 1
        if self.is_chunked:
            install_chunked_loss(self.model, case.loss_chunks)

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss."""
        if self.is_chunked:
            return sum_chunked_losses(self.model, {"input_ids": batch["input_ids"]}, batch["labels"])
        cache = {"use_cache": False} if "input_ids" in batch else {}
        return self.model(**batch, **cache).loss


class SpeechModel(nn.Module):
    """A speech model with its losses and FSDP units as those of its task, on the meta device."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        raw = {"model_type": case.family, **SPEECH[case.family]}
        family, config = parse_family(raw)
        with torch.device("meta"):
            self.model: Any = family.build_model(config)
        if case.mode == "nf4":
            quantize_model(self.model, Quantization(), keep=list_outside_blocks(self.model, family))
        if case.mode != "full":
            add_adapters(self.model, LoRA(r=16, target_modules=family.linears))
        self._family, self._weights, self._raw = family, family.get_loss_weights(config), raw

    def configure_units(self, model: nn.Module) -> list[Unit]:
        """Return the units that the task plans."""
        return TextToSpeech(config=self._raw).configure_units(model)

    def read_step(self, step: ModelReader) -> int:
        """Put a step on the tape of the closed form, as the task does."""
        return self._family.read_step(self.model, step)

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss."""
        output, (own, other) = self.model(batch), self._weights
        return own * output.talker_loss + other * output.predictor_loss


def make_model(case: Case) -> Model | SpeechModel:
    """Return the model of a case, on the meta device."""
    return SpeechModel(case) if case.family in SPEECH else Model(case)


def make_batch(case: Case) -> dict[str, Tensor]:
    """Return a micro-batch of zeros."""
    if case.family in SPEECH:
        family, config = parse_family({"model_type": case.family, **SPEECH[case.family]})
        sizes = {"batch_size": case.rows, "num_text_ids": case.length, "num_frames": case.length}
        return family.make_example_batch(config, **sizes)
    if case.family in IMAGE_TOKENS:
        pixels = torch.zeros(case.rows, *IMAGE)
        return {"pixel_values": pixels, "labels": torch.zeros(case.rows, dtype=torch.long)}
    ids = torch.zeros(case.rows, case.length, dtype=torch.long)
    positions = (torch.arange(case.length) % -(-case.length // 4)).expand_as(ids)
    packed = {"position_ids": positions.clone()} if case.is_packed else {}
    return {"input_ids": ids, "labels": ids.clone(), **packed}


def make_micro_batch(case: Case) -> MicroBatch:
    """Return the shape of a micro-batch."""
    if case.family in SPEECH:
        return parse_family({"model_type": case.family, **SPEECH[case.family]})[0].measure_batch(make_batch(case))
    if case.family in IMAGE_TOKENS:
        return measure_images(make_model(case), make_batch(case)["pixel_values"])
    return MicroBatch(rows=case.rows, length=case.num_tokens, is_masked=case.is_packed)


def make_settings(case: Case) -> Settings:
    """Return the settings of the strategy."""
    recompute: Any = ActivationCheckpointing(mode=case.recompute)  # type: ignore[arg-type]
    return Settings(
        **{
            "activation_checkpointing": recompute,
            "sharding": Sharding(reshard_after_forward=case.reshard),
            **case.settings,
        }
    )


def make_optimizer(case: Case) -> Optimizer:
    """Return the settings of the optimizer."""
    return Optimizer(name=case.optimizer)  # type: ignore[arg-type]
