from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training import EVEN, TIED, Rows, build_task, build_trainer, save_model

from lit_fsdp import FSDP2Strategy, Mesh, Offload, Recompute, Sharding
from lit_fsdp.adapters import LoRA
from lit_fsdp.quantization import Quantization
from lit_fsdp.traffic import predict_collectives
from ranks import run_ranks


class Counting(TorchDispatchMode):
    """Counts the collectives that are issued inside it, by operator and by size of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.scalars: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            (self.scalars if first.numel() <= 2 else self.counts)[name] += 1
        return func(*args, **(kwargs or {}))


class CountSteps(pl.Callback):
    """Counts the collectives of the last optimizer step: from its first batch to the end of its last."""

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self.counting = Counting()

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.num_micro_batches == 0:
            self.counting = Counting()
        self.counting.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counting.__exit__(None, None, None)


def count_and_compare(
    folder: Path, strategy: dict[str, Any], num_micro_batches: int, num_replicas: int, **options: Any
) -> None:
    counter = CountSteps(num_micro_batches)
    fsdp2 = FSDP2Strategy(print_plan=False, **strategy)
    trainer = build_trainer(fsdp2, callbacks=[counter], max_steps=2, accumulate_grad_batches=num_micro_batches)
    trainer.fit(build_task(folder, **options), Rows(64, batch_size=1))
    expected = predict_collectives(
        fsdp2.plan, fsdp2.settings.sharding, num_replicas=num_replicas, num_micro_batches=num_micro_batches
    )
    counts = counter.counting.counts
    assert counts["_allgather_base_"] == expected.gathers
    assert counts["_reduce_scatter_base_"] == expected.reduce_scatters
    assert counts["allreduce_"] == expected.all_reduces
    assert set(counts) <= {"_allgather_base_", "_reduce_scatter_base_", "allreduce_"}
    # Beside them: the sum of losses and targets, and the gradient norm.
    assert counter.counting.scalars == {"allreduce_": 2}


CASES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "full": ({}, 1, 2, 1),
    "grad_op": ({"sharding": Sharding(reshard_after_forward=False)}, 1, 2, 1),
    "accumulate with comm": ({}, 3, 2, 1),
    "accumulate without comm": ({"sharding": Sharding(hold_gradients=True)}, 3, 2, 1),
    "recompute": ({"recompute": Recompute(mode="full")}, 1, 2, 1),
    "offload": ({"offload": Offload()}, 1, 2, 1),
    "prefetch": ({"sharding": Sharding(forward_prefetch=2, backward_prefetch=2)}, 1, 2, 1),
    "hybrid": ({"mesh": Mesh(replicate=2)}, 1, 4, 2),
    "hybrid without comm": ({"mesh": Mesh(replicate=2), "sharding": Sharding(hold_gradients=True)}, 2, 4, 2),
    "reshard to 2 of 4": ({"sharding": Sharding(reshard_after_forward=2)}, 1, 4, 1),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "hybrid without comm" else ()) for case in CASES]
)
def test_a_step_takes_the_collectives_that_the_plan_says(case: str, tmp_path: Path) -> None:
    strategy, num_micro_batches, world_size, num_replicas = CASES[case]
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(count_and_compare, folder, strategy, num_micro_batches, num_replicas, world_size=world_size)


def test_tied_weights_are_gathered_and_reduced_once(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **TIED)
    run_ranks(count_and_compare, folder, {}, 1, 1)


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
    options = {"lora": LoRA(r=4, targets=targets), "quantization": Quantization() if is_quantized else None}
    run_ranks(partial(count_and_compare, **options), folder, {}, 2, 1)


def test_the_prediction_for_three_blocks_is_what_the_docs_say() -> None:
    # embedding + 3 blocks twice, head once; the root of a LightningModule holds nothing
    from transformers import AutoConfig, AutoModelForCausalLM

    from lit_fsdp.units import Units, plan_units

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=3, **EVEN))
    predicted = predict_collectives(plan_units(model, Units()), Sharding())
    assert (predicted.gathers, predicted.reduce_scatters, predicted.all_reduces) == (9, 5, 0)
