"""What ``plan`` says of large models on 8 to 512 GPUs: memory and speed of each, on paper.

    python benchmarks/plan_scale.py --out benchmarks/results/plan_scale_DATE.md

Nothing is measured: it shows that plans of any number of ranks come from a laptop, and what more nodes cost.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "num_key_value_heads": 8}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "8 billion (Llama 3)": (
        {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        4096,
    ),
    "70 billion (Llama 3)": (
        {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        4096,
    ),
    # The FSDP paper's T5-11B has an encoder and rows of 512; this decoder has as many parameters.
    "11 billion (a decoder for T5-11B)": (
        {**LLAMA, "vocab_size": 32128, "num_key_value_heads": 32, "hidden_size": 4096, "intermediate_size": 16384}
        | {"num_hidden_layers": 40, "num_attention_heads": 32},
        512,
    ),
}
GPUS = {"H100 SXM": "nvlink4,ib400x8", "A100 SXM 80GB": "nvlink3,ib200x8"}
BATCH = 8


def plan(config: dict[str, Any], length: int, gpu: str, num_nodes: int, folder: Path) -> dict[str, Any]:
    """Return what ``plan`` writes."""
    command = [sys.executable, "-m", "lit_fsdp", "plan", f"--config={ROOT / 'configs' / 'quickstart.yaml'}"]
    command += [f"--model.config={json.dumps(config)}", f"--data.seq_length={length}", "--trainer.precision=bf16-mixed"]
    command += [
        f"--data.batch_size={BATCH if length < 4096 else 1}",
        "--trainer.strategy.activation_checkpointing.mode=full",
    ]
    command += ["--devices=8", f"--nodes={num_nodes}", f"--gpu={gpu}", f"--link={GPUS[gpu]}", f"--out={folder}"]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


def main() -> None:
    """Plan all, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    out = parser.parse_args().out
    lines = [
        "# Plans of 8 to 512 GPUs",
        "",
        f"{datetime.now(UTC):%Y-%m-%d} UTC, torch {torch.__version__}, CPU: predicted, not measured. bf16-mixed,",
        "AdamW, sharded over all ranks, full recomputation; one row of 4096 tokens a rank, of the decoder of 11",
        "billion 8 of 512. What needs more than the 80 GB of such a GPU is there for comparison only.",
        "",
        "| model | GPU | ranks | peak GiB | step s | exposed s | tokens/s of a GPU | of 8 GPUs | MFU % | to plan, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        for title, (config, length) in MODELS.items():
            for gpu in GPUS:
                first = None
                for num_nodes in (1, 8, 64):
                    begin = time.perf_counter()
                    found = plan(config, length, gpu, num_nodes, Path(name))
                    took_s = time.perf_counter() - begin
                    step = found["time"]
                    speed = step["tokens_per_s_per_gpu"]
                    first = first or speed
                    cells = [title, gpu, str(8 * num_nodes), f"{found['memory']['peak_bytes'] / 2**30:.1f}"]
                    cells += [f"{step['step_s']:.2f}", f"{step['exposed_communication_s']:.2f}", f"{speed:,.0f}"]
                    cells += [f"{100 * (speed / first - 1):+.1f} %", f"{step['mfu_pct']:.0f}", f"{took_s:.0f}"]
                    lines.append(f"| {' | '.join(cells)} |")
                    print(lines[-1], flush=True)
    report = "\n".join([*lines, ""])
    if out:
        out.write_text(report)


if __name__ == "__main__":
    main()
