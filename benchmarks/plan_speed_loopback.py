"""Predicts what communication costs on this machine, from ``bench comm``, and compares with ``bench scaling``.

    python benchmarks/plan_speed_loopback.py --rates none,4gbit,1gbit --out benchmarks/results/FILE.md

CPU and gloo, where all communication is exposed: it checks the counting of collectives and the lines through measured
times, not the overlap. With a rate, all ranks share a loopback of that bandwidth, in a network namespace of its own
(``unshare --net`` and the token bucket of ``tc``, for which Linux wants root). A quarter of an hour on two cores that
do nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.planning.timing.hardware import GPUS
from lit_fsdp.planning.timing.links import parse_links
from lit_fsdp.planning.timing.step_time import Machine, Workload, estimate_time
from lit_fsdp.profiling.expected_communication import estimate_bytes
from lit_fsdp.profiling.flops import Flops
from lit_fsdp.sharding.mixed_precision import cast_parameters, read_precision
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.wrap import plan_module

ROOT = Path(__file__).parent.parent
SIZES = {
    "small units": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8},
    "large units": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3},
}
COMMON = {"vocab_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}


RANKS = (2, 4)


def run(rate: str, *arguments: str) -> None:
    """Run one of our commands, on a loopback of that rate."""
    command = [sys.executable, "-m", "lit_fsdp", *arguments]
    if rate != "none":
        limit = f"tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 400ms"
        command = ["unshare", "--net", "sh", "-c", f'ip link set lo up && {limit} && exec "$@"', "sh", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")


def measure(rate: str, sizes: dict[str, int], folder: Path) -> dict[int, dict[str, Any]]:
    """Return what ``bench scaling`` found, by number of ranks."""
    options = [f"--model.config.{name}={value}" for name, value in {**COMMON, **sizes}.items()]
    options += [
        "--data.batch_size=2",
        "--data.seq_length=64",
        "--trainer.accelerator=cpu",
        "--trainer.val_check_interval=null",
    ]
    arguments = [f"--config={ROOT / 'configs' / 'quickstart.yaml'}", f"--options={json.dumps(options)}", "--steps=16"]
    ranks = ",".join(str(count) for count in (1, *RANKS))
    run(rate, "bench", "scaling", *arguments, f"--ranks={ranks}", f"--out={folder}")
    runs: list[dict[str, Any]] = json.loads((folder / "scaling.json").read_text())["runs"]
    return {found["num_ranks"]: found for found in runs}


def predict(sizes: dict[str, int], comm: Path, num_ranks: int) -> float:
    """Return the seconds that the collectives of a step take."""
    with torch.device("meta"):
        config = AutoConfig.for_model("llama", **COMMON, **sizes)
        model = AutoModelForCausalLM.from_config(config)
    dtypes, settings = read_precision("32-true"), Settings()
    cast_parameters(model, dtypes)
    plan = plan_module(model, settings.wrap)
    units = estimate_bytes(model, plan, settings.sharding, dtypes, num_shards=num_ranks)
    work = Workload(flops=Flops(), plan=plan, units=units, tokens=1, moved_bytes=0)
    machine = Machine(gpu=GPUS[0], links=parse_links(str(comm)), num_shards=num_ranks, ranks_per_node=num_ranks)
    return estimate_time(work, machine).communication_s


def compare(rate: str) -> list[str]:
    """Measure and predict on a loopback of that rate; return the rows of the table."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        comms = {count: Path(name) / f"comm_{count}" for count in RANKS}
        for count, folder in comms.items():
            sizes = "64KiB,256KiB,1MiB,4MiB,16MiB"
            run(rate, "bench", "comm", f"--ranks={count}", "--backend=gloo", f"--sizes={sizes}", f"--out={folder}")
        for title, shape in SIZES.items():
            found = measure(rate, shape, Path(name))
            for count, folder in comms.items():
                exposed_s, wire = found[count]["exposed_s"], found[count]["wire_bytes"]
                predicted_s = predict(shape, folder / "comm.json", count)
                error = 100 * (predicted_s / exposed_s - 1)
                cells = [rate, title, str(count), f"{wire / 2**20:.1f}", f"{exposed_s:.3f}", f"{predicted_s:.3f}"]
                cells += [f"{error:+.0f} %", f"{found[1]['step_s']:.3f}", f"{found[count]['step_s']:.3f}"]
                rows.append(f"| {' | '.join(cells)} |")
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, predict, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="none", help="of the loopback, as tc writes them: none,4gbit,1gbit")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    lines = [
        "# Communication on the loopback of one machine: predicted and measured",
        "",
        f"{datetime.now(UTC):%Y-%m-%d} UTC, torch {torch.__version__}, gloo, {os.cpu_count()} cores, one thread a",
        f"rank, load average before: {os.getloadavg()[0]:.1f}. `bench comm`, and `bench scaling` of 16 steps, one run",
        f"each; all ranks share a loopback of that rate. Models: {SIZES}.",
        "",
        "| rate | model | ranks | sent a rank, MiB | communication, s | predicted | error | step of 1 rank, s | step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rate in args.rates.split(","):
        lines += compare(rate)
    report = "\n".join([*lines, ""])
    print(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()
