"""The closed form of speech models beside the exact trace; each family writes down its own step."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planned_steps import estimate, trace
from speech_families import CSM, DEPTH, DIA
from speech_golden import CONFIG
from torch import nn

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.planning.closed_form.engine import StepEstimate
from lit_fsdp.planning.closed_form.model_reader import ModelReader
from lit_fsdp.planning.closed_form.reader import UnreadableModuleError
from lit_fsdp.planning.trace.dry_run import TracedStep
from lit_fsdp.profiling.memory_log import StepMemory
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.shard import Sharding
from lit_fsdp.sharding.wrap import Unit
from lit_fsdp.tasks import TextToSpeech
from lit_fsdp.tasks.masks import keep_branches
from lit_fsdp.tasks.tts.families.family import Family
from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.parts import freeze_parts, list_outside_blocks
from ranks import run_ranks

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
QWEN3: dict[str, Any] = deepcopy(CONFIG)
QWEN3["talker_config"] |= WIDE | {"num_code_groups": 4, "text_hidden_size": 96, "text_vocab_size": 1000}
QWEN3["talker_config"]["code_predictor_config"] |= WIDE | {"hidden_size": 96, "num_code_groups": 4, "vocab_size": 500}
QWEN3["speaker_encoder_config"] |= {"enc_dim": 128}
FAMILIES = {
    "qwen3": QWEN3,
    "csm": CSM
    | WIDE
    | {"vocab_size": 300, "depth_decoder_config": DEPTH | WIDE | {"backbone_hidden_size": 128, "vocab_size": 300}},
    "dia": DIA
    | {
        "encoder_config": DIA["encoder_config"] | WIDE,
        "decoder_config": DIA["decoder_config"] | WIDE | {"cross_hidden_size": 128, "cross_head_dim": 32},
    },
}


class Model(nn.Module):
    """What the task has of a model, without a Trainer."""

    def __init__(self, raw: dict[str, Any], *, mode: str = "full", freeze: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.raw, (self.family, self.config) = raw, parse_family(raw)
        with torch.device("meta"):
            self.model: Any = self.family.build_model(self.config)
        if mode == "qlora":
            quantize_model(self.model, Quantization(), keep=list_outside_blocks(self.model, self.family))
        if mode in ("lora", "qlora"):
            add_adapters(self.model, LoRA(r=8, target_modules=self.family.linears))
        freeze_parts(self.model, self.family, freeze)

    def configure_units(self, model: nn.Module) -> list[Unit]:
        return TextToSpeech(config=self.raw).configure_units(model)

    def read_step(self, step: ModelReader) -> int:
        return self.family.read_step(self.model, step)

    def make_batch(self, rows: int, length: int, *, has_speaker: bool = False) -> dict[str, torch.Tensor]:
        sizes = {"batch_size": rows, "num_text_ids": length, "num_frames": length}
        batch = self.family.make_example_batch(self.config, **sizes)
        return {**batch, "speaker": torch.zeros(rows, self.config.voice_size or 1)} if has_speaker else batch

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        output, (own, other) = self.model(batch), self.family.get_loss_weights(self.config)
        return own * output.talker_loss + other * output.predictor_loss


def ask_both(
    model: dict[str, Any],
    *,
    batch: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[StepEstimate, TracedStep]:
    module, same = Model(**model), Model(**model)
    example = module.make_batch(**(batch or {"rows": 2, "length": 40}))
    options = {"world_size": 2, **options}
    estimated = estimate(same, same.family.measure_batch(example), **options)
    with keep_branches(example):
        return estimated, trace(module, example, **options)


def find_forward_peak(memory: StepMemory) -> int:
    """The most that forward holds."""
    totals = [sum(parts) for parts in zip(*memory.by_kind.values(), strict=True)]
    return max(max(totals[begin:end]) for name, begin, end in memory.phases if name == "forward")


def compare(model: dict[str, Any], options: dict[str, Any], tolerance: float) -> None:
    dist.destroy_process_group()
    estimated, traced = ask_both(model, **options)
    assert estimated.flops == traced.flops
    assert estimated.peak.num_bytes == pytest.approx(traced.memory.peak.num_bytes, rel=tolerance)
    peaks = [find_forward_peak(memory) for memory in (estimated.memory, traced.memory)]
    assert peaks[0] == pytest.approx(peaks[1], rel=tolerance)
    for kind in ("parameters", "optimizer_state", "gathered"):
        assert max(estimated.memory.by_kind[kind]) == max(traced.memory.by_kind[kind]), kind
    assert 0.45 < estimated.moved_bytes / traced.moved_bytes < 0.95


RECOMPUTED = {
    "activation_checkpointing": ActivationCheckpointing(mode="full"),
    "precision": "bf16-mixed",
    "world_size": 4,
}
HELD = {"num_micro_batches": 2, "sharding": Sharding(no_sync=True), "precision": "bf16-true"}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3", {}, {"batch": {"rows": 2, "length": 40, "has_speaker": True}}),
    ("csm", {}, RECOMPUTED),
    ("dia", {"mode": "lora"}, {"precision": "bf16-true"}),
    (
        "qwen3",
        {"mode": "qlora"},
        {"precision": "bf16-true", "activation_checkpointing": ActivationCheckpointing(mode="full"), "world_size": 4},
    ),
]
SLOW: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3", {"mode": "lora"}, RECOMPUTED),
    (
        "qwen3",
        {"freeze": ("text_embedding", "code_predictor")},
        {"activation_checkpointing": ActivationCheckpointing(mode="selective")},
    ),
    ("qwen3", {}, HELD),
    ("qwen3", {}, {"sharding": Sharding(forward_prefetch=2, backward_prefetch=3)}),
    ("csm", {"freeze": ("audio_embedding",)}, {}),
    ("csm", {"mode": "lora"}, HELD),
    ("csm", {"mode": "qlora"}, {"precision": "bf16-true"}),
    ("dia", {"mode": "qlora"}, {"precision": "bf16-mixed", "sharding": Sharding(reshard_after_forward=False)}),
    ("qwen3", {"mode": "qlora"}, HELD),
    ("dia", {"mode": "lora"}, {"sharding": Sharding(reshard_after_forward=False), "precision": "bf16-true"}),
    ("dia", {}, RECOMPUTED),
    ("dia", {"freeze": ("encoder",)}, {"activation_checkpointing": ActivationCheckpointing(mode="selective")}),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "model", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_the_peak_is_within_2_percent_of_the_exact_trace(
    family: str, model: dict[str, Any], options: dict[str, Any]
) -> None:
    run_ranks(compare, {"raw": FAMILIES[family], **model}, options, 0.02, world_size=1)


def test_frames_and_texts_count_apart() -> None:
    model = Model(FAMILIES["qwen3"])
    few, many = (model.family.measure_batch(model.make_batch(2, length)) for length in (8, 16))
    assert many.shapes["frame_index"] == (32,)
    assert (few.rows, few.length) == model.make_batch(2, 8)["text_ids"].shape
    assert many.num_bytes == sum(tensor.nbytes for tensor in model.make_batch(2, 16).values())


def test_adapters_on_heads_have_no_rule_instead_of_being_left_out() -> None:
    model = Model(FAMILIES["qwen3"])
    add_adapters(model.model, LoRA(r=8, target_modules=r"talker\.code_predictor\.lm_head\.\d+"))
    with pytest.raises(UnreadableModuleError, match=r"code_predictor.lm_head: a AdaptedLinear"):
        estimate_one(model)


def test_a_family_that_does_not_write_down_its_step_has_no_rule() -> None:
    model = Model(FAMILIES["csm"])
    model.read_step = lambda step: Family.read_step(model.family, model.model, step)  # type: ignore[method-assign]
    with pytest.raises(UnreadableModuleError, match=r"csm: a family whose step was not written down"):
        estimate_one(model)


def estimate_one(model: Model) -> StepEstimate:
    return estimate(model, model.family.measure_batch(model.make_batch(1, 8)))
