"""Peak memory and time of a step over packed rows, with a mask of the row and without one.

    python benchmarks/packed_attention.py --out benchmarks/results/packed_attention_DATE.md
    python benchmarks/packed_attention.py --device cuda --precision bf16-true --attention sdpa auto flex_attention
    python benchmarks/packed_attention.py --plan --out benchmarks/results/packed_attention_DATE.md   # counts, no runs

A Llama (hidden 256, 2 layers, 4 heads, 2 key-value heads, vocabulary 512) on one rank, one packed row in a micro-batch,
documents of the same lengths in all runs. Each run is a process of its own, and variants take turns. One that fails is
named, and the others go on; the page is written anew after each. The peak of the plan is that of the trace, of which
``flex_attention`` has none. The peak of the run is what torch's allocator says; on a CPU the growth of the process.
With --plan, a Llama of hidden 512, 4 layers and 8 heads is traced only, over four documents of like lengths.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from contextlib import suppress
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

_MIB = 2**20
_SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_PLANNED_SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
_PLANNED_ON = (("cuda", "bf16-true"), ("cuda", "32-true"), ("cpu", "32-true"))
_COLUMNS = ("attention", "last loss", "peak of the plan, MiB", "peak of the run, MiB", "CPU s of a step", "wall s")


def run(args: argparse.Namespace) -> dict[str, float | None]:
    """Train some steps with one attention; return losses, peaks and times, ``None`` for a peak that is not traced."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    from lit_fsdp import FSDP2Strategy
    from lit_fsdp.errors import ConfigError
    from lit_fsdp.planning.planned_step import PlannedGpu, PlannedTrainer, prepare_step
    from lit_fsdp.planning.trace.exact_trace import trace_step
    from lit_fsdp.tasks import CausalLM

    generator = torch.Generator().manual_seed(0)
    cuts = [0, *sorted((torch.randperm(args.length - 1, generator=generator)[: args.documents - 1] + 1).tolist())]
    lengths = [b - a for a, b in zip(cuts, [*cuts[1:], args.length], strict=True)]
    sizes = _SIZES
    if args.plan:
        sizes, lengths = _SIZES | _PLANNED_SIZES, [args.length // args.documents] * args.documents
    ids = torch.randint(_SIZES["vocab_size"], (args.length,), generator=generator)
    row = {"input_ids": ids, "labels": ids, "position_ids": torch.cat([*map(torch.arange, lengths)])}

    class Rows(pl.LightningDataModule):
        packing = True

        def train_dataloader(self) -> Any:
            rows: Any = [row] * args.steps
            return DataLoader(rows, batch_size=1)

        def make_example_batch(self) -> Any:
            return {name: values[None] for name, values in row.items()}

    def build() -> tuple[Any, dict[str, Any]]:
        pl.seed_everything(0, verbose=False)
        task = CausalLM(config={**sizes, "max_position_embeddings": args.length}, attention=args.attention[0])
        options = {"devices": 1, "precision": args.precision, "max_steps": args.steps, "logger": False}
        options |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        return task, {**options, "strategy": FSDP2Strategy(print_plan=False)}

    def read_peak() -> int:
        if args.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    class Watch(pl.Callback):
        losses, begin, cpu_s, wall_s = list[float](), 0, list[float](), list[float]()

        def on_train_start(self, *_: Any) -> None:
            if args.device == "cpu":  # what is there before
                self.begin = read_peak()

        def on_train_batch_start(self, *_: Any) -> None:
            self.times = time.process_time(), time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.losses.append(float(trainer.callback_metrics["train/loss"]))  # waits for a GPU
            self.cpu_s.append(time.process_time() - self.times[0])
            self.wall_s.append(time.perf_counter() - self.times[1])

    task, options = build()
    planned: Any = "cpu" if args.device == "cpu" else PlannedGpu()
    traced = None
    with suppress(ConfigError):  # of what cannot be traced
        traced = trace_step(prepare_step(PlannedTrainer(accelerator=planned, **options), task, Rows()))
    if args.plan:
        return _describe_trace(traced)
    task, options = build()
    watch = Watch()
    pl.Trainer(accelerator="gpu" if args.device == "cuda" else "cpu", callbacks=[watch], **options).fit(task, Rows())
    return {
        "loss": watch.losses[-1],
        "planned_mib": None if traced is None else traced.memory.peak.num_bytes / _MIB,
        "peak_mib": (read_peak() - watch.begin) / _MIB,
        "cpu_s": median(watch.cpu_s[1:]),
        "wall_s": median(watch.wall_s[1:]),
    }


def _describe_trace(traced: Any) -> dict[str, float | None]:
    flops = {f"{name}_tflop": getattr(traced.flops, name) / 1e12 for name in ("forward", "backward")}
    return {"peak_gb": traced.memory.peak.num_bytes / 1e9, **flops}


def plan(args: argparse.Namespace) -> str:
    """Trace a step of each kind of device and precision; return a page."""
    import torch
    import transformers

    args.documents, each = 4, args.length // 4
    rows = []
    for args.device, args.precision in _PLANNED_ON:
        for name in ("sdpa", "auto"):
            args.attention = [name]
            found = run(args)
            cells = [f"{value:.2f}" for value in found.values()]
            rows.append(f"| {args.device} | `{args.precision}` | `{name}` | {' | '.join(cells)} |")
    setting = (
        f"`python {' '.join(sys.argv)}`: torch {torch.__version__}, transformers {transformers.__version__}. The exact "
        "trace of a step of a Llama (hidden 512, 4 layers, 8 heads, 2 key-value heads, vocabulary 512) on one rank, "
        f"one packed row of {args.length:,} tokens, {args.documents} documents of {each:,}. These "
        "are counts, the same in every run, and no times. Nothing here was measured on a GPU: its kernels are those "
        "that the trace stands for."
    )
    head = ["# Memory and FLOPs of packed rows with a mask and without one, " + date.today().isoformat(), "", setting]
    columns = ("kernels of", "precision", "attention", "peak, GB", "forward, TFLOP", "backward, TFLOP")
    return "\n".join([*head, "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows]) + "\n"


def main() -> None:
    """Print a page, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", default=["sdpa", "auto"])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plan", action="store_true", help="trace steps of CPUs and GPUs, and run none")
    parser.add_argument("--one", action="store_true", help="run the first attention here, and print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run(args)))
        return
    if not args.plan:
        compare(args)
        return
    print(text := plan(args))
    if args.out is not None:
        args.out.write_text(text)


def compare(args: argparse.Namespace) -> None:
    """Let variants take turns; print a page, and write what there is of it after each.

    Raises:
        SystemExit: Some have failed.
    """
    found: dict[str, list[dict[str, float | None]]] = {name: [] for name in args.attention}
    failed: list[str] = []
    page = ""
    for turn in range(args.repeats):
        for name in args.attention:
            command = [sys.executable, __file__, *sys.argv[1:], "--attention", name, "--one"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                failed.append(f"`{name}`, repeat {turn + 1}: ended with {done.returncode}")
            else:
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
            page = format_page(args, found, failed)
            if args.out is not None:
                args.out.write_text(page)
    print(page)
    if failed:
        sys.exit(f"not measured: {'; '.join(failed)}")


def format_page(args: argparse.Namespace, found: dict[str, list[dict[str, float | None]]], failed: list[str]) -> str:
    """Return the medians of what there is."""
    import torch
    import transformers

    hardware = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, one thread, shared with other programs"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    row = f"one row of {args.length:,} tokens and {args.documents} documents"
    num_runs = max(map(len, found.values()))
    setting = (
        f"`python {' '.join(sys.argv)}`: {versions}, {hardware}, {args.precision}, {row}, up to {num_runs} runs of "
        "each in turn, medians [smallest, largest]. Of times, only ratios mean something. A Llama of hidden 256, 2 "
        "layers, 4 heads and 2 key-value heads. The peak of the run is what the allocator says, on a CPU how much the "
        "process grew."
    )
    lines = [f"# Packed rows with a mask and without one, {date.today().isoformat()}", "", setting, ""]
    lines += [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for name, rows in found.items():
        cells = [_describe([row[key] for row in rows if row[key] is not None], key) for key in rows[0]] if rows else []
        lines += [f"| `{name}` | {' | '.join(cells)} |"] if rows else []
    lines += ["", "Failed:", "", *(f"- {failure}" for failure in failed)] if failed else []
    return "\n".join(lines) + "\n"


def _describe(values: list[Any], key: str) -> str:
    if not values:
        return "not traced"
    form = "{:.6f}" if key == "loss" else "{:,.0f}" if key.endswith("mib") else "{:.2f}"
    low, high = form.format(min(values)), form.format(max(values))
    middle = form.format(median(values))
    return middle if low == high else f"{middle} [{low}, {high}]"


if __name__ == "__main__":
    main()
