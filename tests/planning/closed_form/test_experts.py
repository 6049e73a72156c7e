"""The closed form of quantized experts, which no trace without values can follow, against real steps."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from closed_form_models import Model, estimate_lm
from planned_steps import run_for_real
from torch import Tensor

from lit_fsdp.optim.factory import Optimizer, build_optimizer
from lit_fsdp.planning.closed_form.reader import UnreadableModuleError
from lit_fsdp.planning.trace.dry_run import fake_ranks
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.mixed_precision import read_precision
from lit_fsdp.sharding.settings import Settings
from ranks import run_ranks

QWEN = {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MIXTRAL = {"family": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256}


def spread_evenly(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    logits, scores, chosen = output
    num_tokens, num_experts = logits.shape
    places = torch.arange(num_tokens)[:, None] + torch.arange(chosen.shape[1])
    return logits, scores, places % num_experts


def compare(model: dict[str, Any], rows: int, length: int, settings: dict[str, Any]) -> None:
    dist.destroy_process_group()
    module = Model(mode="nf4", **model)
    routers = [m for m in module.modules() if type(m).__name__.endswith("TopKRouter")]
    assert routers
    for router in routers:
        router.register_forward_hook(spread_evenly)
    ids = torch.arange(rows * length).view(rows, length) % 1000
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(length).expand(rows, length)}
    with fake_ranks(2):
        options = {"dtypes": read_precision("bf16-true")}
        make: Any = lambda m: build_optimizer(m.parameters(), Optimizer())  # noqa: E731
        real = run_for_real(module, Settings(**settings), batch, options, make)  # type: ignore[arg-type]
    sizes: Any = {"rows": rows, "length": length, "world_size": 2}
    estimated = estimate_lm(Model(mode="nf4", **model), precision="bf16-true", **sizes, **settings)
    assert abs(estimated.peak.num_bytes / real.peak.num_bytes - 1) < 0.03, (real.peak, estimated.peak)


def test_quantized_experts_move_their_weights_besides_what_dense_ones_move() -> None:
    dense, quantized = (estimate_lm(Model(mode=mode, **QWEN), length=512) for mode in ("lora", "nf4"))
    num_layers, num_experts, passes, itemsize = 3, 8, 2, 4
    weights = num_layers * num_experts * passes * 3 * 256 * 256 * itemsize
    assert quantized.moved_bytes - dense.moved_bytes > weights
    assert quantized.flops.model == dense.flops.model


def test_experts_in_int8_have_no_rule() -> None:
    with pytest.raises(UnreadableModuleError, match="experts in int8"):
        estimate_lm(Model(mode="int8", **QWEN), length=64)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "rows", "settings"),
    [
        (QWEN, 1, {}),
        pytest.param(
            QWEN, 4, {"activation_checkpointing": ActivationCheckpointing(mode="full")}, marks=pytest.mark.slow
        ),
        pytest.param(
            MIXTRAL, 2, {"activation_checkpointing": ActivationCheckpointing(mode="full")}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_step_with_quantized_experts_is_within_3_percent(
    model: dict[str, Any], rows: int, settings: dict[str, Any]
) -> None:
    run_ranks(compare, model, rows, 256, settings, world_size=1)
