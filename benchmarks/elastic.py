"""How long a run under torchrun stands still, and which steps it repeats, when ranks or nodes die and come back.

    python benchmarks/elastic.py --repeats 3 --out benchmarks/results/elastic_DATE.md

Nodes are agents of torchrun on this machine, with one rank each on the CPU. Each repeat is one run that meets three
events: a rank is killed, a node is killed (its agent and its rank), a node comes. Timed is from the event, for a node
that comes from the start of its torchrun, to the end of the first step by the new ranks. Repeated are the steps that
were done and done again. The losses are compared with those of a run of one rank that nothing happened to.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

EVENTS = {
    "rank": "a rank is killed; its agent starts it again",
    "node": "a node is killed: 2 -> 1 ranks",
    "join": "a node comes: 1 -> 2 ranks",
}
EVERY = 10  # steps between checkpoints
WAIT_S = 600.0
TASK = """
import os, time
from pathlib import Path
from lit_fsdp.tasks import CausalLM

class Timed(CausalLM):
    written = 0

    def training_step(self, batch, batch_idx):
        time.sleep(float(os.environ["STEP_S"]) / self.trainer.accumulate_grad_batches)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        step = self.trainer.global_step
        if self.trainer.is_global_zero and self.step_loss is not None and step != self.written:
            self.written = step
            with open("steps", "a") as file:
                file.write(f"{time.time()} {step} {self.trainer.world_size} {os.getpid()} {float(self.step_loss)}\\n")
"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that was done: when (seconds since the epoch), by how many ranks, of which the first has this pid."""

    at_s: float
    step: int
    world_size: int
    pid: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What an event cost."""

    event: str
    standstill_s: float
    num_repeated: int


def write_run(folder: Path) -> None:
    """Write the configuration, the task and the rows of a tiny language model."""
    folder.mkdir(parents=True)
    rows = ({"text": " ".join(f"word{(i * 7 + k * k) % 53} is {k + i}." for k in range(12))} for i in range(200))
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "timed.py").write_text(TASK)
    config = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    saves = {"every_n_train_steps": EVERY, "save_top_k": 2, "monitor": "step", "mode": "max"}
    trainer: dict[str, Any] = {"accelerator": "cpu", "max_epochs": -1, "enable_progress_bar": False}
    trainer["callbacks"] = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saves}]
    data = {"train": "train.jsonl", "tokenizer": {"vocab_size": 300}, "seq_length": 64, "num_workers": 0}
    data |= {"batch_size": 2, "global_batch_size": 8, "cache_dir": "cache"}
    run = {
        "monitoring": False,
        "trainer": trainer,
        "model": {"class_path": "timed.Timed", "init_args": {"config": config}},
        "data": {"class_path": "lit_fsdp.tasks.TextData", "init_args": data},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))


class Run:
    """One run in a folder of its own, whose agents can be started and killed."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self.folder = folder
        write_run(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
        self.options += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        self.options += ["--rdzv-conf=last_call_timeout=5"]
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "STEP_S": str(step_s)}
        self.environ = {**os.environ, **variables}
        self.agents: list[subprocess.Popen[bytes]] = []

    def fit(self, num_steps: int, *launcher: str) -> subprocess.Popen[bytes]:
        """Start ``fit`` up to a step, with a launcher or without."""
        command = [sys.executable, *launcher, "-m", "lit_fsdp", "fit", "--config=run.yaml", "--ckpt_path=last"]
        with (self.folder / f"{len(self.agents)}.log").open("wb") as log:
            options: dict[str, Any] = {"cwd": self.folder, "env": self.environ, "stdout": log, "stderr": log}
            self.agents.append(subprocess.Popen([*command, f"--trainer.max_steps={num_steps}"], **options))
        return self.agents[-1]

    def start_agent(self, num_steps: int) -> subprocess.Popen[bytes]:
        """Start an agent of torchrun, which is a node."""
        return self.fit(num_steps, "-m", "torch.distributed.run", *self.options)

    def read_steps(self) -> list[Step]:
        """Return what was done so far, in order of time."""
        path = self.folder / "steps"
        fields = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [
            Step(at_s=float(f[0]), step=int(f[1]), world_size=int(f[2]), pid=int(f[3]), loss=float(f[4]))
            for f in fields
            if len(f) == 5
        ]

    def wait_for(self, is_true: Callable[[list[Step]], bool]) -> list[Step]:
        """Wait until something is true of the steps; an agent that ends before is an error."""
        deadline = time.monotonic() + WAIT_S
        while not is_true(steps := self.read_steps()):
            first = self.agents[0]
            if first.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("".join(path.read_text()[-4000:] for path in self.folder.glob("*.log")))
            time.sleep(0.05)
        return steps

    def measure(self, event: str, act: Callable[[], None], world_size: int) -> Recovery:
        """Do something, and wait for the first step that new ranks do, this many of them."""
        before = self.read_steps()
        at_s = time.time()
        act()
        old = before[-1].pid
        steps = self.wait_for(lambda steps: steps[-1].pid != old and steps[-1].world_size == world_size)
        first = next(k for k, s in enumerate(steps) if s.pid != old and s.at_s > at_s and s.world_size == world_size)
        done = {s.step for s in steps[:first]}
        self.wait_for(lambda now: now[-1].step > max(done))
        num_repeated = sum(s.step in done for s in self.read_steps()[first:])
        return Recovery(event=event, standstill_s=round(steps[first].at_s - at_s, 1), num_repeated=num_repeated)

    def close(self) -> None:
        """Kill what is left."""
        for agent in self.agents:
            kill(agent)
            agent.wait()


def list_ranks(agent: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes that an agent has started."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def kill(agent: subprocess.Popen[bytes], *, with_agent: bool = True) -> None:
    """Kill the ranks of a node, and its agent."""
    for pid in ([agent.pid] if with_agent else []) + list_ranks(agent):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def run_once(folder: Path, num_steps: int, step_s: float, truth: dict[int, float]) -> tuple[list[Recovery], float]:
    """Let one run meet all events; return what they cost and the largest relative difference of a loss."""
    run = Run(folder, step_s)
    try:
        first = run.start_agent(num_steps)
        run.wait_for(lambda _: bool(list_ranks(first)))
        second = run.start_agent(num_steps)
        run.wait_for(lambda steps: bool(steps) and steps[-1].world_size == 2 and steps[-1].step >= EVERY + 5)
        found = [run.measure("rank", lambda: kill(second, with_agent=False), 2)]
        step = run.read_steps()[-1].step
        run.wait_for(lambda steps: steps[-1].step >= step + EVERY)
        found.append(run.measure("node", lambda: kill(second), 1))
        found.append(run.measure("join", lambda: run.start_agent(num_steps) and None, 2))
        done = run.read_steps()
    finally:
        run.close()
    return found, max(abs(s.loss - truth[s.step]) / truth[s.step] for s in done)


def format_results(rows: list[Recovery], difference: float, repeats: int, step_s: float) -> str:
    """Return the page."""
    head = f"`python benchmarks/elastic.py --repeats {repeats}` on {os.cpu_count()} shared CPU cores"
    head += f" ({platform.machine()}), no GPU; torch {version('torch')}, lightning {version('lightning')}, gloo."
    head += " Two agents on loopback with one rank each, `--rdzv-conf=last_call_timeout=5`. A tiny Llama, about"
    head += f" {step_s} s a step, a checkpoint every {EVERY} steps."
    noisy = (
        "**The times are of 2 CPU cores that other work shared**: most of them are Python's imports, of torchrun and"
    )
    noisy += " of the ranks. On machines of their own they are shorter. The repeated steps do not depend on that."
    end = (
        "A killed rank or node costs the steps since the last checkpoint. A node that comes costs none: torchrun sends"
    )
    end += " SIGTERM, and the ranks save before they start again."
    lines = [
        f"# Seconds to recover under torchrun, {date.today().isoformat()}",
        "",
        head,
        "",
        noisy,
        "",
        "| event | standstill, s: median | lowest | highest | repeated steps |",
        "|---|---|---|---|---|",
    ]
    for event, what in EVENTS.items():
        own = [row for row in rows if row.event == event]
        times = [row.standstill_s for row in own]
        repeated = ", ".join(str(row.num_repeated) for row in own)
        lines.append(f"| {what} | {statistics.median(times):.0f} | {min(times):.0f} | {max(times):.0f} | {repeated} |")
    lines += [
        "",
        end,
        "",
        f"Largest relative difference of a loss from a run of one rank that nothing happened to: {difference:.1e}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run it, print the page, and write it with its numbers beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="of a run, more than the events take")
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[Recovery] = []
    with tempfile.TemporaryDirectory() as name:
        whole = Run(Path(name) / "whole", 0.0)
        if whole.fit(args.steps).wait():
            raise RuntimeError((whole.folder / "0.log").read_text()[-4000:])
        truth = {step.step: step.loss for step in whole.read_steps()}
        differences = []
        for k in range(args.repeats):
            found, difference = run_once(Path(name) / str(k), args.steps, args.step_s, truth)
            print(*found, difference, sep="\n", flush=True)
            rows += found
            differences.append(difference)
    page = format_results(rows, max(differences), args.repeats, args.step_s)
    print(page)
    if args.out is not None:
        args.out.write_text(page)
        numbers = {"recoveries": [asdict(row) for row in rows], "largest_difference": max(differences)}
        args.out.with_suffix(".json").write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
