"""What measuring costs: steps with all callbacks that are on by default beside steps without any.

    python benchmarks/monitoring_cost.py --rounds 10 --out benchmarks/results/monitoring_cost_DATE.md

Two ranks train a random Llama-architecture model on random tokens. Short runs with and without the callbacks take turns
in the same processes (without, with, with, without ...). Of each run the first steps are left out: the callbacks
count the operations of the first, follow the memory of the second and warm up. The cost is the median over pairs of
neighbouring runs of the ratio of their median step times.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

CONFIG = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
NUM_LEFT_OUT = 4


def train(num_rounds: int, steps: int, length: int) -> None:
    """Train on this rank, with and without in turn; rank 0 prints the step times as JSON."""
    import lightning.pytorch as pl
    import torch

    from lit_fsdp import FSDP2Strategy
    from lit_fsdp.callbacks import MemoryLogger, OOMReport, RunReport, StabilityMonitor, ThroughputLogger, TrafficLogger
    from lit_fsdp.tasks import CausalLM, Schedule

    class Times(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            self.times: list[tuple[float, float]] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.times.append((time.perf_counter(), time.process_time()))

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(CONFIG["vocab_size"], (length,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "labels": ids}

    found: list[tuple[bool, float, float]] = []
    num_params = 0
    for i in range(2 * num_rounds):
        is_measured = i % 4 in (1, 2)
        with tempfile.TemporaryDirectory() as folder:
            times = Times()
            callbacks: list[pl.Callback] = [times]
            if is_measured:
                callbacks += [StabilityMonitor(), MemoryLogger(), TrafficLogger(), ThroughputLogger(), OOMReport()]
                callbacks.append(RunReport())
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=2,
                strategy=FSDP2Strategy(print_plan=False),
                max_steps=steps,
                callbacks=callbacks,
                log_every_n_steps=10,
                default_root_dir=folder,
                logger=pl.loggers.CSVLogger(folder),
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            task = CausalLM(config=CONFIG, schedule=Schedule(shape="constant"))
            trainer.fit(task, torch.utils.data.DataLoader(Rows(), batch_size=2))
            steps_s = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(times.times, times.times[1:], strict=False)]
            wall, cpu = map(statistics.median, zip(*steps_s[NUM_LEFT_OUT:], strict=True))
            found.append((is_measured, wall, cpu))
            num_params = sum(p.numel() for p in task.parameters())
            trainer.strategy.barrier()
    if trainer.is_global_zero:
        print("RESULT " + json.dumps({"params": num_params, "runs": found}), flush=True)


def format_results(result: dict[str, Any], args: argparse.Namespace) -> str:
    """Return the result page."""
    runs = result["runs"]
    pairs = [sorted(runs[i : i + 2]) for i in range(0, len(runs), 2)]  # without first
    rows = []
    for i, name in ((1, "wall time"), (2, "CPU time of rank 0")):
        without = statistics.median(run[i] for run in runs if not run[0])
        ratios = sorted(100 * (b[i] / a[i] - 1) for a, b in pairs)
        listed = ", ".join(f"{ratio:+.1f}" for ratio in ratios)
        rows.append(f"| {name} | {without:.4f} | {statistics.median(ratios):+.2f} % | {listed} |")
    command = f"--rounds {args.rounds} --steps {args.steps} --length {args.length}"
    setting = (
        f"`python benchmarks/monitoring_cost.py {command}` on CPU ({platform.machine()}), 2 ranks with gloo; torch "
        f"{version('torch')}, lightning {version('lightning')}. Llama architecture, {result['params'] / 1e6:.1f} M "
        f"parameters in fp32, 2 x {args.length} tokens a rank and step. With: StabilityMonitor, MemoryLogger, "
        "TrafficLogger, ThroughputLogger, OOMReport, RunReport. "
        f"{args.rounds} pairs of runs of {args.steps} steps, the first {NUM_LEFT_OUT} left out."
    )
    head = f"# Cost of what is measured by default, {datetime.now(UTC).date().isoformat()}"
    table = ["| of a step | without, s | cost, median of the pairs | all pairs, % |", "|---|---|---|---|", *rows]
    return "\n".join([head, "", setting, "", *table]) + "\n"


def main() -> None:
    """Measure, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        train(args.rounds, args.steps, args.length)
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, "--rank"]
    options = [f"--rounds={args.rounds}", f"--steps={args.steps}", f"--length={args.length}"]
    done = subprocess.run([*launch, *options], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(done.stderr[-3000:])
    page = format_results(json.loads(lines[-1].removeprefix("RESULT ")), args)
    print(page)
    if args.out:
        args.out.write_text(page)


if __name__ == "__main__":
    main()
