from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planned_steps import run_for_real, trace
from stand_in_gpu import run_as_gpus
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.layers import import_peft
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim.factory import Optimizer, build_optimizer
from lit_fsdp.optim.muon import list_hidden_matrices
from lit_fsdp.planning.trace.dry_run import fake_ranks, trace_training_step
from lit_fsdp.profiling.memory_log import StepMemory
from lit_fsdp.quantization.kernels import load_kernels
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization, count_hidden_bytes
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import Compile, Sharding
from lit_fsdp.tasks.masks import keep_branches
from ranks import run_ranks

SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 2}
WEIGHTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
BF16 = MixedPrecision(storage_dtype="float32", param_dtype="bfloat16", reduce_dtype="float32")
FP32 = MixedPrecision(storage_dtype="float32")
FULL_OFFLOADED = ActivationCheckpointing(mode="full", offload=True)


class Model(nn.Module):
    def __init__(
        self,
        *,
        lora: bool | Sequence[str] = False,
        quantization: Quantization | None = None,
        model_type: str = "llama",
        **config_settings: Any,
    ) -> None:
        super().__init__()
        with torch.device("meta"):
            config = AutoConfig.for_model(model_type, vocab_size=300, **{**SIZES, **config_settings})
            self.model = AutoModelForCausalLM.from_config(config)
        if quantization is not None:
            quantize_model(self.model, quantization)
        if lora:
            names = () if lora is True else lora
            add_adapters(self.model, LoRA(r=4, dtype="float32", target_parameters=names))  # type: ignore[arg-type]

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch, use_cache=False).loss


def make_optimizer(settings: Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(module.parameters(), settings, hidden=list_hidden_matrices(module))


def make_batch(document: int = 64) -> dict[str, Tensor]:
    ids = torch.arange(2 * 64).view(2, 64) % 300
    return {"input_ids": ids, "labels": ids, "position_ids": (torch.arange(64) % document).expand(2, 64)}


def trace_dry(module: Any, settings: Settings, batch: dict[str, Tensor], options: dict[str, Any], make: Any) -> Any:
    meta = {name: tensor.to("meta") for name, tensor in batch.items()}
    with keep_branches(batch):
        return trace_training_step(
            module,
            settings,
            meta,
            compute_loss=lambda batch: module.step(batch),  # noqa: PLW0108  looked up when it is sharded
            build_optimizer=lambda: make(module),
            step_name="step",
            ranks_per_node=dist.get_world_size(),
            device_type="cpu",
            **options,
        ).memory


def compare(world_size: int, model: dict[str, Any], strategy: dict[str, Any], options: dict[str, Any]) -> None:
    dist.destroy_process_group()
    options = {"dtypes": FP32, **options}
    make = partial(make_optimizer, options.pop("optimizer", Optimizer(learning_rate=1e-3)))
    batch = make_batch(32 if options.pop("packed", False) else 64)
    settings = Settings(**strategy)
    with fake_ranks(world_size):
        real = run_for_real(Model(**model), settings, batch, options, make)
        dry = trace_dry(Model(**model), settings, batch, options, make)
    assert abs(dry.peak.num_bytes / real.peak.num_bytes - 1) < 0.01, (dry.peak, real.peak)
    for kind in ("parameters", "optimizer_state", "gradients", "gathered"):
        assert max(dry.by_kind[kind]) == max(real.by_kind[kind]), kind
    assert dry.host_by_kind == real.host_by_kind
    assert [name for name, _, _ in dry.phases] == [name for name, _, _ in real.phases]


CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}),
    ({}, {"activation_checkpointing": ActivationCheckpointing(mode="full")}, {"dtypes": BF16}),
    ({}, {"activation_checkpointing": ActivationCheckpointing(mode="full", offload=True)}, {"dtypes": BF16}),
    (
        {"lora": True, "quantization": Quantization(), "model_type": "qwen3_moe", **EXPERTS},
        {"activation_checkpointing": ActivationCheckpointing(mode="full", mlp_chunks=4, offload=True)},
        {"dtypes": BF16},
    ),
    ({}, {"sharding": Sharding(reshard_after_forward=False, no_sync=True)}, {"num_micro_batches": 2}),
    (
        {},
        {"sharding": Sharding(reshard_after_forward=False, reshard_after_backward=False)},
        {"num_micro_batches": 3, "dtypes": BF16},
    ),
    ({}, {"sharding": Sharding(gather_bits=8, reduce_bits=8)}, {"dtypes": BF16}),
    ({"lora": True}, {"sharding": Sharding(reduce_bits=16), "mesh": Mesh(replicate=2)}, {}),
    ({"lora": True, "quantization": Quantization(type="nf4", double_quant=True)}, {}, {}),
    (
        {"lora": True, "quantization": Quantization()},
        {"activation_checkpointing": ActivationCheckpointing(mode="full", keep_dequantized=True)},
        {"dtypes": BF16},
    ),
    ({}, {}, {"optimizer": Optimizer(name="adamw_8bit")}),
    ({"model_type": "qwen3_moe", **EXPERTS}, {}, {"dtypes": BF16, "optimizer": Optimizer(name="muon")}),
    ({}, {"activation_checkpointing": ActivationCheckpointing(mode="selective")}, {}),
    (
        {"model_type": "qwen3_moe", **EXPERTS, "lora": WEIGHTS, "quantization": Quantization()},
        {"activation_checkpointing": ActivationCheckpointing(mode="full")},
        {"dtypes": BF16},
    ),
    ({"lora": True, "quantization": Quantization(type="int8")}, {}, {"dtypes": BF16}),
    ({"num_key_value_heads": 2}, {"mesh": Mesh(tensor=2)}, {}),
    ({"attention_dropout": 0.1}, {"activation_checkpointing": ActivationCheckpointing(mode="full")}, {"dtypes": BF16}),
    # In the slow tier: what others have a part of.
    ({}, {"activation_checkpointing": ActivationCheckpointing(mode="full", mlp_chunks=4)}, {"dtypes": BF16}),
    ({}, {"mesh": Mesh(replicate=2)}, {}),
    ({}, {}, {"packed": True}),
    ({"lora": True}, {}, {}),
    ({}, {}, {"optimizer": Optimizer(name="adafactor")}),
    ({}, {}, {"optimizer": Optimizer(fused=False)}),
    ({"tie_word_embeddings": True}, {}, {}),
    ({"model_type": "qwen3_moe", **EXPERTS}, {}, {"dtypes": BF16}),
    ({"model_type": "qwen3_moe", **EXPERTS, "lora": True, "quantization": Quantization()}, {}, {"dtypes": BF16}),
    ({"model_type": "qwen3_moe", **EXPERTS, "lora": WEIGHTS}, {}, {"dtypes": BF16}),
]


@pytest.mark.slow(after=17)
@pytest.mark.full(after=2)
@pytest.mark.parametrize(("model", "strategy", "options"), CASES, ids=str)
def test_a_dry_step_holds_what_a_real_one_holds(model: dict, strategy: dict, options: dict) -> None:
    run_ranks(compare, 4, model, strategy, options, world_size=1)


OFFLOADED: list[tuple[dict[str, Any], dict[str, Any], MixedPrecision]] = [
    ({}, {}, FP32),
    ({}, {"activation_checkpointing": ActivationCheckpointing(mode="full")}, BF16),
    ({"lora": True, "quantization": Quantization()}, {"activation_checkpointing": FULL_OFFLOADED}, BF16),
    # So large weights that forward needs most while the last of four is copied.
    ({"lora": True, "hidden_size": 3072, "num_hidden_layers": 1}, {}, FP32),
]


def list_peaks(memory: StepMemory) -> dict[str, int]:
    """Return the most bytes of each phase."""
    totals = [sum(counts) for counts in zip(*memory.by_kind.values(), strict=True)]
    return {name: max(totals[begin:end]) for name, begin, end in memory.phases if name != "optimizer"}


def run_offloaded(case: int, out: Path) -> None:
    """Run on a device of its own, to which FSDP2 copies what it needs."""
    model, strategy, dtypes = OFFLOADED[case]
    device = torch.device("cuda", torch.cuda.current_device())
    batch = {name: tensor.to(device) for name, tensor in make_batch().items()}
    settings, make = Settings(cpu_offload=CPUOffload(), **strategy), partial(make_optimizer, Optimizer())
    memory = run_for_real(Model(**model), settings, batch, {"dtypes": dtypes}, make)
    torch.save(list_peaks(memory), out)


def compare_offloaded(case: int, world_size: int, out: Path) -> None:
    dist.destroy_process_group()
    model, strategy, dtypes = OFFLOADED[case]
    settings, make = Settings(cpu_offload=CPUOffload(), **strategy), partial(make_optimizer, Optimizer())
    with fake_ranks(world_size):
        memory = trace_dry(Model(**model), settings, make_batch(), {"dtypes": dtypes}, make)
    assert list_peaks(memory) == pytest.approx(torch.load(out), rel=0.0005)  # but for a copy that is not freed yet


@pytest.mark.slow(after=4)
@pytest.mark.full(after=1)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", range(len(OFFLOADED)))
def test_what_is_copied_from_the_host_is_counted_as_on_a_device_of_its_own(
    case: int, world_size: int, tmp_path: Path
) -> None:
    load_kernels("a test")  # before a process passes for one with a GPU
    import_peft()
    run_as_gpus(run_offloaded, case, tmp_path / "real.pt", world_size=world_size)
    run_ranks(compare_offloaded, case, world_size, tmp_path / "real.pt", world_size=1)


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


def trace_depth(num_blocks: int, mode: str) -> StepMemory:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "num_hidden_layers", num_blocks)
        module = Model()
    ids = torch.empty(1, 48, dtype=torch.int64, device="meta")
    recompute = ActivationCheckpointing(mode="full", offload=mode == "offload")
    batch = {"input_ids": ids, "labels": ids}
    return trace(module, batch, device_type="cuda", activation_checkpointing=recompute).memory


def compare_depths() -> None:
    dist.destroy_process_group()
    kept, offloaded, deeper = trace_depth(4, "kept"), trace_depth(4, "offload"), trace_depth(6, "offload")
    own = 48 * SIZES["hidden_size"] * 4  # of an input: 12 KiB, for which torch pins 16
    assert kept.host_by_kind == {}
    assert offloaded.host_by_kind == {"activations": 3 * 2**14}
    assert deeper.host_by_kind == {"activations": 5 * 2**14}
    largest, less, as_much = (max(memory.by_kind["activations"]) for memory in (kept, offloaded, deeper))
    assert largest - less == 2 * own  # there are all four, or that of the last block and the one before
    assert as_much == less


def compare_pieces() -> None:
    dist.destroy_process_group()
    ids = torch.empty(2, 512, dtype=torch.int64, device="meta")
    peaks, flops = [], []
    for mlp_chunks in (None, 4, 16):
        recompute = ActivationCheckpointing(mode="full", mlp_chunks=mlp_chunks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SIZES, "intermediate_size", 2048)
            module = Model()
        batch = {"input_ids": ids, "labels": ids}
        step = trace(module, batch, device_type="cuda", activation_checkpointing=recompute)
        peaks.append(max(step.memory.by_kind["activations"]))
        flops.append(step.flops)
    inner = 2 * 512 * 2048 * 4  # of one of the four tensors that backward of an MLP is given
    assert flops[0] == flops[1] == flops[2]
    assert peaks[0] - peaks[1] > 2 * inner
    assert peaks[1] - peaks[2] > inner / 8


def compare_compiled() -> None:
    dist.destroy_process_group()
    batch = {name: tensor.to("meta") for name, tensor in make_batch().items()}
    plain, compiled = (
        trace(Model(lora=True), batch, device_type="cuda", compile=setting) for setting in (None, Compile())
    )
    assert compiled.memory.by_kind == plain.memory.by_kind
    assert compiled.flops == plain.flops


@pytest.mark.full
def test_blocks_are_traced_as_they_are_before_they_are_compiled() -> None:
    run_ranks(compare_compiled, world_size=1)


@pytest.mark.full
def test_mlps_in_pieces_hold_less_and_compute_as_much() -> None:
    run_ranks(compare_pieces, world_size=1)


@pytest.mark.full
def test_offloaded_inputs_are_counted_on_the_host_and_do_not_grow_with_depth() -> None:
    run_ranks(compare_depths, world_size=1)
