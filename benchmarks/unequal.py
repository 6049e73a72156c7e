"""What ``data.share`` saves where one of two ranks is slower.

    python benchmarks/unequal.py --repeats 3 --out benchmarks/results/unequal_DATE.md

Each run is ``fit`` of a tiny language model on two CPU ranks. Each rank sleeps for every row, as if an accelerator of
its own computed it: on the second one three times as long. So cores that other programs use hardly matter. Runs take
turns. Step times are medians of the steps after the first ``SETTLED`` ones, in which ``auto`` measures; the losses of
all steps are compared with those of equal shares.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

SETTLED, NUM_STEPS, BATCH_SIZE = 15, 45, 4
RUNS = {"equal": None, "[3, 1]": [3, 1], "auto": "auto"}
TASK = """
import os, time
from lit_fsdp.tasks import CausalLM

class Throttled(CausalLM):
    def training_step(self, batch, batch_idx):
        time.sleep(float(os.environ["ROW_S"].split()[self.global_rank]) * len(batch["labels"]))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.is_global_zero:
            with open(os.environ["STEPS"], "a") as file:
                file.write(f"{time.perf_counter()} {float(self.step_loss)!r}\\n")
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run took, and came to."""

    step_s: float
    losses: list[float]
    settled: str  # what ``auto`` said


def write_run(folder: Path) -> None:
    """Write the configuration, the task and the rows."""
    rows = ({"text": " ".join(f"word{(i * 7 + k * k) % 53} is {k + i}." for k in range(60))} for i in range(600))
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "throttled.py").write_text(TASK)
    config = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    data = {"train": "train.jsonl", "tokenizer": {"vocab_size": 300}, "seq_length": 64, "num_workers": 0}
    trainer = {"accelerator": "cpu", "devices": 2, "max_steps": NUM_STEPS, "enable_progress_bar": False}
    run = {
        "monitoring": False,
        "trainer": trainer,
        "model": {"class_path": "throttled.Throttled", "init_args": {"config": config}},
        "data": {
            "class_path": "lit_fsdp.tasks.TextData",
            "init_args": {**data, "batch_size": BATCH_SIZE, "cache_dir": "cache"},
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))


def fit(folder: Path, share: Any, row_s: tuple[float, float]) -> Run:
    """Train once."""
    steps = folder / "steps"
    steps.unlink(missing_ok=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "ROW_S": f"{row_s[0]} {row_s[1]}", "STEPS": str(steps)}
    command = [sys.executable, "-m", "lit_fsdp", "fit", "--config=run.yaml", f"--data.share={share or 'null'}"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    times, losses = zip(*(map(float, line.split()) for line in steps.read_text().splitlines()), strict=True)
    told = re.search(r"share: auto: (.*)", done.stdout + done.stderr)
    lengths = [after - before for before, after in zip(times[SETTLED:], times[SETTLED + 1 :], strict=False)]
    return Run(step_s=statistics.median(lengths), losses=list(losses), settled=told[1] if told else "")


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--row_s", type=float, default=0.04, help="what a row takes on the fast rank")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    slow, fast = (args.row_s, 3 * args.row_s), (args.row_s, args.row_s)
    found: dict[tuple[tuple[float, float], str], list[Run]] = {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        write_run(Path(name))
        for _ in range(args.repeats):
            for row_s, run in ((fast, "equal"), *((slow, run) for run in RUNS)):
                found.setdefault((row_s, run), []).append(fit(Path(name), RUNS[run], row_s))
                print(row_s, run, f"{found[row_s, run][-1].step_s:.3f} s", flush=True)
    equal = found[slow, "equal"]
    lines = [
        "# Ranks that are not equally fast",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, gloo, {os.cpu_count()} cores, one thread a rank,",
        f"load average {load:.1f} to {os.getloadavg()[0]:.1f}. Two ranks, batch_size {BATCH_SIZE}. Each sleeps for",
        f"every row, as if an accelerator computed it. Medians of {args.repeats} runs of {NUM_STEPS} steps, which took",
        f"turns; of each run, the median of the steps after {SETTLED}. `benchmarks/unequal.py` says how.",
        "",
        "| seconds a row | `data.share` | step | lowest | highest | steps/s | largest difference of a loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for (row_s, name), runs in found.items():
        seconds = [run.step_s for run in runs]
        median = statistics.median(seconds)
        pairs = [(a, b) for run in runs for a, b in zip(run.losses, equal[0].losses, strict=True)]
        faster = statistics.median(run.step_s for run in equal) / median
        cells = [
            f"{row_s[0]:g}, {row_s[1]:g}",
            name,
            f"{median:.3f} s",
            f"{min(seconds):.3f} s",
            f"{max(seconds):.3f} s",
        ]
        lines.append(f"| {' | '.join([*cells, f'x {faster:.2f}', f'{max(abs(a - b) for a, b in pairs):.1e}'])} |")
    lines += ["", "What `auto` said:", "", *(f"- {run.settled}" for run in found[slow, "auto"]), ""]
    report = "\n".join(lines)
    print(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()
