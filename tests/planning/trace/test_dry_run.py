from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planned_steps import run_for_real
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim.factory import Optimizer, build_optimizer
from lit_fsdp.planning.trace.dry_run import fake_ranks, trace_training_step
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization, count_hidden_bytes
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import Sharding
from lit_fsdp.tasks.masks import keep_branches
from ranks import run_ranks

CPU = torch.device("cpu")
SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 2}
BF16 = MixedPrecision(storage_dtype="float32", param_dtype="bfloat16", reduce_dtype="float32")
FP32 = MixedPrecision(storage_dtype="float32")


class Model(nn.Module):
    def __init__(
        self,
        *,
        lora: bool = False,
        quantization: Quantization | None = None,
        model_type: str = "llama",
        **config_settings: Any,
    ) -> None:
        super().__init__()
        with torch.device("meta"):
            config = AutoConfig.for_model(model_type, vocab_size=300, **SIZES, **config_settings)
            self.model = AutoModelForCausalLM.from_config(config)
        if quantization is not None:
            quantize_model(self.model, quantization)
        if lora:
            add_adapters(self.model, LoRA(r=4, dtype="float32"))

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch, use_cache=False).loss


def make_optimizer(settings: Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(module.parameters(), settings, is_scaled=False)


def compare(world_size: int, model: dict[str, Any], strategy: dict[str, Any], options: dict[str, Any]) -> None:
    dist.destroy_process_group()
    options = {"dtypes": FP32, **options}
    make = partial(make_optimizer, options.pop("optimizer", Optimizer(learning_rate=1e-3)))
    ids = torch.arange(2 * 64).view(2, 64) % 300
    document = 32 if options.pop("packed", False) else 64
    batch = {"input_ids": ids, "labels": ids, "position_ids": (torch.arange(64) % document).expand(2, 64)}
    traced = []
    with fake_ranks(world_size):
        settings = Settings(**strategy)
        traced.append(run_for_real(Model(**model), settings, batch, options, make))
        module = Model(**model)
        meta = {name: tensor.to("meta") for name, tensor in batch.items()}
        with keep_branches(batch):
            dry = trace_training_step(
                module,
                settings,
                meta,
                compute_loss=lambda batch: module.step(batch),  # noqa: PLW0108  looked up when it is sharded
                build_optimizer=lambda: make(module),
                step_name="step",
                ranks_per_node=world_size,
                device_type="cpu",
                **options,
            )
        traced.append(dry.memory)
    real, dry = traced
    assert abs(dry.peak.num_bytes / real.peak.num_bytes - 1) < 0.01, (dry.peak, real.peak)
    for kind in ("parameters", "optimizer_state", "gradients", "gathered"):
        assert max(dry.by_kind[kind]) == max(real.by_kind[kind]), kind  # type: ignore[index]
    assert [name for name, _, _ in dry.phases] == [name for name, _, _ in real.phases]


CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}),
    ({}, {"activation_checkpointing": ActivationCheckpointing(mode="full")}, {"dtypes": BF16}),
    ({}, {"mesh": Mesh(replicate=2)}, {}),
    ({}, {"sharding": Sharding(reshard_after_forward=False, no_sync=True)}, {"num_micro_batches": 2}),
    ({}, {}, {"packed": True}),
    ({"lora": True}, {}, {}),
    ({"lora": True, "quantization": Quantization(type="nf4", double_quant=True)}, {}, {}),
    ({}, {}, {"optimizer": Optimizer(name="adamw_8bit")}),
    ({}, {}, {"optimizer": Optimizer(name="adafactor")}),
    ({}, {}, {"optimizer": Optimizer(fused=False)}),
    ({}, {"activation_checkpointing": ActivationCheckpointing(mode="selective")}, {}),
    ({"tie_word_embeddings": True}, {}, {}),
    ({"model_type": "qwen3_moe", **EXPERTS}, {}, {"dtypes": BF16}),
    ({"model_type": "qwen3_moe", **EXPERTS, "lora": True, "quantization": Quantization()}, {}, {"dtypes": BF16}),
    ({"lora": True, "quantization": Quantization(type="int8")}, {}, {"dtypes": BF16}),
    ({"attention_dropout": 0.1}, {"activation_checkpointing": ActivationCheckpointing(mode="full")}, {"dtypes": BF16}),
]


@pytest.mark.full(after=2)
@pytest.mark.parametrize(("model", "strategy", "options"), CASES, ids=str)
def test_a_dry_step_holds_what_a_real_one_holds(model: dict, strategy: dict, options: dict) -> None:
    run_ranks(compare, 4, model, strategy, options, world_size=1)


def test_a_product_with_4_bit_weights_counts_the_weight_that_it_dequantizes() -> None:
    operator = torch.ops.bitsandbytes.gemm_4bit.default
    x, codes, absmax = torch.empty(600, 64, dtype=torch.bfloat16), torch.empty(96 * 32, 1), torch.empty(96)
    args = (x, codes, [96, 64], absmax, 64, "nf4")
    assert count_hidden_bytes(operator, args, {}) == 96 * 64 * 2
    assert count_hidden_bytes(operator, args, {"absmax_8bit": absmax}) == 96 * 64 * 2 + 96 * 4
    assert count_hidden_bytes(torch.ops.aten.mm.default, (x, x), {}) == 0


def refuse_second_group() -> None:
    with pytest.raises(RuntimeError, match="process of its own"), fake_ranks(2):
        pass


def test_a_dry_run_beside_a_real_one_is_refused() -> None:
    run_ranks(refuse_second_group, world_size=1)
