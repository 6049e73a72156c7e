"""Trains adapters on forked ranks, and with stock Transformers + bitsandbytes + peft on one device."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from differences import find_largest
from models import dequantize_model
from peft import get_peft_model
from torch import Tensor, nn
from training import (
    NUM_STEPS,
    Recorder,
    Result,
    Rows,
    build_task,
    build_trainer,
    collate,
    gather_weights,
    make_rows,
    train_stock,
)
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from lit_fsdp import FSDP2Strategy
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.weights.load import load_weights, materialize
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
    "nf4": Quantization(double_quant=False),
    "nf4 double": Quantization(),
    "fp4": Quantization(type="fp4", double_quant=False),
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


def save_dequantized(folder: Path, base: Path, quantization: Quantization) -> Path:
    """Write in full the weights that a quantized model computes with."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    quantize_model(model, quantization)
    materialize(model, torch.device("cpu"))
    load_weights(model, base)
    dequantize_model(model, load_stock(base, None)).save_pretrained(folder)
    return folder


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
    rows = make_rows(67, NUM_STEPS * BATCH)
    return train_stock(model, lambda step: model(**collate(rows[step * BATCH : (step + 1) * BATCH])).loss)


def compare(result: Result, truth: Result) -> dict[str, float]:
    """Return the largest differences of losses, gradient norms and trained weights."""
    differences = {
        "losses": find_largest(abs(a - b) for a, b in zip(result.losses, truth.losses, strict=True)),
        "grad_norms": find_largest(abs(a - b) for a, b in zip(result.grad_norms, truth.grad_norms, strict=True)),
    }
    for name, weight in truth.weights.items():
        differences[name] = find_largest([float((result.weights[name] - weight).abs().max())])
    return differences
