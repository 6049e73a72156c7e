"""QLoRA beside stock Transformers + bitsandbytes + peft on one device, and beside accelerate's FSDP2, on the same work.

    python benchmarks/qlora.py --shape small --ranks 2 --repeats 3 --out benchmarks/results/qlora_DATE.md
    python benchmarks/qlora.py --shape 8b --ranks 1 --repeats 3 --cap-gib 16      # on a GPU

Each variant runs in fresh processes, in turn, ``repeats`` times: a random Llama-architecture model in NF4 with double
quantization, adapters of rank 16 on all linear layers, AdamW, every rank the same number of random tokens a step,
activation checkpointing. Only ``small`` reads its weights from files; larger shapes are drawn layer by layer on the
device. Accelerate's side is its own ``fsdp2_prepare_model``, called directly: on a CPU its launcher turns FSDP off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

VARIANTS = ("stock", "accelerate", "ours 1", "ours")
KINDS = ("codes", "absmax", "other frozen", "adapters", "optimizer")
RANK = 16
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "70b": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def is_cuda() -> bool:
    """Whether to measure on a GPU."""
    import torch

    return torch.cuda.is_available()


def read_peak_bytes() -> int:
    """Return the most memory that was allocated: on the GPU, or resident in this process."""
    import torch

    return torch.cuda.max_memory_allocated() if is_cuda() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_batch(args: argparse.Namespace, step: int) -> dict[str, Any]:
    """Return the tokens of this rank for a step."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + int(os.environ.get("RANK", "0")))
    ids = torch.randint(SHAPES[args.shape]["vocab_size"], (1, args.length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def load_stock(args: argparse.Namespace) -> Any:
    """Return the model as Transformers, bitsandbytes and peft make it, with recomputation."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    if args.shape == "small":
        model = AutoModelForCausalLM.from_pretrained(
            args.folder, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": args.device}
        )
    else:
        model = draw_stock(args, quantization)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))


def draw_stock(args: argparse.Namespace, quantization: Any) -> Any:
    """Return a random model of stock 4-bit layers, drawn layer by layer on the device."""
    import torch
    from bitsandbytes.nn import Params4bit
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    config = AutoConfig.for_model("llama", **SHAPES[args.shape])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = replace_with_bnb_linear(model, modules_to_not_convert=["lm_head"], quantization_config=quantization)
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            shape = (module.out_features, module.in_features) if isinstance(parameter, Params4bit) else parameter.shape
            values = torch.randn(shape, dtype=torch.bfloat16, device=args.device).mul_(0.02)
            if isinstance(parameter, Params4bit):
                made = Params4bit(values.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True)
                module._parameters[key] = made.to(args.device)
            else:
                module._parameters[key] = torch.nn.Parameter(values, requires_grad=False)
    return model.to(args.device)


def shard_with_accelerate(model: Any) -> Any:
    """Shard as accelerate does."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda() else "gloo")
    accelerator = Accelerator(cpu=not is_cuda())
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
    )
    return fsdp2_prepare_model(accelerator, model)


def train_stock(args: argparse.Namespace, *, is_sharded: bool) -> dict[str, Any]:
    """Train in a plain loop."""
    import torch

    model = load_stock(args)
    if is_sharded:
        model = shard_with_accelerate(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    times, losses = [], []
    for step in range(args.steps):
        begin = time.perf_counter()
        batch = {name: value.to(args.device) for name, value in make_batch(args, step).items()}
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        times.append(time.perf_counter() - begin)
    return {"times": times, "losses": losses, "bytes": count_bytes(model, optimizer)}


def train_ours(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Train under the Trainer."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from lit_fsdp import ActivationCheckpointing, FSDP2Strategy
    from lit_fsdp.adapters.lora import LoRA
    from lit_fsdp.quantization.quantize import Quantization
    from lit_fsdp.tasks import CausalLM, LRSchedule

    class Clock(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            self.times: list[float] = []
            self.losses: list[float] = []
            self.begin = time.perf_counter()

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.losses.append(float(trainer.callback_metrics["train/loss"]))  # waits for the device
            self.times.append(time.perf_counter() - self.begin)
            self.begin = time.perf_counter()

    source: dict[str, Any] = {"pretrained": str(args.folder)}
    if args.shape != "small":
        source = {"config": {"model_type": "llama", **SHAPES[args.shape]}}
    task = CausalLM(
        **source,
        lora=LoRA(r=RANK, alpha=2 * RANK),
        quantization=Quantization(),
        lr_scheduler=LRSchedule(type="constant"),
    )
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="gpu" if is_cuda() else "cpu",
        devices=ranks,
        strategy=FSDP2Strategy(print_plan=False, activation_checkpointing=ActivationCheckpointing(mode="full")),
        precision="bf16-true",
        max_steps=args.steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    rows = [make_batch(args, step) for step in range(args.steps)]
    trainer.fit(task, DataLoader(rows, batch_size=None))
    return {
        "times": clock.times,
        "losses": clock.losses,
        "bytes": count_bytes(task, trainer.optimizers[0]),
        "expected": estimate_bytes(task, ranks),
    }


def count_bytes(model: Any, optimizer: Any) -> dict[str, int]:
    """Return what this rank holds, by kind."""
    import torch

    def local(tensor: Any) -> int:
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return int(tensor.numel() * tensor.element_size())

    found = dict.fromkeys(KINDS, 0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_absmax = name.endswith(("_absmax", "_nested"))
        is_code = tensor.dtype == torch.uint8
        kind = "absmax" if is_absmax else "codes" if is_code else "adapters" if tensor.requires_grad else "other frozen"
        found[kind] += local(tensor)
        if (state := getattr(tensor, "quant_state", None)) is not None:  # of a stock layer
            found["absmax"] += local(state.absmax) + (local(state.state2.absmax) + 4 if state.nested else 0)
    for state in optimizer.state.values():
        found["optimizer"] += sum(local(value) for value in state.values() if torch.is_tensor(value) and value.dim())
    return found


def estimate_bytes(task: Any, ranks: int) -> dict[str, float]:
    """Return what a rank should hold, from shapes alone: 4 bits a weight, 8 bits per 64 weights, 4 bytes per 16,384."""
    from lit_fsdp.quantization.layers import iterate_quantized

    weights = sum(shape.numel() for _, layer in iterate_quantized(task) for shape in layer.dense_shapes.values())
    nested = sum(
        4 * (-(-shape.numel() // (64 * 256)) + 1)
        for _, layer in iterate_quantized(task)
        for shape in layer.dense_shapes.values()
    )
    trained = sum(p.numel() for p in task.parameters() if p.requires_grad)
    frozen = sum(
        p.numel() * p.element_size() for p in task.parameters() if not p.requires_grad and p.dtype.itemsize > 1
    )
    buffers = sum(b.numel() * b.element_size() for b in task.buffers() if b.dtype.itemsize > 1)
    return {
        "codes": weights / 2 / ranks,
        "absmax": weights / 64 / ranks + nested,
        "other frozen": frozen / ranks + buffers,
        "adapters": 4 * trained / ranks,
        "optimizer": 8 * trained / ranks,
    }


def be_variant(args: argparse.Namespace) -> None:
    """Measure one variant on this rank; rank 0 prints the results of all as JSON."""
    import torch
    import torch.distributed as dist

    args.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_cuda() else torch.device("cpu")
    if is_cuda():
        torch.cuda.set_device(args.device)
        if args.cap_gib:
            whole = torch.cuda.get_device_properties(args.device).total_memory
            torch.cuda.set_per_process_memory_fraction(args.cap_gib * 2**30 / whole)
    before = read_peak_bytes()
    ranks = args.ranks if args.variant in ("accelerate", "ours") else 1
    if args.variant.startswith("ours"):
        facts = train_ours(args, ranks)
    else:
        facts = train_stock(args, is_sharded=args.variant == "accelerate")
    facts["peak_bytes"] = read_peak_bytes() - before
    facts["step_s"] = statistics.median(facts.pop("times")[2:])
    boxes: list[Any] = [facts]
    if dist.is_initialized():
        boxes = [None] * dist.get_world_size()
        dist.all_gather_object(boxes, facts)
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0:
        print(json.dumps(boxes), flush=True)


def run(variant: str, args: argparse.Namespace, folder: str) -> list[dict[str, Any]] | str:
    """Return the facts of each rank of a variant in fresh processes, or why there are none."""
    options = ["--variant", variant, "--folder", folder, "--shape", args.shape, "--ranks", str(args.ranks)]
    options += ["--steps", str(args.steps), "--length", str(args.length), "--cap-gib", str(args.cap_gib)]
    command = [sys.executable, __file__, *options]
    if variant in ("accelerate", "ours"):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        command = [sys.executable, *launcher, __file__, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    if lines:
        return list(json.loads(lines[-1]))
    reasons = [line for line in done.stderr.splitlines() if "Error" in line]
    return reasons[0].strip()[:200] if reasons else done.stderr[-200:]


def format_results(results: dict[str, list[Any]], args: argparse.Namespace) -> str:
    """Return the result page."""
    import torch

    device = torch.cuda.get_device_name() if is_cuda() else f"CPU ({platform.machine()}), no GPU, gloo"
    packages = ("torch", "transformers", "bitsandbytes", "peft", "accelerate", "lightning")
    cap = f" under a cap of {args.cap_gib:g} GiB" if args.cap_gib else ""
    lines = [
        f"# QLoRA, shape {args.shape}, {args.ranks} ranks, {date.today().isoformat()}",
        "",
        f"`python benchmarks/qlora.py --shape {args.shape} --ranks {args.ranks} --repeats {args.repeats} --steps "
        f"{args.steps} --length {args.length}` on {device}{cap}; "
        + ", ".join(f"{name} {version(name)}" for name in packages)
        + f". One row of {args.length} tokens per rank and step, bf16, recomputation. Medians of {args.repeats} runs, "
        "variants in turn; the loss is that of rank 0, ours of all ranks. Ratios count; absolute times on a shared CPU "
        "mean little. Peak memory is "
        + ("that of torch's allocator." if is_cuda() else "the growth of the resident process, loading included."),
        "",
        "| variant | ranks | step, s | to stock | tokens/s | peak per rank, GiB | 4-bit per rank, MB | last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    stock = [r for r in results.get("stock", []) if not isinstance(r, str)]
    base = statistics.median(r[0]["step_s"] for r in stock) if stock else float("nan")
    for variant, runs in results.items():
        good = [r for r in runs if not isinstance(r, str)]
        if not good:
            lines.append(f"| {variant} | | failed: {runs[0]} | | | | | |")
            continue
        step = statistics.median(max(rank["step_s"] for rank in r) for r in good)
        peak = statistics.median(max(rank["peak_bytes"] for rank in r) for r in good) / 2**30
        held = max(rank["bytes"]["codes"] + rank["bytes"]["absmax"] for rank in good[0]) / 1e6
        speed = len(good[0]) * args.length / step
        lines.append(
            f"| {variant} | {len(good[0])} | {step:.3f} | {step / base:.2f} | {speed:,.0f} | {peak:.3f} | {held:.2f} | "
            f"{good[0][0]['losses'][-1]:.4f} |"
        )
    lines += ["", "Bytes of the rank that holds most, by kind, beside what shapes alone predict:", ""]
    lines += ["| variant | " + " | ".join(KINDS) + " |", "|---|" + "---|" * len(KINDS)]
    for variant in ("ours 1", "ours"):
        good = [r for r in results.get(variant, []) if not isinstance(r, str)]
        if good:
            cells = (f"{max(r['bytes'][k] for r in good[0]):,} / {good[0][0]['expected'][k]:,.0f}" for k in KINDS)
            lines.append(f"| {variant} (held / predicted) | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all variants, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--cap-gib", type=float, default=0.0)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        be_variant(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.shape == "small":
            save_model(folder)
        results: dict[str, list[Any]] = {variant: [] for variant in args.variants}
        for _ in range(args.repeats):
            for variant in args.variants:
                results[variant].append(run(variant, args, folder))
    page = format_results(results, args)
    print(page)
    if args.out:
        args.out.write_text(page)


def save_model(folder: str) -> None:
    """Write the random model that all variants of ``small`` read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPES["small"])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
