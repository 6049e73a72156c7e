"""Full training with shards in host memory: the time of a step without offload, with it, and with steps beside compute.

    python benchmarks/offload.py --device cuda --layers 8 --length 8192 --out benchmarks/results/offload_cuda_DATE.md
    python benchmarks/offload.py --shape tiny --layers 2 --length 64 --repeats 1            # in seconds, on a CPU

A Llama with random weights and layers as those of the ``--shape``, as many as fit on the card without offload, with
activation checkpointing, AdamW and clipping, one row in a micro-batch, on one rank. Each run is a process of its own,
and variants take turns. Without offload nothing waits for the host, so its speed is what offload is compared with:
layer by layer, that of the whole model, which would not fit. On a CPU losses with and without the overlap have to be
equal bit for bit; a GPU adds in an order of its own, so that there all have to agree to 2**-8. A page whose losses
differ by more says so, and the exit code is 1, as it is where a variant fails. The page is written anew after each run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

from quick_draws import draw_quickly
from stock_adapters import SHAPES

KEPT = {"reshard_after_forward": False, "reshard_after_backward": False}  # copied once a step
VARIANTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "no offload": (None, {}),
    "cpu_offload: {}": ({}, {}),
    "cpu_offload: {overlap_optimizer: true}": ({"overlap_optimizer": True}, {}),
    "the same, reshard_after_backward: false, no_sync where it accumulates": ({"overlap_optimizer": True}, KEPT),
}
WARM_UP = 3  # steps: state of the optimizer, pinned memory
MAX_DIFFERENCE = 2**-8  # of losses on a GPU, relative
COLUMNS = ("variant", "step, s", "lowest", "highest", "speed", "peak, GiB", "last loss")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train some steps with one variant; return the seconds of each after the warm-up, the peak and the losses."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    from lit_fsdp import ActivationCheckpointing, CPUOffload, FSDP2Strategy, Sharding
    from lit_fsdp.tasks import CausalLM, LRSchedule

    is_cuda = args.device == "cuda"
    sizes = {**SHAPES[args.shape], "num_hidden_layers": args.layers, "max_position_embeddings": args.length}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes["vocab_size"], (args.length,), generator=generator)

    class Rows(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            rows: Any = [{"input_ids": ids, "labels": ids}] * args.steps * args.micro_batches
            return DataLoader(rows, batch_size=1)

    class Watch(pl.Callback):
        reads_weights = False
        losses, ends_s = list[float](), list[float]()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if len(self.losses) < trainer.global_step:
                # Of a step that ended in backward: the steps of the optimizer may still run.
                self.losses.append(float(trainer.callback_metrics["train/loss"]))
                self.ends_s.append(time.perf_counter())

    pl.seed_everything(0, verbose=False)
    offload, sharding = VARIANTS[args.variant]
    strategy = FSDP2Strategy(
        print_plan=False,
        activation_checkpointing=ActivationCheckpointing(mode="full"),
        cpu_offload=None if offload is None else CPUOffload(**offload),
        sharding=Sharding(**sharding, no_sync=bool(sharding) and args.micro_batches > 1),
    )
    watch = Watch()
    trainer = pl.Trainer(
        accelerator="gpu" if is_cuda else "cpu",
        devices=1,
        strategy=strategy,
        precision=args.precision,
        max_steps=args.steps,
        accumulate_grad_batches=args.micro_batches,
        gradient_clip_val=1.0,
        callbacks=[watch],
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    task = CausalLM(config={"model_type": "llama", **sizes}, loss_chunks=8, lr_scheduler=LRSchedule(type="constant"))
    draw_quickly()
    trainer.fit(task, Rows())
    ends = watch.ends_s[WARM_UP - 1 :]
    return {
        "steps_s": [end - begin for begin, end in pairwise(ends)],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0,
        "losses": watch.losses,
        "device": torch.cuda.get_device_name() if is_cuda else "CPU",
        "torch": torch.__version__,
    }


def measure(args: argparse.Namespace) -> Iterator[tuple[dict[str, list[dict[str, Any]]], list[str]]]:
    """Run every variant in a process of its own, in turn, each turn in the other order.

    After each run, yields what there is so far, and what has failed.
    """
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    failed: list[str] = []
    for repeat in range(args.repeats):
        for variant in list(VARIANTS)[:: 1 if repeat % 2 == 0 else -1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
            hidden = {} if args.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **hidden}, check=False)
            if done.returncode:
                failed.append(f"`{variant}`, repeat {repeat + 1}: ended with {done.returncode}")
            else:
                found[variant].append(json.loads(done.stdout.splitlines()[-1]))
                print(variant, found[variant][-1], file=sys.stderr, flush=True)
            yield found, failed


def compare_losses(found: dict[str, list[dict[str, Any]]], *, is_cuda: bool) -> float:
    """Return the largest difference of the loss of a step among the runs that have to do the same work, relative."""
    # Elsewhere the optimizer rounds in another way.
    compared = [run["losses"] for name, runs in found.items() for run in runs if is_cuda or name != "no offload"]
    if not all(isfinite(loss) for losses in compared for loss in losses):
        return inf
    return max(((max(step) - min(step)) / max(step) for step in zip(*compared, strict=True)), default=0.0)


def is_same_work(difference: float, *, is_cuda: bool) -> bool:
    """Whether runs whose losses differ by so much are compared."""
    return difference <= (MAX_DIFFERENCE if is_cuda else 0.0)


def format_page(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]], failed: list[str]) -> str:
    """Return the page of what there is."""
    first = next(run for runs in found.values() for run in runs)
    is_cuda = args.device == "cuda"
    difference = compare_losses(found, is_cuda=is_cuda)
    base = [median(run["steps_s"]) for run in found["no offload"]]
    rows = []
    for variant, runs in found.items():
        if not runs:
            continue
        medians = [median(run["steps_s"]) for run in runs]
        speed = median(base) / median(medians) if base else float("nan")
        numbers = [f"{value:.3f}" for value in (median(medians), min(medians), max(medians))]
        peak, loss = max(run["peak_gib"] for run in runs), runs[-1]["losses"][-1]
        rows.append(f"| `{variant}` | {' | '.join(numbers)} | {speed:.2f} | {peak:.2f} | {loss:.6f} |")
    setting = (
        f"{first['device']}, torch {first['torch']}, {os.cpu_count()} cores, {args.precision}: {args.layers} layers of "
        f"shape {args.shape}, {args.micro_batches} x {args.length:,} tokens a step, clipped to 1, medians of "
        f"up to {max(map(len, found.values()))} runs of {args.steps - WARM_UP} steps that took turns. `speed` is that "
        "without offload = 1. "
        + ("" if is_same_work(difference, is_cuda=is_cuda) else "**These runs did not do the same work.** ")
        + f"{'All losses' if is_cuda else 'Losses with offload'} agree to {difference:.0e}. `benchmarks/offload.py` "
        "says how."
    )
    lines = [
        f"# Offload beside compute, {date.today().isoformat()}",
        "",
        setting,
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
        *rows,
    ]
    lines += ["", "Failed:", "", *(f"- {failure}" for failure in failed)] if failed else []
    if not is_cuda:
        lines += ["", "On a CPU nothing is copied: this shows that the commands run, and no speed."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help=f"{WARM_UP + 1} or more")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps: got {args.steps}: expected {WARM_UP + 1} or more")
    if args.variant is not None:
        print(json.dumps(run(args)))
        return
    found, failed, page = dict[str, list[dict[str, Any]]](), list[str](), ""
    for found, failed in measure(args):
        page = format_page(args, found, failed) if any(found.values()) else ""
        if args.out is not None and page:
            args.out.write_text(page)
    if not any(found.values()):
        sys.exit(f"nothing was measured: {'; '.join(failed)}")
    print(page)
    difference = compare_losses(found, is_cuda=args.device == "cuda")
    if failed or not is_same_work(difference, is_cuda=args.device == "cuda"):
        sys.exit(f"failed: {'; '.join(failed)}; losses differ by {difference:.1e}")


if __name__ == "__main__":
    main()
