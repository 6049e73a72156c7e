from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from training import EVEN, TIED, UNEVEN, Rows, build_task, build_trainer, save_model

from lit_fsdp import ActivationCheckpointing, CPUOffload, FSDP2Strategy, Mesh, MixedPrecision, Sharding
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.profiling.collectives import COLLECTIVES, Collective
from lit_fsdp.profiling.communication_meter import CommunicationMeter, StepCommunication
from lit_fsdp.profiling.expected_communication import estimate_bytes, estimate_collectives
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.wrap import Wrap, plan_module
from ranks import run_ranks

KINDS: dict[str, Collective] = {
    "_allgather_base_": "all_gather",
    "all_gather": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "alltoall_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}


class Counting(TorchDispatchMode):
    """Counts the collectives that are issued inside it, and their bytes, by kind and by size of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.scalars: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            name = func.overloadpacket.__name__
            kind = KINDS.get(name, name)
            full = args[1] if kind == "reduce_scatter" else args[0]
            full = full[0] if isinstance(full, list | tuple) else full
            is_beside = full.numel() <= 2 or full.dtype == torch.int64  # checksums, see rank_paths.py
            (self.scalars if is_beside else self.counts)[kind] += 1
            self.num_bytes[kind] += 0 if is_beside else full.nbytes
        return func(*args, **(kwargs or {}))


class CountSteps(pl.Callback):
    """Counts the collectives of the last optimizer step: from its first batch to the end of its last."""

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self.counting = Counting()
        self.measured: list[StepCommunication] = []

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.meter = CommunicationMeter(module, torch.device("cpu"))
        self.meter.attach()

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.num_micro_batches == 0:
            self.counting = Counting()
        self.counting.__enter__()
        self.meter.resume()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.meter.pause()
        self.counting.__exit__(None, None, None)
        if (batch_idx + 1) % self.num_micro_batches == 0:
            self.meter.end_step(trainer.global_step)
            self.measured += self.meter.take()


def count_and_compare(
    folder: Path,
    strategy: dict[str, Any],
    num_micro_batches: int,
    num_replicas: int,
    precision: Any = "32-true",
    **options: Any,
) -> None:
    counter = CountSteps(num_micro_batches)
    fsdp2 = FSDP2Strategy(print_plan=False, **strategy)
    accumulated = {"accumulate_grad_batches": num_micro_batches, "precision": precision}
    trainer = build_trainer(fsdp2, callbacks=[counter], max_steps=2, **accumulated)
    task = build_task(folder, **options)
    trainer.fit(task, Rows(64, batch_size=1))
    sizes = {
        "num_shards": dist.get_world_size() // num_replicas,
        "num_replicas": num_replicas,
        "num_micro_batches": num_micro_batches,
    }
    expected = estimate_collectives(fsdp2.plan, fsdp2.settings.sharding, **sizes)
    counts = counter.counting.counts
    assert counts["all_gather"] == expected.gathers
    assert counts["reduce_scatter"] == expected.reduce_scatters
    assert counts["all_reduce"] == expected.all_reduces
    assert set(counts) <= set(COLLECTIVES)
    # Beside them: the sum of losses and targets, the gradient norm, and what ranks did.
    assert counter.counting.scalars == {"all_reduce": 2, "all_gather": 1}
    dtypes = fsdp2.precision_plugin.mixed_precision
    units = estimate_bytes(task, fsdp2.plan, fsdp2.settings.sharding, dtypes, **sizes)
    by_kind = {
        "all_gather": {unit.unit: unit.gather_step for unit in units},
        "reduce_scatter": {unit.unit: unit.reduce_scatter_step for unit in units},
        "all_reduce": {unit.unit: unit.all_reduce_step for unit in units},
    }
    assert [step.tag for step in counter.measured] == [1, 2]
    for kind in COLLECTIVES:
        predicted = {unit: size for unit, size in by_kind[kind].items() if size}
        assert sum(predicted.values()) == counter.counting.num_bytes[kind], kind
        for step in counter.measured:
            assert {u.unit: u.num_bytes for u in step.units if u.collective == kind} == predicted
            assert step.add_up(kind).calls == counts[kind]


KEPT = Sharding(reshard_after_forward=False, reshard_after_backward=False, no_sync=True)
CASES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "full": ({}, 1, 2, 1),
    "grad_op": ({"sharding": Sharding(reshard_after_forward=False)}, 1, 2, 1),
    "kept until the step": ({"sharding": KEPT}, 3, 2, 1),
    "fewer bits": ({"sharding": Sharding(gather_bits=8, reduce_bits=8)}, 1, 2, 1),
    "accumulate with comm": ({}, 3, 2, 1),
    "accumulate without comm": ({"sharding": Sharding(no_sync=True)}, 3, 2, 1),
    "activation_checkpointing": ({"activation_checkpointing": ActivationCheckpointing(mode="full")}, 1, 2, 1),
    "cpu_offload": ({"cpu_offload": CPUOffload()}, 1, 2, 1),
    "prefetch": ({"sharding": Sharding(forward_prefetch=2, backward_prefetch=2)}, 1, 2, 1),
    "hybrid": ({"mesh": Mesh(replicate=2)}, 1, 4, 2),
    "hybrid without comm": ({"mesh": Mesh(replicate=2), "sharding": Sharding(no_sync=True)}, 2, 4, 2),
    "reshard to 2 of 4": ({"sharding": Sharding(reshard_after_forward=2)}, 1, 4, 1),
    "replicas of one shard": ({"mesh": Mesh(replicate=2), "sharding": Sharding(gather_bits=8)}, 1, 2, 2),
}


@pytest.mark.full(after=3)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "hybrid without comm" else ()) for case in CASES]
)
def test_a_step_takes_the_collectives_that_the_plan_says(case: str, tmp_path: Path) -> None:
    strategy, num_micro_batches, world_size, num_replicas = CASES[case]
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(count_and_compare, folder, strategy, num_micro_batches, num_replicas, world_size=world_size)


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "strategy", "world_size", "num_replicas"),
    [
        ("bf16-mixed", {"sharding": Sharding(gather_bits=8, reduce_bits=8)}, 3, 1),
        ("bf16-true", {"sharding": Sharding(reduce_bits=16), "mesh": Mesh(replicate=2)}, 4, 2),
        ("32-true", {"mixed_precision": MixedPrecision(param_dtype="bfloat16")}, 3, 1),
        ("bf16-mixed", {"mesh": Mesh(replicate=2)}, 4, 2),
        ("bf16-true", {"sharding": Sharding(reshard_after_forward=2)}, 4, 1),
        ("bf16-true", {"mixed_precision": MixedPrecision(reduce_dtype="bfloat16"), "cpu_offload": CPUOffload()}, 3, 1),
    ],
)
def test_bytes_follow_the_dtypes_and_the_rows_that_are_filled_up(
    precision: str, strategy: dict[str, Any], world_size: int, num_replicas: int, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", **UNEVEN)
    run_ranks(count_and_compare, folder, strategy, 1, num_replicas, precision, world_size=world_size)


@pytest.mark.full
def test_adapters_and_codes_keep_dtypes_of_their_own(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **{**EVEN, "hidden_size": 64})
    options = {"lora": LoRA(r=3), "quantization": Quantization(), "precision": "bf16-true"}
    for strategy in ({}, {"sharding": Sharding(reduce_bits=8)}, {"sharding": KEPT}):
        run_ranks(partial(count_and_compare, **options), folder, strategy, 2, 1)


def reduce_two_dtypes() -> None:
    layers = nn.ModuleList([fully_shard(nn.Linear(8, 8, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)])
    with Counting() as counting:
        sum(layer(torch.ones(2, 8, dtype=layer.weight.dtype)).float().sum() for layer in layers).backward()
    plan = plan_module(layers, Wrap(policy="module_classes", module_classes=["*Linear"]))
    units = estimate_bytes(layers, plan, Sharding(), MixedPrecision(), num_shards=2)
    assert [unit.reduce_scatter_step for unit in units] == [72 * 4, 72 * 2]
    assert counting.num_bytes["reduce_scatter"] == 72 * 4 + 72 * 2


def test_without_a_dtype_of_reduction_each_unit_sends_that_of_its_parameters() -> None:
    run_ranks(reduce_two_dtypes)


def test_tied_weights_are_gathered_and_reduced_once(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **TIED)
    run_ranks(count_and_compare, folder, {}, 1, 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("targets", "is_quantized"),
    [
        ("all-linear", True),
        (["embed_tokens", "o_proj"], False),
        (r".*layers\.2\..*_proj", True),
        pytest.param("all-linear", False, marks=pytest.mark.slow),
        pytest.param(["embed_tokens", "o_proj"], True, marks=pytest.mark.slow),
        pytest.param(r".*layers\.2\..*_proj", False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_below_adapters_only_what_backward_needs_is_gathered_twice(
    targets: Any, is_quantized: bool, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", **{**EVEN, "hidden_size": 64})
    options = {"lora": LoRA(r=4, target_modules=targets), "quantization": Quantization() if is_quantized else None}
    run_ranks(partial(count_and_compare, **options), folder, {}, 2, 1)


def test_the_prediction_for_three_blocks_is_what_the_docs_say() -> None:
    # 3 blocks twice, embedding and head once; the root of a LightningModule holds nothing
    from transformers import AutoConfig, AutoModelForCausalLM

    from lit_fsdp.sharding.wrap import Wrap, plan_units

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=3, **EVEN))
    plan = plan_units(model, Wrap())
    predicted = estimate_collectives(plan, Sharding())
    assert (predicted.gathers, predicted.reduce_scatters, predicted.all_reduces) == (8, 5, 0)
    # One card has no collectives, and with offload as many copies.
    for sharding, gathers, reductions in ((Sharding(), 8 * 4, 5 * 4), (KEPT, 5, 5)):
        units = estimate_bytes(model, plan, sharding, MixedPrecision(), num_shards=1, num_micro_batches=4)
        assert sum(unit.gather_step + unit.reduce_scatter_step + unit.all_reduce_step for unit in units) == 0
        assert sum(unit.num_gathers for unit in units) == gathers
        assert sum(unit.num_reductions for unit in units) == reductions
        assert sum(unit.reduced for unit in units) == sum(4 * p.numel() for p in model.parameters())
