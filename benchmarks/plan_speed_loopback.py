"""Predicts what a second rank on this machine costs, from ``bench comm``, and compares with ``bench scaling``.

    python benchmarks/plan_speed_loopback.py --out benchmarks/results/plan_speed_loopback_2026-11-21.md

CPU and gloo, where all communication is exposed: it checks the counting of collectives and the lines through measured
times, not the overlap. Two minutes on two cores that do nothing else.
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

from lit_fsdp.links import Group, parse_links
from lit_fsdp.precision import cast_parameters, read_precision
from lit_fsdp.settings import Settings
from lit_fsdp.traffic import predict_bytes
from lit_fsdp.unit_timeline import sum_kinds, time_units
from lit_fsdp.units import plan_module

ROOT = Path(__file__).parent.parent
SIZES = {
    "small units": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8},
    "large units": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3},
}
COMMON = {"vocab_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}


def run(*arguments: str) -> None:
    """Run one of our commands."""
    command = [sys.executable, "-m", "lit_fsdp", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment)


def measure(sizes: dict[str, int], folder: Path) -> list[dict[str, Any]]:
    """Return what ``bench scaling`` found on one and two ranks."""
    options = [f"--model.config.{name}={value}" for name, value in {**COMMON, **sizes}.items()]
    options += [
        "--data.batch_size=2",
        "--data.seq_length=64",
        "--trainer.accelerator=cpu",
        "--trainer.val_check_interval=null",
    ]
    config = ROOT / "configs" / "quickstart.yaml"
    run("bench", "scaling", f"--config={config}", f"--options={json.dumps(options)}", "--steps=16", f"--out={folder}")
    runs: list[dict[str, Any]] = json.loads((folder / "scaling.json").read_text())["runs"]
    return runs


def predict(sizes: dict[str, int], comm: Path) -> dict[str, float]:
    """Return the seconds of each kind of collective of a step on two ranks."""
    with torch.device("meta"):
        config = AutoConfig.for_model("llama", **COMMON, **sizes)
        model = AutoModelForCausalLM.from_config(config)
    dtypes, settings = read_precision("32-true"), Settings()
    cast_parameters(model, dtypes)
    plan, pair = plan_module(model, settings.units), Group(num_ranks=2)
    units = predict_bytes(model, plan, settings.sharding, dtypes, num_shards=2)
    times = time_units(
        plan, units, parse_links(str(comm)), shard=pair, replica=Group(num_ranks=1), regather=pair, num_micro_batches=1
    )
    return sum_kinds(times, 1)


def main() -> None:
    """Measure, predict, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    out = parser.parse_args().out
    lines = [
        "# A second rank on this machine: predicted and measured",
        "",
        f"{datetime.now(UTC):%Y-%m-%d} UTC, torch {torch.__version__}, gloo on loopback, {os.cpu_count()} cores, one",
        f"thread a rank. Load average before: {os.getloadavg()[0]:.1f}.",
        "",
        "| run | communication, measured s | predicted | error | step of 1 rank, s | of 2, measured | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, sizes in SIZES.items():
            run(
                "bench",
                "comm",
                "--ranks=2",
                "--backend=gloo",
                "--sizes=64KiB,256KiB,1MiB,4MiB,16MiB",
                f"--out={folder}",
            )
            alone, pair = measure(sizes, folder)
            predicted = sum(predict(sizes, folder / "comm.json").values())
            error = 100 * (predicted / pair["exposed_s"] - 1)
            cells = [f"{pair['exposed_s']:.4f}", f"{predicted:.4f}", f"{error:+.0f} %", f"{alone['step_s']:.4f}"]
            cells += [f"{pair['step_s']:.4f}", f"{alone['step_s'] + predicted:.4f}"]
            lines.append(f"| {title}: {sizes} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    report = "\n".join([*lines, ""])
    print(report)
    if out:
        out.write_text(report)


if __name__ == "__main__":
    main()
