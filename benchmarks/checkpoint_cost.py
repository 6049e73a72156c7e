"""What a checkpoint costs training: none, written in the training thread, written beside it.

    python benchmarks/checkpoint_cost.py --ranks 2 --repeats 3 --out benchmarks/results/checkpoint_cost_DATE.md

Each variant runs in fresh processes, in turn, ``repeats`` times. A run trains a random Llama-architecture model on
random tokens and saves every ``--every`` steps; timed is the loop from the first to the last step, and the wait for
the save in flight at its end.

    python benchmarks/checkpoint_cost.py --checksums-gb 10 --folder DISK --out benchmarks/results/NAME_DATE.md

measures what checksums cost instead: one process saves and loads that many GB, from and to 256 MB of memory that all
tensors share, with the files out of the page cache before each load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

VARIANTS = ("none", "sync", "async")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def train(variant: str, ranks: int, steps: int, every: int) -> None:
    """Train one variant on this rank; rank 0 prints what was measured as JSON."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lit_fsdp import FSDP2Strategy
    from lit_fsdp.tasks import CausalLM, LRSchedule

    class Clock(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            self.times.append(time.perf_counter())

        def on_train_start(self, *_: Any) -> None:
            self.times: list[float] = []

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(CONFIG["vocab_size"], (64,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "labels": ids}

    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        keeper = ModelCheckpoint(folder, every_n_train_steps=every, save_last=False)
        trainer = pl.Trainer(
            accelerator="auto",
            devices=ranks,
            strategy=FSDP2Strategy(print_plan=False, async_save=variant == "async"),
            max_steps=steps,
            callbacks=[clock] if variant == "none" else [clock, keeper],
            enable_checkpointing=variant != "none",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        task = CausalLM(config=CONFIG, lr_scheduler=LRSchedule(type="constant"))
        trainer.fit(task, torch.utils.data.DataLoader(Rows(), batch_size=2))
        end = time.perf_counter()
        if trainer.is_global_zero:
            lengths = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
            num_params = sum(p.numel() for p in task.parameters())
            facts = {"loop_s": end - clock.times[2], "step_s": statistics.median(lengths[2:]), "params": num_params}
            print(json.dumps(facts))
        trainer.strategy.barrier()


def run(variant: str, ranks: int, steps: int, every: int) -> dict[str, float]:
    """Return the measurements of one variant in fresh processes."""
    options = ["--variant", variant, "--ranks", str(ranks), "--steps", str(steps), "--every", str(every)]
    done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))))


def format_results(results: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> str:
    """Return the result page."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()}), no GPU"
    num_saves = args.steps // args.every
    params = results["none"][0]["params"]
    base = statistics.median(r["loop_s"] for r in results["none"])
    command = f"--ranks {args.ranks} --repeats {args.repeats} --steps {args.steps} --every {args.every}"
    setting = (
        f"`python benchmarks/checkpoint_cost.py {command}` on {device}, {args.ranks} ranks; torch {version('torch')}, "
        f"lightning {version('lightning')}. Llama architecture, {params / 1e6:.1f} M parameters in fp32 with AdamW "
        f"state: {params * 12 / 2**30:.2f} GiB a checkpoint, {num_saves} saves in {args.steps} steps. Medians of "
        f"{args.repeats} runs, variants in turn. Absolute times on a shared CPU mean little. Where ranks fill all "
        "cores, as here, the writing thread takes compute away from training; on GPUs this was not measured."
    )
    lines = [
        f"# Cost of a checkpoint, {date.today().isoformat()}",
        "",
        setting,
        "",
        "| checkpoints | loop, s | median step, s | extra per save, s | in steps |",
        "|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        loop = statistics.median(r["loop_s"] for r in results[variant])
        step = statistics.median(r["step_s"] for r in results[variant])
        extra = (loop - base) / num_saves
        shown = ("", "") if variant == "none" else (f"{extra:.2f}", f"{extra / step:.1f}")
        lines.append(f"| {variant} | {loop:.1f} | {step:.3f} | {shown[0]} | {shown[1]} |")
    return "\n".join(lines) + "\n"


SAVES = ("no checksums", "while writing", "by reading again")
LOADS = ("sizes", "full")
_TENSOR_GB = 0.256


def save_files(how: str, path: Path, model: Any) -> None:
    """Write a checkpoint with checksums made in one way; without any it is no complete one."""
    from torch.distributed.checkpoint.filesystem import FileSystem
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    from lit_fsdp.checkpoint import sharded
    from lit_fsdp.checkpoint.manifest import describe_files, write_manifest

    class Plain(FileSystem):
        files: dict[str, Any] = {}  # noqa: RUF012

    own = sharded.ChecksumFileSystem
    if how != "while writing":
        sharded.ChecksumFileSystem = Plain
    try:
        sharded.save_checkpoint(path, {"state_dict": get_model_state_dict(model)}, meta={})
    finally:
        sharded.ChecksumFileSystem = own
    if how == "by reading again":
        write_manifest(path, describe_files(p for p in path.iterdir() if p.name != "complete.json"))


def measure_checksums(gb: float, folder: Path, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of each way to save and to load, in turn: on the clock, and of the CPU."""
    import torch

    from lit_fsdp.checkpoint.sharded import load_checkpoint

    shared = torch.randn(int(_TENSOR_GB * 1e9 / 4 / 1000), 1000)
    model = torch.nn.Module()
    for i in range(round(gb / _TENSOR_GB)):
        model.register_parameter(f"weight_{i}", torch.nn.Parameter(shared.view(shared.shape), requires_grad=False))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*SAVES, *LOADS)}
    path = folder / "checkpoint"
    try:
        for _ in range(repeats):
            for how in SAVES:
                shutil.rmtree(path, ignore_errors=True)
                begin = time.perf_counter(), time.process_time()
                save_files(how, path, model)
                found[how].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            for verify in LOADS:
                forget_files(path)
                begin = time.perf_counter(), time.process_time()
                load_checkpoint(path, model, verify=verify)
                found[verify].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return found


def forget_files(folder: Path) -> None:
    """Drop files from the page cache."""
    for path in folder.iterdir():
        number = os.open(path, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def format_checksums(
    found: dict[str, list[tuple[float, float]]], args: argparse.Namespace, load: tuple[float, ...]
) -> str:
    """Return the result page."""
    num_bytes = round(args.checksums_gb / _TENSOR_GB) * _TENSOR_GB
    rows = [("save", how) for how in SAVES] + [("load", how) for how in LOADS]
    command = f"--checksums-gb {args.checksums_gb:g} --repeats {args.repeats}"
    setting = (
        f"`python benchmarks/checkpoint_cost.py {command}` on {os.cpu_count()} cores ({platform.machine()}), no GPU, "
        f"one process; torch {version('torch')}, Python {platform.python_version()}. {num_bytes:.2f} GB of tensors in "
        "one file on a local disk, from and to 256 MB of memory that all tensors share; files are synced, and out of "
        f"the page cache before each load. Medians of {args.repeats} runs, variants in turn; load {load[0]:.1f} "
        f"before, {load[3]:.1f} after."
    )
    which = (
        "Checkpoints are saved with checksums computed `while writing`; before, it was `by reading again`. `sizes` is "
        "the default of `verify_checkpoint`; before, every load was `full`."
    )
    lines = [
        f"# What checksums of a checkpoint cost, {date.today().isoformat()}",
        "",
        setting,
        "",
        "| | checksums | median, s | all, s | CPU, s |",
        "|---|---|---|---|---|",
    ]
    for what, how in rows:
        wall, cpu = (statistics.median(values) for values in zip(*found[how], strict=True))
        times = ", ".join(f"{value:.1f}" for value, _ in found[how])
        lines.append(f"| {what} | {how} | {wall:.1f} | {times} | {cpu:.1f} |")
    return "\n".join([*lines, "", which]) + "\n"


def main() -> None:
    """Measure all variants, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--checksums-gb", type=float)
    parser.add_argument("--folder", type=Path, default=Path())
    args = parser.parse_args()
    if args.checksums_gb:
        before = os.getloadavg()
        found = measure_checksums(args.checksums_gb, args.folder, args.repeats)
        page = format_checksums(found, args, (*before, os.getloadavg()[0]))
        print(page)
        if args.out:
            args.out.write_text(page)
        return
    if args.variant:
        train(args.variant, args.ranks, args.steps, args.every)
        return
    results: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(args.repeats):
        for variant in VARIANTS:
            results[variant].append(run(variant, args.ranks, args.steps, args.every))
    page = format_results(results, args)
    print(page)
    if args.out:
        args.out.write_text(page)


if __name__ == "__main__":
    main()
