"""QLoRA and LoRA beside stock Transformers + bitsandbytes + peft on one device, and beside accelerate's FSDP2.

    python benchmarks/qlora.py --shape small --ranks 2 --repeats 3 --out benchmarks/results/qlora_DATE.md
    python benchmarks/qlora.py --shape 8b --ranks 1 --variants stock "ours 1" --cap-gib 16 --profile      # on a GPU
    python benchmarks/qlora.py --shape tiny --device cpu --repeats 1 --profile                            # in seconds

Each variant runs in fresh processes, in turn, ``repeats`` times, each turn in the other order: a random
Llama-architecture model in NF4 with double quantization, or in bfloat16, adapters of rank 16 on all linear layers,
AdamW, every rank the same number of random tokens a step, activation checkpointing unless ``--keep-activations``.
Stock runs under autocast, as the Trainer of Transformers does; ``trl`` is TRL's SFTTrainer with its default loss, where
that is installed. Only ``small`` reads its weights from files; others are drawn layer by layer on the device, those of
`ours` on the CPU, a million numbers again and again. Accelerate's side is its own ``fsdp2_prepare_model``, called
directly: on a CPU its launcher turns FSDP off. Rows of more than 4,096 tokens, or without activation checkpointing,
have their loss in parts of 512, in `ours` only. With ``--one-card`` all ranks share one GPU through gloo: no measure of
speed, see ``one_card.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quick_draws import draw_quickly
from step_costs import format_costs, list_costs, start_profile
from step_variants import read_memory
from stock_adapters import RANK, SHAPES, load_stock, save_model

VARIANTS = ("stock", "accelerate", "ours 1", "ours 1 kept", "ours", "ours kept")  # kept: what is dequantized
BY_NAME_ONLY = ("trl", "ours 1 compiled")
ON_RANKS = ("accelerate", "ours", "ours kept")
KINDS = ("codes", "absmax", "other frozen", "adapters", "optimizer")
COLUMNS = (
    *("variant", "ranks", "runs", "step, s", "to stock", "CPU, s", "to stock", "tokens/s", "steps, GiB", "peak, GiB"),
    *("4-bit, MB", "last loss"),
)
WARMUP = 2  # steps
LEARNING_RATE = 1e-4
PROCESS_LIMIT_S = 300  # a variant that hangs must not cost the others their turn
GRACE_S = 45  # torchrun gives its ranks 30


def is_cuda() -> bool:
    """Whether to measure on a GPU."""
    import torch

    return torch.cuda.is_available()


def read_peak_bytes() -> int:
    """Return the most memory that was allocated: on the GPU, or resident in this process."""
    import torch

    # Not ``ru_maxrss``, which starts at the peak of the process that started this one.
    return torch.cuda.max_memory_allocated() if is_cuda() else read_memory("VmHWM")


def make_batch(args: argparse.Namespace, step: int) -> dict[str, Any]:
    """Return the tokens of this rank for a step."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + int(os.environ.get("RANK", "0")))
    ids = torch.randint(SHAPES[args.shape]["vocab_size"], (1, args.length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


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


class Meter:
    """Notes what the steps of a run take; ``end`` waits for the device.

    The last step is recorded by a profiler if that was asked for, and counts for no time.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.times: list[float] = []
        self.cpu_times: list[float] = []
        self.losses: list[float] = []
        self.costs: Any = None
        self.loading_peak = 0  # and the first steps
        self.num_steps, self.is_profiled = args.steps, args.profile
        self.profiler: Any = None

    def begin(self) -> None:
        """Begin a step."""
        self.started, self.cpu_started = time.perf_counter(), time.process_time()

    def end(self, loss: Any) -> None:
        """End a step."""
        import torch

        self.losses.append(float(loss))
        if is_cuda():
            torch.cuda.synchronize()
        if self.profiler is not None:
            self.costs, self.profiler = list_costs(self.profiler), None
        else:
            self.times.append(time.perf_counter() - self.started)
            self.cpu_times.append(time.process_time() - self.cpu_started)
        if len(self.losses) == WARMUP:
            self.loading_peak = read_peak_bytes()
            if is_cuda():
                torch.cuda.reset_peak_memory_stats()
        if self.is_profiled and len(self.losses) == self.num_steps - 1:
            self.profiler = start_profile()
        self.begin()

    def report(self) -> dict[str, Any]:
        """Return what was found."""
        peak = read_peak_bytes()
        return {
            "step_s": statistics.median(self.times[WARMUP:]),
            "cpu_s": statistics.median(self.cpu_times[WARMUP:]),
            "losses": self.losses,
            "step_peak_bytes": peak,
            "peak_bytes": max(peak, self.loading_peak),
            "costs": self.costs,
        }


def train_stock(args: argparse.Namespace, *, is_sharded: bool) -> dict[str, Any]:
    """Train in a plain loop."""
    import torch

    model = load_stock(args.shape, args.base, args.folder, args.device, recomputes=not args.keep_activations)
    if is_sharded:
        model = shard_with_accelerate(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    meter = Meter(args)
    meter.begin()
    for step in range(args.steps):
        batch = {name: value.to(args.device) for name, value in make_batch(args, step).items()}
        with torch.autocast(args.device.type, torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.end(loss.detach())
    return {**meter.report(), "bytes": count_bytes(model, optimizer)}


def train_trl(args: argparse.Namespace) -> dict[str, Any]:
    """Train in the SFTTrainer of TRL."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.end(trainer.last_loss)

    class Keep(SFTTrainer):  # type: ignore[misc]
        last_loss: Any = None

        def training_step(self, *given: Any, **named: Any) -> Any:
            self.last_loss = super().training_step(*given, **named)
            return self.last_loss

    model = load_stock(args.shape, args.base, args.folder, args.device, recomputes=False)
    rows = Dataset.from_list(
        [{"input_ids": make_batch(args, step)["input_ids"][0].tolist()} for step in range(args.steps)]
    )
    meter = Meter(args)
    with tempfile.TemporaryDirectory() as out:
        settings = SFTConfig(
            output_dir=out,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            bf16=True,
            use_cpu=not is_cuda(),
            gradient_checkpointing=not args.keep_activations,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            max_length=None,
            max_grad_norm=0.0,
            learning_rate=LEARNING_RATE,
            weight_decay=0.0,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            train_sampling_strategy="sequential",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=is_cuda(),
        )
        words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<eos>", eos_token="<eos>")
        trainer = Keep(model=model, args=settings, train_dataset=rows, processing_class=tokenizer, callbacks=[Clock()])
        trainer.train()
    return {**meter.report(), "bytes": count_bytes(model, trainer.optimizer.optimizer)}


def train_ours(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Train under the Trainer."""
    import lightning.pytorch as pl
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from lit_fsdp import ActivationCheckpointing, Compile, FSDP2Strategy, Optimizer
    from lit_fsdp.adapters.lora import LoRA
    from lit_fsdp.quantization.quantize import Quantization
    from lit_fsdp.tasks import CausalLM, LRSchedule

    class Clock(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            meter.begin()

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            meter.end(trainer.callback_metrics["train/loss"])

    meter = Meter(args)
    where: dict[str, Any] = {"devices": ranks}
    if args.one_card:
        from one_card import share_card

        dist.init_process_group("gloo")
        where = share_card()
    source: dict[str, Any] = {"pretrained": str(args.folder)}
    if args.shape != "small":
        draw_quickly()
        source = {"config": {"model_type": "llama", **SHAPES[args.shape]}}
    task = CausalLM(
        **source,
        lora=LoRA(r=RANK, alpha=2 * RANK),
        quantization=Quantization() if args.base == "nf4" else None,
        loss_chunks=count_loss_parts(args),
        optimizer=Optimizer(learning_rate=LEARNING_RATE),
        lr_scheduler=LRSchedule(type="constant"),
    )
    recompute = ActivationCheckpointing(
        mode="none" if args.keep_activations else "full",
        offload=args.offload,
        keep_dequantized=args.variant.endswith("kept"),
    )
    compiled = Compile() if args.variant.endswith("compiled") else None
    trainer = pl.Trainer(
        accelerator="gpu" if is_cuda() else "cpu",
        strategy=FSDP2Strategy(print_plan=False, activation_checkpointing=recompute, compile=compiled),
        precision="bf16-true",
        max_steps=args.steps,
        callbacks=[Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **where,
    )
    rows = [make_batch(args, step) for step in range(args.steps)]
    trainer.fit(task, DataLoader(rows, batch_size=None))
    return {
        **meter.report(),
        "bytes": count_bytes(task, trainer.optimizers[0]),
        "expected": estimate_bytes(task, ranks),
    }


def count_loss_parts(args: argparse.Namespace) -> int:
    """Return the ``loss_chunks`` of `ours`: what else is kept or long leaves no room for all logits."""
    return max(1, args.length // 512) if args.length > 4096 or args.keep_activations else 1


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

    place = 0 if args.one_card else int(os.environ.get("LOCAL_RANK", "0"))
    args.device = torch.device("cuda", place) if is_cuda() else torch.device("cpu")
    if is_cuda():
        torch.cuda.set_device(args.device)
        if args.cap_gib:
            whole = torch.cuda.get_device_properties(args.device).total_memory
            torch.cuda.set_per_process_memory_fraction(args.cap_gib * 2**30 / whole)
    before = 0 if is_cuda() else read_peak_bytes()
    ranks = args.ranks if args.variant in ON_RANKS else 1
    if args.variant.startswith("ours"):
        facts = train_ours(args, ranks)
    elif args.variant == "trl":
        facts = train_trl(args)
    else:
        facts = train_stock(args, is_sharded=args.variant == "accelerate")
    for name in ("peak_bytes", "step_peak_bytes"):
        facts[name] -= before
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
    options += ["--base", args.base, *["--one-card"] * args.one_card, *["--profile"] * args.profile]
    options += [*["--keep-activations"] * args.keep_activations, *["--offload"] * args.offload]
    command, environ = [sys.executable, __file__, *options], dict(os.environ)
    if variant not in ON_RANKS:  # else TRL takes a batch for each GPU that it sees
        environ["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        command = [sys.executable, *launcher, __file__, *options]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environ) as process:
        try:
            printed, errors = process.communicate(timeout=PROCESS_LIMIT_S)
        except subprocess.TimeoutExpired:
            # Not killed, as torchrun has to end its ranks: they would stay on the GPU beside the next variant.
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=GRACE_S)
            process.kill()
            return f"no end after {PROCESS_LIMIT_S} s"
    lines = [line for line in printed.splitlines() if line.startswith("[{")]
    if lines:
        return list(json.loads(lines[-1]))
    reasons = [line for line in errors.splitlines() if "Error" in line and not line.startswith(" ")]
    return reasons[0].strip()[:200] if reasons else errors[-200:]


def format_results(results: dict[str, list[Any]], args: argparse.Namespace) -> str:
    """Return the result page."""
    import torch

    device = torch.cuda.get_device_name() if is_cuda() else f"CPU ({platform.machine()}), no GPU, gloo"
    packages = ["torch", "transformers", "bitsandbytes", "peft", "accelerate", "lightning"]
    packages += ["trl"] * ("trl" in results)
    num_parts = count_loss_parts(args)
    cap = f" under a cap of {args.cap_gib:g} GiB" if args.cap_gib else ""
    shared = ". All ranks share one card through gloo, which is no measure of speed" if args.one_card else ""
    options = " --keep-activations" * args.keep_activations + " --offload" * args.offload
    lines = [
        f"# {'QLoRA' if args.base == 'nf4' else 'LoRA'}, shape {args.shape}, {args.ranks} ranks, {date.today()}",
        "",
        f"`python benchmarks/qlora.py --shape {args.shape} --base {args.base} --ranks {args.ranks} --repeats "
        f"{args.repeats} --steps {args.steps} --length {args.length}{options}` on {device}{cap}{shared}; "
        + ", ".join(f"{name} {version(name)}" for name in packages)
        + f". One row of {args.length} tokens per rank and step, bf16, {'no ' * args.keep_activations}recomputation. "
        f"Medians of up to {args.repeats} runs, variants in turn, in alternating order, the first {WARMUP} steps left "
        f"out; the loss is that of rank 0, ours of all ranks, in parts: {num_parts}. CPU is the time that the process "
        "computes, of the rank that has most; in `kept` variants `activation_checkpointing.keep_dequantized` is on. "
        "Ratios count; absolute times on a shared CPU mean little. "
        "Peaks are those of the rank that has most, in the steps and with loading: "
        + ("that of torch's allocator." if is_cuda() else "the growth of the resident process, loading included."),
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
    ]
    stock = [r for r in results.get("stock", []) if not isinstance(r, str)]
    base, cpu_base = (
        statistics.median(r[0][name] for r in stock) if stock else float("nan") for name in ("step_s", "cpu_s")
    )
    for variant, runs in results.items():
        good = [r for r in runs if not isinstance(r, str)]
        if failures := [r for r in runs if isinstance(r, str)]:
            lines.append(f"| {variant} | | {len(failures)} failed: {failures[0].replace('|', '/')} | | | | | | | | | |")
        if not good:
            continue
        step = statistics.median(max(rank["step_s"] for rank in r) for r in good)
        peaks = [
            f"{statistics.median(max(rank[name] for rank in r) for r in good) / 2**30:.3f}"
            for name in ("step_peak_bytes", "peak_bytes")
        ]
        held = max(rank["bytes"]["codes"] + rank["bytes"]["absmax"] for rank in good[0]) / 1e6
        cpu = statistics.median(max(rank["cpu_s"] for rank in r) for r in good)
        speed = len(good[0]) * args.length / step
        lines.append(
            f"| {variant} | {len(good[0])} | {len(good)} | {step:.3f} | {step / base:.2f} | {cpu:.3f} | "
            f"{cpu / cpu_base:.2f} | {speed:,.0f} | "
            f"{' | '.join(peaks)} | {held:.2f} | {good[0][0]['losses'][-1]:.4f} |"
        )
    lines += ["", "Bytes of the rank that holds most, by kind, beside what shapes alone predict:", ""]
    lines += ["| variant | " + " | ".join(KINDS) + " |", "|---|" + "---|" * len(KINDS)]
    for variant in ("ours 1", "ours"):
        good = [r for r in results.get(variant, []) if not isinstance(r, str)]
        if good:
            cells = (f"{max(r['bytes'][k] for r in good[0]):,} / {good[0][0]['expected'][k]:,.0f}" for k in KINDS)
            lines.append(f"| {variant} (held / predicted) | " + " | ".join(cells) + " |")
    for variant, runs in results.items() if args.profile else ():
        for rank in [r[0] for r in runs if not isinstance(r, str)][:1]:
            lines += ["", f"## Where a step of {variant} goes", *format_costs(rank["costs"], rank["step_s"])]
    return "\n".join(lines) + "\n"


def list_variants(*, keeps_dense: bool) -> list[str]:
    """Return the variants that a base has, but those that are measured by name only."""
    return [variant for variant in VARIANTS if keeps_dense or not variant.endswith("kept")]


def main() -> None:
    """Measure all variants, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--base", choices=("nf4", "bf16"), default="nf4", help="what the adapters are added to")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: hide the GPUs of this machine")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help=f"{WARMUP + 2} or more")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--cap-gib", type=float, default=0.0, help="of each GPU, as if it had no more")
    parser.add_argument("--offload", action="store_true", help="of `ours`: inputs of blocks wait in host memory")
    parser.add_argument("--keep-activations", action="store_true", help="do not compute them again")
    parser.add_argument("--one-card", action="store_true", help="all ranks of `ours` share one GPU, through gloo")
    parser.add_argument("--profile", action="store_true", help="record the last step of each run")
    every = [*VARIANTS, *BY_NAME_ONLY]
    parser.add_argument("--variants", nargs="+", choices=every, help=f"default: all of this base but {BY_NAME_ONLY}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variant", choices=every, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < WARMUP + 2:
        parser.error(f"--steps: got {args.steps}: expected {WARMUP + 2} or more, as {WARMUP} warm up")
    if args.keep_activations and args.offload:
        parser.error("--offload: moves what blocks are computed again from; leave out --keep-activations")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also of the processes that measure
    if args.variant:
        be_variant(args)
    else:
        measure(args)


def check_ranks(args: argparse.Namespace, variants: Sequence[str]) -> None:
    """Refuse more ranks than there are GPUs, before the first variant has taken its minute."""
    import torch

    num_gpus = torch.cuda.device_count()
    if is_cuda() and args.ranks > num_gpus and not args.one_card and set(variants) & set(ON_RANKS):
        sys.exit(
            f"--ranks: got {args.ranks}: expected {num_gpus} or fewer, as each has a GPU of its own: set it, or choose "
            "--variants of one rank, or --one-card"
        )


def measure(args: argparse.Namespace) -> None:
    """Measure the variants, and print the page."""
    page = ""
    with tempfile.TemporaryDirectory() as folder:
        if args.shape == "small":
            save_model(folder)
        variants = args.variants or list_variants(keeps_dense=args.base == "nf4" and not args.keep_activations)
        check_ranks(args, variants)
        results: dict[str, list[Any]] = {variant: [] for variant in variants}
        for turn in range(args.repeats):
            for variant in results if turn % 2 == 0 else reversed(results):
                results[variant].append(run(variant, args, folder))
                page = format_results(results, args)
                if args.out:
                    args.out.write_text(page)  # what there is so far, if the rest finds no end
    print(page)
    if not any(isinstance(r, list) for runs in results.values() for r in runs):
        sys.exit("nothing was measured")


if __name__ == "__main__":
    main()
