"""Sharded adapters over full and 4-bit weights equal stock Transformers + bitsandbytes + peft on one device."""

from itertools import combinations
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model
from torch import Tensor, nn
from training import (
    NUM_STEPS,
    OPTIMIZER,
    Recorder,
    Result,
    Rows,
    build_task,
    build_trainer,
    collate,
    gather_weights,
    make_rows,
    save_model,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lit_fsdp import FSDP2Strategy, Mesh, Offload, Recompute, Sharding
from lit_fsdp.adapters import LoRA
from lit_fsdp.quantization import Quantization
from lit_fsdp.sharding import Compile
from lit_fsdp.tensor_files import TensorFiles
from ranks import run_ranks

# Rows of 64 and 192 weights make blocks; 32, 67 and 192 rows on 3 ranks make uneven shards.
SIZES = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
BATCH = 24  # per step, on all ranks together
TOLERANCE = 1e-6
LORA = LoRA(r=4, alpha=8)
BASES: dict[str, Quantization | None] = {
    "full": None,
    "nf4": Quantization(double=False),
    "nf4 double": Quantization(),
    "fp4": Quantization(type="fp4", double=False),
}


class Start(pl.Callback):
    """Keeps the weights that training starts with."""

    def on_train_start(self, _: pl.Trainer, task: pl.LightningModule) -> None:
        self.weights = {name: value.clone() for name, value in gather_weights(task).items()}  # type: ignore[arg-type]


def fit(
    folder: Path, out: Path, task_options: dict[str, Any], strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    """Train on this rank; rank 0 writes the result and the start."""
    accumulate = options.get("accumulate_grad_batches", 1)
    recorder, start = Recorder(), Start()
    trainer = build_trainer(FSDP2Strategy(print_plan=False, **strategy), callbacks=[recorder, start], **options)
    task = build_task(folder, **{"lora": LORA, **task_options})
    trainer.fit(task, Rows(67, BATCH // dist.get_world_size() // accumulate, num_rows=NUM_STEPS * BATCH))
    recorder.result.weights = gather_weights(task)
    if trainer.is_global_zero:
        torch.save({"result": vars(recorder.result), "start": start.weights}, out)


def train_sharded(
    folder: Path, tmp_path: Path, world_size: int, *, strategy: dict[str, Any] | None = None, **options: Any
) -> tuple[Result, dict[str, Tensor]]:
    """Train on forked ranks; return the result and the weights it started with."""
    task_options = {key: options.pop(key) for key in ("lora", "quantization") if key in options}
    run_ranks(fit, folder, tmp_path / "out", task_options, strategy or {}, options, world_size=world_size)
    found = torch.load(tmp_path / "out")
    return Result(**found["result"]), found["start"]


def load_stock(folder: Path, quantization: Quantization | None) -> nn.Module:
    """Return the model as Transformers and bitsandbytes load it."""
    options: dict[str, Any] = {}
    if quantization is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization.type,
            bnb_4bit_use_double_quant=quantization.is_double,
            bnb_4bit_compute_dtype=torch.float32,
        )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def train_plainly(folder: Path, start: dict[str, Tensor], quantization: Quantization | None, lora: LoRA) -> Result:
    """Train stock libraries on one device, from the same first values of adapters."""
    model = get_peft_model(load_stock(folder, quantization), lora.build_config())
    model.train()
    names = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in names.items():
            if parameter.requires_grad:
                first = start[name.replace("modules_to_save.default.", "")]
                if "magnitude" in name:  # of DoRA: not drawn, so both must have found the same
                    assert float((parameter - first).abs().max()) <= TOLERANCE
                parameter.copy_(first)
    trained = [p for p in names.values() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.ndim >= 2) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=OPTIMIZER.learning_rate, eps=OPTIMIZER.eps)
    rows = make_rows(67, NUM_STEPS * BATCH)
    result = Result()
    for step in range(NUM_STEPS):
        loss = model(**collate(rows[step * BATCH : (step + 1) * BATCH])).loss
        optimizer.zero_grad()
        loss.backward()
        result.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
        result.losses.append(float(loss.detach()))
    result.weights = {
        name.replace("modules_to_save.default.", ""): p.detach() for name, p in names.items() if p.requires_grad
    }
    return result


def compare(result: Result, truth: Result) -> dict[str, float]:
    """Return the largest differences of losses, gradient norms and trained weights."""
    differences = {
        "losses": max(abs(a - b) for a, b in zip(result.losses, truth.losses, strict=True)),
        "grad_norms": max(abs(a - b) for a, b in zip(result.grad_norms, truth.grad_norms, strict=True)),
    }
    for name, weight in truth.weights.items():
        differences[name] = float((result.weights[name] - weight).abs().max())
    return differences


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
    "offload": {"device": None, "host": Offload()},
    "recompute": {"kept": Recompute(), "recomputed": Recompute(mode="full")},
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


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
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
            "sharding": Sharding(reshard_after_forward=AXES["sharding"][sharding], hold_gradients=is_held),
            "offload": AXES["offload"][offload],
            "recompute": AXES["recompute"][recompute],
        },
        accumulate_grad_batches=num_micro_batches,
    )
    assert result.losses[-1] != result.losses[0]
    differences = compare(result, truths[base])
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.parametrize(
    ("lora", "quantization"),
    [
        (LoRA(r=4, alpha=8, targets=["q_proj", "embed_tokens", "lm_head"]), Quantization()),
        (LoRA(r=4, alpha=8, targets=r".*layers\.[02]\.(self_attn|mlp)\.[gv].*", rslora=True), None),
        (
            LoRA(r=4, modules_to_save=["lm_head"], rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 3}),
            Quantization(),
        ),
        (LoRA(r=4, alpha=8, dora=True), Quantization()),
        (LoRA(r=4, alpha=8, dora=True, targets=["up_proj", "k_proj"]), None),
    ],
    ids=["embeddings", "regex rslora", "modules_to_save patterns", "dora nf4", "dora full"],
)
def test_relatives_of_lora_train_as_those_of_peft(
    lora: LoRA, quantization: Quantization | None, folder: Path, tmp_path: Path
) -> None:
    for world_size in (1, 3):
        result, start = train_sharded(folder, tmp_path, world_size, lora=lora, quantization=quantization)
        if world_size == 1:
            truth = train_plainly(folder, start, quantization, lora)
        differences = compare(result, truth)
        assert len(truth.weights) >= 3
        assert max(differences.values()) <= TOLERANCE, (world_size, differences)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "loftq"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_decomposed_weights_and_adapters_add_up_to_the_model(
    init: Any, world_size: int, folder: Path, tmp_path: Path
) -> None:
    quantization = None if init != "loftq" else Quantization(double=False)
    lora = LoRA(r=4, alpha=8, init=init)
    _, start = train_sharded(folder, tmp_path, world_size, lora=lora, quantization=quantization, max_steps=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = load_stock(folder, quantization)
    for name, weight in model.named_parameters():
        base = f"{name.removesuffix('.weight')}.base_layer.weight"
        if base not in start:
            continue
        a, b = (start[base.replace("base_layer.weight", f"{key}.default.weight")] for key in ("lora_A", "lora_B"))
        added = lora.alpha / lora.r * b @ a
        if quantization is None:
            assert float((start[base] + added - weight).abs().max()) <= TOLERANCE, name
            strongest = torch.linalg.svdvals(weight.detach())[0]
            assert float(torch.linalg.svdvals(start[base])[0]) < strongest or init == "olora"
            assert float(added.abs().max()) > 0
        else:
            stock = plain.get_submodule(name.removesuffix(".weight"))
            assert torch.equal(start[base].view(-1), stock.weight.view(-1))
            rounded = bnb.functional.dequantize_4bit(stock.weight, stock.weight.quant_state)  # type: ignore[attr-defined]
            assert float((rounded + added - weight).norm()) < 0.95 * float((rounded - weight).norm()), name


def test_pissa_starts_where_that_of_peft_does(folder: Path, tmp_path: Path) -> None:
    lora = LoRA(r=4, alpha=8, init="pissa")
    _, start = train_sharded(folder, tmp_path, 2, lora=lora, max_steps=1)
    config = lora.build_config()
    config.init_lora_weights = "pissa"
    stock = get_peft_model(load_stock(folder, None), config)
    for name, parameter in stock.named_parameters():
        own = start[name.removeprefix("base_model.model.")]
        # A singular vector may have either sign, the product has not.
        if "lora_" not in name:
            assert float((own - parameter).abs().max()) <= TOLERANCE, name
        assert own.shape == parameter.shape


def fit_validated(folder: Path, out: Path) -> None:
    task = build_task(folder, lora=LORA, quantization=Quantization())
    strategy = FSDP2Strategy(print_plan=False)
    rows = Validated(67, BATCH // dist.get_world_size(), num_rows=NUM_STEPS * BATCH)
    build_trainer(strategy).validate(task, rows, verbose=False)
    recorder = Recorder()
    start = Start()
    build_trainer(FSDP2Strategy(print_plan=False), callbacks=[recorder, start]).fit(task, rows)
    recorder.result.weights = gather_weights(task)
    if dist.get_rank() == 0:
        torch.save(vars(recorder.result), out)


class Validated(Rows):
    """Also validates, between the steps."""

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def test_a_model_that_was_evaluated_trains_as_before(folder: Path, truths: dict[str, Result], tmp_path: Path) -> None:
    run_ranks(fit_validated, folder, tmp_path / "out")
    differences = compare(Result(**torch.load(tmp_path / "out")), truths["nf4 double"])
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.parametrize("compile_", [Compile(backend="aot_eager")], ids=["aot_eager"])
def test_compiled_blocks_train_as_before(
    compile_: Compile, folder: Path, truths: dict[str, Result], tmp_path: Path
) -> None:
    result, _ = train_sharded(folder, tmp_path, 2, quantization=Quantization(), strategy={"compile": compile_})
    differences = compare(result, truths["nf4 double"])
    assert max(differences.values()) <= TOLERANCE, differences


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
