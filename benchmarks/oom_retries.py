"""What `oom_retries` costs a step in which nothing goes wrong.

    python -m benchmarks.oom_retries --out benchmarks/results/oom_retries_DATE.md

Two ranks on this machine train a small Llama, with and without the setting in turns, in one process each. What counts
is the CPU time of a rank's process and the ratio of medians: the wall time of two ranks on shared cores says little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fsdp import FSDP2Strategy

NUM_RANKS, LAYERS, LENGTH, ROWS = 2, 8, 64, 4
SIZES = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "vocab_size": 1000}


class Model(pl.LightningModule):
    """The smallest module around a Llama."""

    def configure_model(self) -> None:
        """Build it."""
        if not hasattr(self, "llama"):
            self.llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **SIZES))

    def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
        """Return the mean loss."""
        return self.llama(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the one with the least work of its own."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class StepTimes(pl.Callback):
    """CPU and wall seconds of each step."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin a step."""
        self._begin = time.process_time(), time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """End it."""
        self.cpu_s.append(time.process_time() - self._begin[0])
        self.wall_s.append(time.perf_counter() - self._begin[1])


def run_rank(rank: int, folder: str, num_rounds: int, num_steps: int) -> None:
    """Train in turns with and without the setting; rank 0 writes the medians of each round."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), GROUP_RANK="0")
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    found: dict[int, list[tuple[float, float]]] = {0: [], 4: []}
    for _ in range(num_rounds):
        for retries, medians in found.items():
            torch.manual_seed(0)
            times = StepTimes()
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=NUM_RANKS,
                plugins=[TorchElasticEnvironment()],
                strategy=FSDP2Strategy(oom_retries=retries),
                max_steps=num_steps + 2,
                callbacks=[times],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            rows = torch.randint(1000, (ROWS * NUM_RANKS * (num_steps + 2), LENGTH))
            trainer.fit(Model(), DataLoader(rows, batch_size=ROWS))  # type: ignore[arg-type]
            medians.append((statistics.median(times.cpu_s[2:]), statistics.median(times.wall_s[2:])))
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


def main() -> None:
    """Measure, and write a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, (folder, options.rounds, options.steps), nprocs=NUM_RANKS, start_method="spawn")
        found = torch.load(f"{folder}/found.pt")
    versions = f"torch {torch.__version__}, gloo, {NUM_RANKS} ranks on {os.cpu_count()} cores, one thread a rank"
    model = f"A Llama of {LAYERS} layers of width {SIZES['hidden_size']}, {ROWS} rows of {LENGTH} tokens"
    rounds = f"{options.rounds} rounds of {options.steps} steps each, in turns"
    lines = [
        "# What `oom_retries` costs a step in which nothing goes wrong\n",
        f"{datetime.now(UTC):%Y-%m-%d}, {versions}, load average {load:.1f} to {os.getloadavg()[0]:.1f}.",
        f"`benchmarks/oom_retries.py` says how. {model}; {rounds}. Medians over rounds of the median step.\n",
        "| | off | on | ratio of medians | ratio of each round |",
        "|---|---|---|---|---|",
    ]
    for place, name in enumerate(("CPU ms of a rank", "wall ms")):
        off, on = ([1e3 * pair[place] for pair in found[retries]] for retries in (0, 4))
        ratios = ", ".join(f"{b / a:.3f}" for a, b in zip(off, on, strict=True))
        a, b = statistics.median(off), statistics.median(on)
        lines.append(f"| {name} | {a:.1f} | {b:.1f} | {b / a:.3f} | {ratios} |")
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
