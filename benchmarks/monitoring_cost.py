"""What measuring costs: steps with all callbacks that are on by default beside steps without any.

    python benchmarks/monitoring_cost.py --rounds 30 --out benchmarks/results/monitoring_cost_DATE.md

Two ranks train a random Llama-architecture model on random tokens. Short runs with and without the callbacks take turns
in the same processes (without, with, with, without ...). Of each run the first steps are left out: the callbacks
count the operations of the first, follow the memory of the second and warm up. What the callbacks do in a step does
not depend on its tokens, but the noise of a machine grows with the time of the step. So the pairs take steps of few
tokens, and the cost in seconds, the median over pairs of the difference of their median steps, is set beside the step
of ``--length`` tokens, timed in the same processes.
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

import lightning.pytorch as pl
import torch

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks import (
    CommunicationLogger,
    MemoryLogger,
    OOMReport,
    RunReport,
    StabilityMonitor,
    ThroughputLogger,
)
from lit_fsdp.tasks import CausalLM, LRSchedule

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
NUM_FULL = 2
SHORT = 8


class Times(pl.Callback):
    """Notes when each step begins, in wall and CPU time."""

    def on_train_start(self, *_: Any) -> None:
        """Begin anew."""
        self.times: list[tuple[float, float]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Look at the clocks."""
        self.times.append((time.perf_counter(), time.process_time()))

    def take_medians(self) -> tuple[float, float]:
        """Return the median of the steps that count."""
        steps_s = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.times, self.times[1:], strict=False)]
        wall_s, cpu_s = map(statistics.median, zip(*steps_s[NUM_LEFT_OUT:], strict=True))
        return wall_s, cpu_s


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(CONFIG["vocab_size"], (self.length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def train(num_rounds: int, steps: int, length: int) -> None:
    """Train on this rank, with and without in turn; rank 0 prints the step times as JSON.

    The first runs, without, have the full length.
    """
    found: list[tuple[bool, float, float]] = []
    num_params = 0
    for i in range(-NUM_FULL, 2 * num_rounds):
        is_measured = i >= 0 and i % 4 in (1, 2)
        with tempfile.TemporaryDirectory() as folder:
            times = Times()
            callbacks: list[pl.Callback] = [times]
            if is_measured:
                callbacks += [
                    StabilityMonitor(),
                    MemoryLogger(),
                    CommunicationLogger(),
                    ThroughputLogger(),
                    OOMReport(),
                ]
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
            task = CausalLM(config=CONFIG, lr_scheduler=LRSchedule(type="constant"))
            trainer.fit(task, torch.utils.data.DataLoader(Rows(length if i < 0 else SHORT), batch_size=2))
            found.append((is_measured, *times.take_medians()))
            num_params = sum(p.numel() for p in task.parameters())
            trainer.strategy.barrier()
    if trainer.is_global_zero:
        print("RESULT " + json.dumps({"params": num_params, "runs": found}), flush=True)


def format_results(result: dict[str, Any], args: argparse.Namespace) -> str:
    """Return the result page."""
    full, runs = result["runs"][:NUM_FULL], result["runs"][NUM_FULL:]
    pairs = [sorted(runs[i : i + 2]) for i in range(0, len(runs), 2)]  # without first
    rows = []
    for i, name in ((1, "wall time"), (2, "CPU time of rank 0")):
        full_s, short_s = (statistics.median(run[i] for run in some if not run[0]) for some in (full, runs))
        costs_ms = [1e3 * (b[i] - a[i]) for a, b in pairs]
        cost_ms, (low_ms, _, high_ms) = statistics.median(costs_ms), statistics.quantiles(costs_ms, n=4)
        shares = f"{cost_ms / short_s / 10:+.2f} % | **{cost_ms / full_s / 10:+.2f} %**"
        rows.append(
            f"| {name} | {full_s:.4f} | {short_s:.4f} | {cost_ms:+.2f} | {low_ms:+.2f} to {high_ms:+.2f} | {shares} |"
        )
    command = f"--rounds {args.rounds} --steps {args.steps} --length {args.length}"
    setting = (
        f"`python benchmarks/monitoring_cost.py {command}` on CPU ({platform.machine()}), 2 ranks with gloo; torch "
        f"{version('torch')}, lightning {version('lightning')}. Llama architecture, {result['params'] / 1e6:.1f} M "
        f"parameters in fp32, 2 x {args.length} tokens a rank and step, 2 x {SHORT} in the pairs. With: "
        "StabilityMonitor, MemoryLogger, CommunicationLogger, ThroughputLogger, OOMReport, RunReport. "
        f"{args.rounds} pairs of runs of {args.steps} steps, the first {NUM_LEFT_OUT} left out."
    )
    head = f"# Cost of what is measured by default, {datetime.now(UTC).date().isoformat()}"
    columns = ["of a step", f"2 x {args.length} without, s", f"2 x {SHORT} without, s", "cost, ms: median of the pairs"]
    columns += ["quartiles", f"of 2 x {SHORT}", f"of 2 x {args.length}"]
    table = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows]
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
    if args.rounds < 2:
        parser.error(f"--rounds: got {args.rounds}: quartiles need 2 or more")
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
