"""Rules of the closed form for vision transformers, beside the exact trace of the same step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planned_steps import estimate, trace
from torch import Tensor, nn
from transformers import AutoConfig

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.planning.closed_form.engine import StepEstimate
from lit_fsdp.planning.closed_form.reader import UnreadableModuleError
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.shard import Sharding
from lit_fsdp.tasks.image_classification.layers import freeze_modules
from lit_fsdp.tasks.image_classification.mixup import Mixup, mix
from lit_fsdp.tasks.image_classification.model import build_classifier, measure_images
from ranks import run_ranks

SMALL = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {"intermediate_size": 1024}
GATED = {"use_swiglu_ffn": True, "drop_path_rate": 0.2}
# Positions are those of larger images than the steps have, and stretched.
LARGER = {"image_size": 518, "patch_size": 14}


class Classifier(nn.Module):
    def __init__(
        self,
        family: str = "dinov2",
        *,
        mode: str = "full",
        attention: str | None = None,
        frozen: Sequence[str] = (),
        is_mixed: bool = False,
        lora_dropout: float = 0.0,
        **sizes: Any,
    ) -> None:
        super().__init__()
        self.is_mixed = is_mixed
        config = AutoConfig.for_model(family, **{**SMALL, "num_labels": 10, **sizes})
        self.model = build_classifier(config, attention)
        if mode == "nf4":
            quantize_model(self.model, Quantization(), keep=["classifier"])
        if mode != "full":
            add_adapters(self.model, LoRA(r=8, dropout=lora_dropout))
        freeze_modules(self.model, frozen, ["classifier"])

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        pixels, labels = batch["pixel_values"], batch["labels"]
        if not self.is_mixed:
            return self.model(pixel_values=pixels, labels=labels).loss
        mixed = mix(pixels, torch.ones_like(labels, dtype=torch.bool), Mixup(mixup_alpha=1.0))
        return self.model(pixel_values=mixed.pixels, labels=labels).loss


def make_pixels(rows: int) -> Tensor:
    return torch.empty(rows, 3, 224, 224, device="meta")


def estimate_images(module: Classifier, *, rows: int = 2, **options: Any) -> StepEstimate:
    micro_batch = measure_images(module.model, make_pixels(rows), is_mixed=module.is_mixed)
    assert micro_batch is not None
    return estimate(module, micro_batch, **{"world_size": 2, **options})


def compare(model: dict[str, Any], options: dict[str, Any]) -> None:
    dist.destroy_process_group()
    rows = options.get("rows", 2)
    batch = {"pixel_values": make_pixels(rows), "labels": torch.empty(rows, dtype=torch.long, device="meta")}
    others = {"world_size": 2, **{name: value for name, value in options.items() if name != "rows"}}
    traced, estimated = trace(Classifier(**model), batch, **others), estimate_images(Classifier(**model), **options)
    peak_bytes = traced.memory.peak.num_bytes
    assert abs(estimated.peak.num_bytes / peak_bytes - 1) < 0.003, (peak_bytes, estimated.peak)
    assert traced.flops == estimated.flops


FULL, SELECTIVE = ActivationCheckpointing(mode="full"), ActivationCheckpointing(mode="selective")
HALF = {"precision": "bf16-true"}
CASES: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"drop_path_rate": 0.2}, {}, True),
    (LARGER, {"precision": "bf16-mixed", "world_size": 4, "rows": 4, "activation_checkpointing": FULL}, False),
    # A scale that does not train is still kept, and a block is computed again up to there.
    ({"mode": "nf4"}, {**HALF, "activation_checkpointing": FULL}, True),
    # What an adapter drops numbers of stays until it has returned.
    ({**GATED, "mode": "nf4", "lora_dropout": 0.1}, {**HALF, "rows": 4, "activation_checkpointing": FULL}, False),
    (
        {"mode": "lora", "drop_path_rate": 0.2},
        {"precision": "bf16-mixed", "world_size": 4, "activation_checkpointing": SELECTIVE},
        False,
    ),
    ({**GATED, **LARGER}, {"world_size": 1, "rows": 3}, False),
    ({**GATED, "mode": "lora"}, {**HALF, "rows": 3, "sharding": Sharding(reshard_after_forward=False)}, False),
    (GATED, {"precision": "bf16-mixed", "world_size": 8, "cpu_offload": CPUOffload()}, False),
    # What was reduced in float32 is cast, and goes to the host then.
    (
        {"num_hidden_layers": 6},
        {**HALF, "world_size": 8, "activation_checkpointing": FULL, "cpu_offload": CPUOffload()},
        True,
    ),
    # Of positions for larger images than these, the gradient is there until it was reduced.
    ({"num_hidden_layers": 2, "image_size": 1036}, {"precision": "bf16-mixed", "world_size": 4, "rows": 1}, True),
    ({"attention": "eager", "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}, {}, False),
    ({"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}, {**HALF, "device_type": "cuda"}, False),
    (
        {"family": "dinov2_with_registers", **GATED, **LARGER},
        {"precision": "bf16-mixed", "activation_checkpointing": SELECTIVE},
        False,
    ),
    ({"family": "dinov2_with_registers", "num_register_tokens": 200}, {"rows": 3}, False),
    ({"family": "deit", **WIDE}, {"rows": 3}, False),
    ({"family": "ijepa", **WIDE, "mode": "lora"}, {**HALF, "activation_checkpointing": FULL}, False),
    # What makes no gradient: blocks that are not trained hold what they were called with.
    ({"frozen": ["backbone"]}, {"rows": 4}, True),
    (
        {"family": "vit", **WIDE, "frozen": ["embeddings", "layers.0"]},
        {**HALF, "activation_checkpointing": FULL},
        False,
    ),
    # Mixtures of images are there beside the images.
    ({"family": "vit", **WIDE, "is_mixed": True}, {"rows": 16, "activation_checkpointing": FULL}, True),
    ({"is_mixed": True}, {**HALF, "rows": 16, "activation_checkpointing": FULL}, False),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "options"),
    [pytest.param(*case, marks=[] if is_quick else pytest.mark.slow) for *case, is_quick in CASES],
    ids=str,
)
def test_the_peak_is_within_a_third_of_a_percent_of_the_exact_trace(
    model: dict[str, Any], options: dict[str, Any]
) -> None:
    run_ranks(compare, model, options, world_size=1)


@pytest.mark.parametrize(
    ("family", "num_tokens"),
    [("vit", 197), ("dinov2", 257), ("dinov2_with_registers", 201), ("deit", 198), ("ijepa", 196)],
)
def test_tokens_are_the_patches_and_those_that_the_model_puts_before_them(family: str, num_tokens: int) -> None:
    module = Classifier(family)
    found = measure_images(module.model, make_pixels(3))
    assert found is not None
    assert (found.rows, found.length) == (3, num_tokens)
    assert 3 * num_tokens * SMALL["hidden_size"] * 4 in read_sizes(module)


def read_sizes(module: Classifier) -> set[int]:
    """Sizes of what the model's blocks return, as it runs."""
    found: set[int] = set()
    for name, child in module.model.named_modules():
        if name.endswith((".0", ".1")):
            child.register_forward_hook(lambda _module, _args, output: found.add(output.nbytes))
    module.model(pixel_values=make_pixels(3))
    return found


@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        # Scales without a module, as BEiT has them, were left out in silence.
        ("beit", {"use_mean_pooling": False}, r"layers.0: a block of .*lambda_1"),
        ("beit", {"layer_scale_init_value": 0.0, "use_relative_position_bias": True}, r"relative_position_bias"),
        ("beit", {"layer_scale_init_value": 0.0, "use_mean_pooling": False}, r"model.beit: blocks beside .*pooler"),
        ("data2vec-vision", {}, r"layer.0: a block of"),
    ],
)
def test_what_has_no_rule_is_traced_and_not_left_out(family: str, sizes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnreadableModuleError, match=reason):
        estimate_images(Classifier(family, **WIDE, **sizes))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model.dinov2.embeddings, "scale", nn.Parameter(torch.ones(1))), "patches with scale"),
        (
            lambda model: setattr(model.dinov2.embeddings, "norm", nn.LayerNorm(256)),
            "patches with patch_embeddings, norm",
        ),
        (lambda model: setattr(model.dinov2.encoder, "drop", nn.Dropout(0.2)), "a dropout drop of 0.2"),
        (lambda model: setattr(model.dinov2.encoder.layer[0], "mixer", nn.Tanh()), r"layer.0: a block of .*mixer"),
        (lambda model: setattr(model, "extra", nn.Linear(512, 10)), "2 heads"),
        (lambda model: setattr(model, "classifier", nn.Linear(768, 10)), "a head over 768 numbers, of tokens of 256"),
        (lambda model: setattr(model, "between", nn.Tanh()), "a head of dinov2, classifier, between"),
    ],
    ids=["parameter", "norm", "dropout", "module", "heads", "head", "between"],
)
def test_a_part_that_was_put_in_is_named(change: Any, reason: str) -> None:
    module = Classifier()
    change(module.model)
    with pytest.raises(UnreadableModuleError, match=reason):
        estimate_images(module)
