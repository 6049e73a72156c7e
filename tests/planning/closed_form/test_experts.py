"""The closed form of quantized experts, against traces and real steps: neither depends on where tokens go."""

from typing import Any

import closed_form_models
import pytest
import torch
import torch.distributed as dist
from closed_form_models import Model, estimate_lm
from planned_steps import run_for_real

from lit_fsdp.optim.factory import Optimizer, build_optimizer
from lit_fsdp.planning.trace.dry_run import fake_ranks
from lit_fsdp.quantization import groups
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.mixed_precision import read_precision
from lit_fsdp.sharding.settings import Settings
from ranks import run_ranks

QWEN = {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MIXTRAL = {"family": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256}
FULL = {"activation_checkpointing": ActivationCheckpointing(mode="full")}
SELECTIVE = {"activation_checkpointing": ActivationCheckpointing(mode="selective")}


def compare(model: dict[str, Any], rows: int, length: int, settings: dict[str, Any], part: int) -> None:
    """Compare with a real step, if that many weights are dequantized at a time."""
    dist.destroy_process_group()
    groups.GROUPS_PART = part
    module = Model(**model)
    ids = torch.arange(rows * length).view(rows, length) % 1000
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(length).expand(rows, length)}
    with fake_ranks(2):
        options = {"dtypes": read_precision("bf16-true")}
        make: Any = lambda m: build_optimizer(m.parameters(), Optimizer())  # noqa: E731
        real = run_for_real(module, Settings(**settings), batch, options, make)  # type: ignore[arg-type]
    sizes: Any = {"rows": rows, "length": length, "world_size": 2}
    estimated = estimate_lm(Model(**model), precision="bf16-true", **sizes, **settings)
    assert abs(estimated.peak.num_bytes / real.peak.num_bytes - 1) < 0.03, (real.peak, estimated.peak)


def test_quantized_experts_move_their_weights_besides_what_dense_ones_move() -> None:
    dense, quantized = (estimate_lm(Model(mode=mode, **QWEN), length=512) for mode in ("lora", "nf4"))
    num_layers, num_experts, passes, itemsize = 3, 8, 2, 4
    weights = num_layers * num_experts * passes * 3 * 256 * 256 * itemsize
    assert quantized.moved_bytes - dense.moved_bytes > weights
    assert quantized.flops.model == dense.flops.model


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    ("model", "rows", "settings", "part"),
    [
        ({**QWEN, "mode": "nf4"}, 1, FULL, 2**17),
        ({**QWEN, "mode": "nf4"}, 1, {}, 2**26),
        ({**QWEN, "mode": "int8"}, 2, {}, 2**18),
        ({**QWEN, "mode": "nf4"}, 1, SELECTIVE, 2**26),
        pytest.param({**QWEN, "mode": "nf4"}, 4, FULL, 2**26, marks=pytest.mark.slow),
        pytest.param({**MIXTRAL, "mode": "nf4"}, 2, FULL, 2**26, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_with_quantized_experts_is_within_3_percent(
    model: dict[str, Any], rows: int, settings: dict[str, Any], part: int
) -> None:
    run_ranks(compare, model, rows, 256, settings, part, world_size=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "settings"),
    [({**QWEN, "mode": "nf4"}, {}), ({**QWEN, "mode": "int8"}, FULL), ({**MIXTRAL, "mode": "nf4"}, SELECTIVE)],
    ids=str,
)
def test_a_trace_of_quantized_experts_finds_the_same(model: dict[str, Any], settings: dict[str, Any]) -> None:
    options = {"rows": 2, "length": 512, "precision": "bf16-true", **settings}
    run_ranks(closed_form_models.compare, model, options, world_size=1)
