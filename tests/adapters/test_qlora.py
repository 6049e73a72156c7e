"""Sharded adapters over full and 4-bit weights equal stock Transformers + bitsandbytes + peft on one device."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapter_training import BASES, BATCH, LORA, SIZES, TOLERANCE, compare, train_plainly, train_sharded
from torch import Tensor
from training import (
    NUM_STEPS,
    Recorder,
    Result,
    Rows,
    build_task,
    build_trainer,
    fit_and_write,
    save_model,
)
from transformers import AutoModelForCausalLM

from lit_fsdp import ActivationCheckpointing, CPUOffload, FSDP2Strategy, Mesh, Sharding
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.shard import Compile
from lit_fsdp.weights.safetensors_io import TensorFiles
from ranks import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model", **SIZES)


@pytest.fixture(scope="module")
def truths(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """What stock libraries make of every base."""
    _, start = train_sharded(folder, tmp_path_factory.mktemp("start"), 1, max_steps=1)
    return {name: train_plainly(folder, start, quantization, LORA) for name, quantization in BASES.items()}


AXES: dict[str, dict[str, Any]] = {
    "base": {name: name for name in BASES},
    "sharding": {"full": True, "grad_op": False, "int": 2, "hybrid": True},
    "cpu_offload": {"device": None, "host": CPUOffload()},
    "activation_checkpointing": {"kept": ActivationCheckpointing(), "recomputed": ActivationCheckpointing(mode="full")},
    "accumulation": {"1": (1, False), "2 with comm": (2, False), "2 without comm": (2, True)},
    "ranks": {"1": 1, "2": 2, "3": 3, "4": 4},
}
# Every pair of values of two axes is in one of these runs; checked below.
RUNS = [
    ("nf4 double", "full", "device", "recomputed", "1", "2"),
    ("nf4 double", "hybrid", "host", "kept", "2 with comm", "4"),
    ("nf4 double", "grad_op", "device", "kept", "2 without comm", "3"),
    ("nf4 double", "int", "host", "recomputed", "1", "4"),
    ("nf4 double", "full", "host", "kept", "2 with comm", "1"),
    ("nf4", "full", "host", "kept", "2 without comm", "3"),
    ("nf4", "grad_op", "host", "recomputed", "1", "2"),
    ("nf4", "int", "device", "kept", "2 without comm", "4"),
    ("nf4", "hybrid", "device", "recomputed", "2 with comm", "4"),
    ("nf4", "grad_op", "device", "recomputed", "1", "1"),
    ("fp4", "full", "device", "kept", "1", "4"),
    ("fp4", "grad_op", "host", "recomputed", "2 with comm", "3"),
    ("fp4", "int", "host", "kept", "2 with comm", "4"),
    ("fp4", "hybrid", "device", "kept", "2 without comm", "4"),
    ("fp4", "full", "device", "recomputed", "2 without comm", "2"),
    ("fp4", "full", "host", "kept", "1", "1"),
    ("full", "full", "host", "recomputed", "2 with comm", "2"),
    ("full", "grad_op", "device", "kept", "2 with comm", "4"),
    ("full", "int", "device", "kept", "2 without comm", "4"),
    ("full", "hybrid", "host", "recomputed", "1", "4"),
    ("full", "full", "device", "recomputed", "1", "3"),
    ("full", "grad_op", "host", "recomputed", "2 without comm", "1"),
    ("full", "full", "device", "kept", "2 without comm", "2"),
]
QUICK = {RUNS[i] for i in (0, 1, 7, 11, 16)}  # the others with `pytest -m slow`
IMPOSSIBLE = {("hybrid", "1"), ("hybrid", "2"), ("hybrid", "3"), ("int", "1"), ("int", "2"), ("int", "3")}


def test_the_runs_cover_every_pair_of_settings() -> None:
    names = list(AXES)
    missing = []
    for (i, first), (j, second) in combinations(enumerate(names), 2):
        for a in AXES[first]:
            for b in AXES[second]:
                is_covered = any(run[i] == a and run[j] == b for run in RUNS)
                if not is_covered and not (second == "ranks" and (a, b) in IMPOSSIBLE):
                    missing.append((first, a, second, b))
    assert missing == []


@pytest.mark.full
def test_a_model_that_draws_some_parameters_wherever_it_is_built_trains_as_with_stock_libraries(tmp_path: Path) -> None:
    """DiffLlama does so with ``torch.normal``, which heeds no default device."""
    folder = save_model(tmp_path / "model", model_type="diffllama", **{**SIZES, "num_key_value_heads": 2})
    result, start = train_sharded(folder, tmp_path, 2, quantization=Quantization())
    differences = compare(result, train_plainly(folder, start, Quantization(), LORA))
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=() if run in QUICK else pytest.mark.slow, id=" ".join(run)) for run in RUNS],
)
def test_sharded_adapters_train_as_stock_libraries_do_on_one_device(
    run: tuple[str, ...], folder: Path, truths: dict[str, Result], tmp_path: Path
) -> None:
    base, sharding, offload, recompute, accumulation, ranks = run
    num_micro_batches, is_held = AXES["accumulation"][accumulation]
    result, _ = train_sharded(
        folder,
        tmp_path,
        AXES["ranks"][ranks],
        quantization=BASES[base],
        strategy={
            "mesh": Mesh(replicate=2 if sharding == "hybrid" else 1),
            "sharding": Sharding(reshard_after_forward=AXES["sharding"][sharding], no_sync=is_held),
            "cpu_offload": AXES["cpu_offload"][offload],
            "activation_checkpointing": AXES["activation_checkpointing"][recompute],
        },
        accumulate_grad_batches=num_micro_batches,
    )
    assert result.losses[-1] != result.losses[0]
    differences = compare(result, truths[base])
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.full
def test_weights_kept_from_recomputation_train_as_stock_libraries_do(
    folder: Path, truths: dict[str, Result], tmp_path: Path
) -> None:
    recompute = ActivationCheckpointing(mode="full", keep_dequantized=True)
    options: dict[str, Any] = {"strategy": {"activation_checkpointing": recompute}, "accumulate_grad_batches": 2}
    result, _ = train_sharded(folder, tmp_path, 2, quantization=BASES["nf4 double"], **options)
    differences = compare(result, truths["nf4 double"])
    assert max(differences.values()) <= TOLERANCE, differences


def fit_validated(folder: Path, out: Path) -> None:
    task = build_task(folder, lora=LORA, quantization=Quantization())
    strategy = FSDP2Strategy(print_plan=False)
    rows = Validated(67, BATCH // dist.get_world_size(), num_rows=NUM_STEPS * BATCH)
    build_trainer(strategy).validate(task, rows, verbose=False)
    fit_and_write(build_trainer(FSDP2Strategy(print_plan=False), callbacks=[Recorder()]), task, rows, out)


class Validated(Rows):
    """Also validates, between the steps."""

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.mark.full
def test_a_model_that_was_evaluated_trains_as_before(folder: Path, truths: dict[str, Result], tmp_path: Path) -> None:
    run_ranks(fit_validated, folder, tmp_path / "out")
    differences = compare(Result(**torch.load(tmp_path / "out")), truths["nf4 double"])
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.full
@pytest.mark.parametrize(
    ("base", "mode"), [pytest.param("full", "none", marks=pytest.mark.slow), ("nf4 double", "full")]
)
def test_compiled_blocks_are_one_graph_and_train_as_before(
    base: str, mode: Any, folder: Path, truths: dict[str, Result], tmp_path: Path
) -> None:
    strategy = {
        "compile": Compile(backend="aot_eager", fullgraph=True),  # fails where Python is needed
        "activation_checkpointing": ActivationCheckpointing(mode=mode),
    }
    result, _ = train_sharded(folder, tmp_path, 2, quantization=BASES[base], strategy=strategy)
    differences = compare(result, truths[base])
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.full
def test_bfloat16_on_two_ranks_is_bit_for_bit_two_halves_on_one(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"quantization": Quantization(), "precision": "bf16-true"}
    one, start = train_sharded(folder, tmp_path, 1, accumulate_grad_batches=2, **options)
    two, _ = train_sharded(folder, tmp_path, 2, **options)
    differences = compare(two, one)
    assert differences.pop("grad_norms") <= 1e-7  # a sum over ranks, in another order
    assert max(differences.values()) == 0
    dtypes = {name.split(".")[-2]: value.dtype for name, value in start.items()}
    assert {value.dtype for name, value in start.items() if "lora_" in name} == {torch.float32}
    assert {value.dtype for name, value in start.items() if "base_layer" in name} == {torch.uint8}
    assert dtypes["embed_tokens"] == dtypes["lm_head"] == dtypes["norm"] == torch.bfloat16


def train_reading(folder: Path, out: Path) -> None:
    """Count what each rank reads and holds of the quantized weights."""
    reads: list[int] = []
    original = TensorFiles.read_rows

    def read_rows(self: TensorFiles, name: str, begin: int, end: int) -> Tensor:
        rows = original(self, name, begin, end)
        reads.append(rows.numel() * rows.element_size())
        return rows

    TensorFiles.read_rows = read_rows  # type: ignore[method-assign]
    task = build_task(folder, lora=LORA, quantization=Quantization())
    build_trainer(FSDP2Strategy(print_plan=False), max_steps=1).fit(task, Rows(67, BATCH // dist.get_world_size()))
    held = {name: p.to_local().numel() for name, p in task.named_parameters() if p.dtype == torch.uint8}  # type: ignore[operator]
    torch.save({"read": sum(reads), "largest": max(reads), "held": held}, out / f"{dist.get_rank()}.pt")


@pytest.mark.full
def test_a_rank_reads_and_holds_its_own_rows(folder: Path, tmp_path: Path) -> None:
    run_ranks(train_reading, folder, tmp_path, world_size=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    dense = [p for name, p in model.named_parameters() if "_proj" in name]
    for found in ranks:
        assert found["read"] == sum(p.numel() * 4 for p in dense) // 2
        assert found["largest"] == max(p.numel() * 4 for p in dense) // 2
        codes = sum(n for name, n in found["held"].items() if not name.endswith("_absmax"))
        maxima = sum(n for name, n in found["held"].items() if name.endswith("_absmax"))
        assert codes == sum(p.numel() for p in dense) // 2 // 2  # half of the rows, two weights a byte
        assert maxima == sum(p.numel() for p in dense) // 2 // 64
