from typing import Any

import pytest
import torch
from closed_form_models import SMALL, Model, compare, estimate_lm, make_rows
from planned_steps import trace
from transformers import AutoConfig, AutoModelForImageClassification

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.closed_form.engine import StepEstimate
from lit_fsdp.planning.closed_form.reader import UnreadableModuleError
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.profiling.flops import FlopCounter
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.shard import Sharding
from lit_fsdp.sharding.wrap import Wrap
from ranks import run_ranks

# 1.9 billion parameters: 7.6 GB of float32.
LARGE = {"vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 22}
LARGE |= {"num_attention_heads": 20, "num_key_value_heads": 20}


def count_states(estimate: StepEstimate) -> float:
    """Parameters, optimizer state and gradients when the optimizer steps, in GB."""
    by_kind = estimate.moments[-1].by_kind
    return sum(by_kind[kind] for kind in ("parameters", "optimizer_state", "gradients")) / 1e9  # type: ignore[index]


KEPT: dict[str, Any] = {
    "num_micro_batches": 3,
    "sharding": Sharding(reshard_after_forward=False, reshard_after_backward=False),
}
# Shapes that no rule was fitted to.
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"num_key_value_heads": 2}, {"world_size": 4, "precision": "bf16-mixed", "rows": 2, "length": 192}),
    (
        {"family": "mistral", "mode": "nf4", "num_key_value_heads": 2},
        {"precision": "bf16-true", "rows": 2, "length": 320},
    ),
    (
        {"family": "qwen3", "head_dim": 96, "num_key_value_heads": 4},
        {"world_size": 2, "length": 448, "activation_checkpointing": ActivationCheckpointing(mode="full")},
    ),
    ({}, {"world_size": 2, "length": 320, "sharding": Sharding(reshard_after_forward=False)}),
    # The gate and what it weighs come from one product.
    ({"family": "glm", "pad_token_id": 0, "head_dim": 64}, {"world_size": 2, "precision": "bf16-mixed", "length": 512}),
    (
        {"num_hidden_layers": 4},
        {"world_size": 4, "length": 96, "num_micro_batches": 2, "sharding": Sharding(no_sync=True)},
    ),
    ({}, {"world_size": 4, "length": 64, "mesh": Mesh(replicate=2), "precision": "bf16-true"}),
    # Reduced gradients are on the host before the next block is computed.
    (
        {"vocab_size": 300, "num_hidden_layers": 4},
        {"world_size": 2, "precision": "bf16-mixed", "rows": 2, "length": 128, "cpu_offload": CPUOffload()},
    ),
    # The one shard of a parameter is copied, not gathered.
    ({"num_hidden_layers": 4}, {"rows": 2, "length": 256, "cpu_offload": CPUOffload()}),
    (
        {"mode": "nf4"},
        {"precision": "bf16-true", "length": 128, "device_type": "cuda", "cpu_offload": CPUOffload()},
    ),
    # So are shards that come beside compute, into memory of their own.
    (
        {"vocab_size": 4000, "mode": "lora"},
        {
            "rows": 2,
            "length": 128,
            "precision": "bf16-true",
            "device_type": "cuda",
            "cpu_offload": CPUOffload(overlap_optimizer=True),
        },
    ),
    # One expert for all tokens, and no window in the place of one of 0.
    (
        {"family": "qwen2_moe", "hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 8}
        | {"shared_expert_intermediate_size": 768, "num_key_value_heads": 2},
        {"world_size": 2, "length": 512, "precision": "bf16-true"},
    ),
    (
        {"family": "qwen3_moe", "hidden_size": 512, "num_experts": 16, "moe_intermediate_size": 192},
        {
            "world_size": 4,
            "length": 1024,
            "precision": "bf16-true",
            "activation_checkpointing": ActivationCheckpointing(mode="full"),
        },
    ),
    (
        {"family": "mixtral", "num_local_experts": 8, "intermediate_size": 256, "mode": "lora"},
        {"world_size": 2, "length": 1024, "precision": "bf16-true"},
    ),
    # Attention and MLP beside each other, and norms after both.
    (
        {"family": "gpt_neox", "mode": "nf4", "hidden_dropout": 0.1},
        {"precision": "bf16-true", "rows": 2, "length": 320},
    ),
    (
        {"family": "gpt_neox", "use_parallel_residual": False, "hidden_dropout": 0.1},
        {"world_size": 2, "precision": "bf16-true", "length": 384},
    ),
    (
        {"family": "cohere", "use_qk_norm": True, "num_key_value_heads": 2},
        {"world_size": 2, "precision": "bf16-true", "length": 512},
    ),
    (
        {"family": "cohere2", "num_key_value_heads": 2, "sliding_window": 64, "num_hidden_layers": 4},
        {"world_size": 4, "precision": "bf16-true", "length": 256, "num_micro_batches": 2},
    ),
    (
        {"family": "olmo2", "hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 5, "mode": "lora"},
        {"world_size": 4, "precision": "bf16-true", "rows": 2, "length": 192},
    ),
    (
        {"family": "olmo3", "num_key_value_heads": 2, "num_hidden_layers": 4},
        {
            "world_size": 2,
            "precision": "bf16-true",
            "length": 224,
            "activation_checkpointing": ActivationCheckpointing(mode="selective"),
        },
    ),
    # DoRA computes with the product of its matrices, which selective recomputation keeps.
    (
        {"family": "qwen2", "mode": "lora", "lora": LoRA(r=16, use_dora=True)},
        {
            "world_size": 4,
            "precision": "bf16-mixed",
            "length": 320,
            "activation_checkpointing": ActivationCheckpointing(mode="selective"),
        },
    ),
    (
        {"mode": "nf4", "lora": LoRA(r=16, use_dora=True)},
        {
            "world_size": 2,
            "precision": "bf16-true",
            "length": 384,
            "activation_checkpointing": ActivationCheckpointing(mode="full"),
        },
    ),
    (
        {"hidden_size": 512},
        {
            "world_size": 2,
            "length": 256,
            "precision": "bf16-mixed",
            "sharding": Sharding(gather_bits=8, reduce_bits=8),
        },
    ),
    ({"num_hidden_layers": 4}, {**KEPT, "world_size": 2, "length": 96, "precision": "bf16-mixed"}),
    ({"num_hidden_layers": 4}, {**KEPT, "rows": 2, "length": 256, "cpu_offload": CPUOffload()}),
    ({"hidden_size": 384}, {"world_size": 4, "length": 64, "sharding": Sharding(reduce_bits=16)}),
]
QUICK = (0, 8, 10, 13, -3, -2, -1)  # run by default


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(*case, marks=[] if {i, i - len(CASES)} & {*QUICK} else pytest.mark.slow)
        for i, case in enumerate(CASES)
    ],
    ids=str,
)
def test_the_peak_is_within_3_percent_of_the_exact_trace(model: dict[str, Any], options: dict[str, Any]) -> None:
    run_ranks(compare, model, options, world_size=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "options"),
    [
        # FSDP2 gathers as many units ahead as it is told, but one from the root.
        ({"vocab_size": 4000}, {"world_size": 2, "length": 512, "sharding": Sharding(backward_prefetch=3)}),
        (
            {"num_hidden_layers": 5},
            {"world_size": 2, "length": 96, "sharding": Sharding(reduce_scatter_max_input_buffers=3)},
        ),
        # Norm and head are one unit, and reduced once.
        ({"vocab_size": 8000, "loss_chunks": 8}, {"precision": "bf16-true", "length": 512, "world_size": 2}),
        # In the second chunk, that of the head's weight; in the last, that of the hidden states.
        ({"vocab_size": 8000, "loss_chunks": 16}, {"precision": "bf16-mixed", "length": 1024, "world_size": 2}),
        ({"vocab_size": 8000, "loss_chunks": 3}, {"length": 2048, "world_size": 2}),
        # Pinned memory is rounded up, by both engines alike.
        (
            {"vocab_size": 9000},
            {"world_size": 3, "length": 512, "device_type": "cuda", "cpu_offload": CPUOffload(pin_memory=True)},
        ),
    ],
    ids=["ahead", "reductions at once", "chunks", "second chunk", "last chunk", "pinned"],
)
def test_units_are_counted_when_they_are_there_and_reduced_once(model: dict[str, Any], options: dict[str, Any]) -> None:
    run_ranks(compare, model, options, 0.002, world_size=1)


@pytest.mark.full
@pytest.mark.parametrize("options", [{"optimizer": Optimizer(fused=False)}, {"precision": "16-mixed"}], ids=str)
def test_a_loop_over_parameters_needs_memory_for_one_at_a_time(options: dict[str, Any]) -> None:
    # The embedding's, on GPUs too; float16 skips steps, which the fused kernel cannot.
    traced = trace(Model(vocab_size=16000), make_rows(1, 128, ""), device_type="cuda", **options).memory.peak
    estimated = estimate_lm(Model(vocab_size=16000), length=128, device_type="cuda", **options).peak
    assert traced.phase == estimated.phase == "optimizer"
    assert estimated.num_bytes == pytest.approx(traced.num_bytes, rel=0.005)


def test_a_unit_is_reduced_in_the_dtype_of_its_own_parameters() -> None:
    plain, mixed = Model(), Model()
    head = mixed.model.lm_head.to(torch.bfloat16), mixed.model.model.norm.to(torch.bfloat16)  # one unit
    first, second = (
        next(m for m in estimate_lm(model, world_size=2).moments if (m.phase, m.unit[-8:]) == ("backward", "layers.2"))
        for model in (plain, mixed)
    )
    numel = sum(parameter.numel() for module in head for parameter in module.parameters())
    # What was reduced last is there while the next unit computes.
    assert first.by_kind["communication"] - second.by_kind["communication"] == 2 * numel


def test_states_of_8_gb_of_parameters_are_32_gb_on_one_gpu_and_8_gb_on_each_of_four() -> None:
    alone, shared = estimate_lm(Model(**LARGE)), estimate_lm(Model(**LARGE), world_size=4)
    assert sum(p.numel() for p in Model(**LARGE).parameters()) * 4 / 1e9 == pytest.approx(7.6, abs=0.1)
    assert count_states(alone) == pytest.approx(30.5, abs=0.2)
    assert count_states(shared) == pytest.approx(count_states(alone) / 4, rel=0.001)


@pytest.mark.parametrize(
    ("optimizer", "num_bytes"), [("adamw", 8.0), ("adamw_8bit", 2.03), ("adafactor", 0.003), ("muon", 4.34)]
)
def test_the_optimizer_state_has_its_bytes_per_parameter(optimizer: Any, num_bytes: float) -> None:
    model = Model(**LARGE)
    count = sum(p.numel() for p in model.parameters())
    state = estimate_lm(model, optimizer=Optimizer(name=optimizer)).peak.by_kind["optimizer_state"]
    assert state / count == pytest.approx(num_bytes, rel=0.15 if num_bytes < 1 else 0.002)


def test_one_billion_parameters_reach_20_7_gb_at_2300_tokens() -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 18}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 16}
    short, long = (estimate_lm(Model(**{**LARGE, **sizes}), length=length) for length in (1024, 2300))
    assert count_states(short) == pytest.approx(16.9, abs=0.1)
    assert short.peak.num_bytes / 1e9 == pytest.approx(16.9, abs=0.1)  # as the optimizer steps
    assert long.peak.num_bytes / 1e9 == pytest.approx(20.7, abs=0.1)


def test_ten_billion_parameters_have_160_gb_of_states() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 48}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 32}
    estimate = estimate_lm(Model(**{**LARGE, **sizes}), length=4096)
    assert count_states(estimate) == pytest.approx(160, rel=0.03)
    assert estimate.peak.num_bytes / 1e9 == pytest.approx(190, rel=0.01)


def test_offload_moves_all_states_to_the_host() -> None:
    here, there = estimate_lm(Model()), estimate_lm(Model(), cpu_offload=CPUOffload(pin_memory=False))
    states = here.moments[-1].by_kind
    total = states["parameters"] + states["optimizer_state"] + states["gradients"]
    buffers = sum(b.numel() * b.element_size() for b in Model().buffers())
    assert sum(there.host_by_kind.values()) == pytest.approx(total - buffers, rel=0.001)
    assert there.moments[-1].by_kind["gradients"] == there.moments[-1].by_kind["optimizer_state"] == 0
    assert there.peak.by_kind["parameters"] == buffers


def test_shards_that_come_beside_compute_take_the_largest_unit_of_a_gpu() -> None:
    model = {"vocab_size": 9000, "hidden_size": 256}
    plain, beside, on_ranks = (
        estimate_lm(
            Model(**model), device_type="cuda", world_size=n, cpu_offload=CPUOffload(overlap_optimizer=overlaps)
        )
        for n, overlaps in ((1, False), (1, True), (2, True))
    )
    assert beside.peak.num_bytes - plain.peak.num_bytes == (9000 + 1) * 256 * 4  # norm and head
    parted = estimate_lm(Model(**model), device_type="cuda", world_size=2, cpu_offload=CPUOffload())
    assert on_ranks.peak == parted.peak


def round_up(num_bytes: int) -> int:
    size = 1
    while size < num_bytes:
        size *= 2
    return size


def test_pinned_shards_and_gradients_are_rounded_up_to_powers_of_two_each() -> None:
    model = Model(mode="lora")
    shards = [-(-p.shape[0] // 3) * p[0].numel() * p.element_size() for p in model.parameters()]
    trained = [p.requires_grad for p in model.parameters()]
    cases = [("cpu", None), ("cuda", False), ("cuda", None), ("cuda", True)]
    plain, unpinned, pinned, asked = (
        estimate_lm(model, world_size=3, device_type=device, cpu_offload=CPUOffload(pin_memory=pin)).host_by_kind
        for device, pin in cases
    )
    assert plain == unpinned
    assert plain["parameters"] == sum(shards)
    assert pinned == asked
    assert pinned["parameters"] == sum(map(round_up, shards)) > 1.1 * plain["parameters"]
    assert pinned["gradients"] == sum(round_up(size) for size, needs in zip(shards, trained, strict=True) if needs)
    assert pinned["gradients"] > plain["gradients"]
    assert pinned["optimizer_state"] == plain["optimizer_state"]


def test_pixels_in_half_precision_stay_until_forward_ends() -> None:
    config = AutoConfig.for_model("vit", **{**SMALL, "num_labels": 10})
    with torch.device("meta"):
        model = AutoModelForImageClassification.from_config(config)
    add_adapters(model, LoRA(r=8))
    estimate = estimate_lm(model, precision="bf16-true", rows=2, length=197)
    last = [moment for moment in estimate.moments if moment.phase == "forward"][-1]
    assert last.activations["embeddings"] == 2 * (2 * 3 * 224 * 224 + 2 * 197 * SMALL["hidden_size"])


def test_flops_are_those_that_are_counted_as_the_model_runs() -> None:
    model = Model(device="cpu")
    ids = torch.arange(64).view(2, 32)
    with FlopCounter() as counter:
        model.step({"input_ids": ids, "labels": ids}).backward()
    assert estimate_lm(Model(), rows=2, length=32).flops == counter.flops


def test_recomputing_runs_every_other_block_once_more() -> None:
    none, half, full = (
        estimate_lm(Model(num_hidden_layers=4), activation_checkpointing=recompute)
        for recompute in (
            ActivationCheckpointing(),
            ActivationCheckpointing(mode="full", every_n_blocks=2),
            ActivationCheckpointing(mode="full"),
        )
    )
    extra = full.flops.recomputed - none.flops.recomputed
    assert half.flops.recomputed - none.flops.recomputed == extra // 2 > 0
    assert none.flops.model == full.flops.model


def test_a_loss_in_chunks_moves_more_bytes_for_less_memory() -> None:
    whole, chunked = Model(vocab_size=8000), Model(vocab_size=8000, loss_chunks=8)
    first, second = (estimate_lm(model, precision="bf16-true", rows=2, length=256) for model in (whole, chunked))
    assert second.peak.num_bytes < first.peak.num_bytes
    assert second.moved_bytes > first.moved_bytes
    assert second.flops.recomputed > first.flops.recomputed


def test_norms_without_weights_have_no_rule_instead_of_an_error_of_python() -> None:
    with pytest.raises(UnreadableModuleError, match=r"AttributeError|a NanoChat|norm"):
        estimate_lm(Model("nanochat"))


def test_what_has_no_rule_is_named() -> None:
    shared = {"n_routed_experts": 8, "moe_intermediate_size": 64, "first_k_dense_replace": 0, "pad_token_id": 0}
    with pytest.raises(UnreadableModuleError, match=r"layers.0.mlp: a mixture of .*shared_expert"):
        estimate_lm(Model("glm4_moe", **shared))
    with pytest.raises(UnreadableModuleError, match=r"layers.0: a dropout layer_dropout of 0.2"):
        model = Model()
        model.model.model.layers[0].layer_dropout = 0.2
        estimate_lm(model)
    with pytest.raises(UnreadableModuleError, match="a unit inside a block"):
        estimate_lm(Model(), wrap=Wrap(policy="min_size", min_num_params=1000))


def test_shapes_and_meshes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"micro_batch.length: got 0: expected 1 or more"):
        MicroBatch(rows=1, length=0)
    with pytest.raises(ValueError, match="must divide the 4 shards"):
        estimate_lm(Model(), world_size=4, sharding=Sharding(reshard_after_forward=3))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("layers.0.self_attn", "OSError"), ("", "a Made, part of whose forward is that of its parent")],
    ids=["attention without a file", "a forward around another"],
)
def test_code_that_cannot_be_read_is_traced(name: str, reason: str) -> None:
    model = Model()
    found: Any = model.model.model.get_submodule(name)
    if name:
        made: dict[str, Any] = {"Parent": type(found)}
        exec("class Made(Parent):\n    def forward(self, *args, **kwargs):\n        return Parent.forward(self)", made)
        found.__class__ = made["Made"]
    else:

        class Made(type(found)):  # type: ignore[misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return super().forward(*args, **kwargs)

        found.__class__ = Made
    with pytest.raises(UnreadableModuleError, match=reason):
        estimate_lm(model)
