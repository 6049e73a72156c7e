"""Loss curves of full fine-tuning, LoRA and QLoRA from the same small model, trained here first.

    python benchmarks/lora_curves.py --repeats 3 --out benchmarks/results/lora_curves_DATE

A Llama-architecture model is trained from scratch on every second document of the language reference inside Python,
exported, and then fine-tuned on the other documents in every way below, each at the learning rate that did best for
it in a sweep (seed 0) and then with ``repeats`` seeds. Writes a page of numbers and a picture.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODEL = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LORA = "--model.lora.r=16"
WAYS: dict[str, list[str]] = {
    "full": [],
    "LoRA": [LORA],
    "QLoRA int8": [LORA, "--model.quantization.type=int8"],
    "QLoRA nf4": [LORA, "--model.quantization.type=nf4", "--model.quantization.double_quant=false"],
    "QLoRA nf4 double": [LORA, "--model.quantization.type=nf4"],
    "QLoRA fp4 double": [LORA, "--model.quantization.type=fp4"],
}
RATES = {"full": (1e-4, 3e-4, 1e-3), "LoRA": (1e-3, 3e-3, 1e-2)}
EVERY = 10


def write_documents(folder: Path) -> None:
    """Split the language reference into what the model is trained on first, and what it is fine-tuned on."""
    from pydoc_data.topics import topics

    for name, first in (("first", 0), ("second", 1)):
        texts = [topics[key] for key in sorted(topics)][first::2]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def fit(folder: Path, name: str, options: list[str], *, steps: int, seed: int = 0) -> list[tuple[int, str, float]]:
    """Run one training in a process of its own; return (step, metric, value) of its log."""
    command = [sys.executable, "-m", "lit_fsdp", "fit", f"--config={folder / 'base.yaml'}", f"--run_name={name}"]
    command += [f"--trainer.max_steps={steps}", f"--data.seed={seed}", f"--seed_everything={seed}", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    (path,) = (folder / "runs" / name).rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [
        (int(row["step"]) + 1, metric, float(row[metric]))
        for row in rows
        for metric in ("train/loss", "train/grad_norm", "val/loss")
        if row.get(metric)
    ]


def write_config(folder: Path) -> None:
    """Write what all runs have in common."""
    import yaml

    config: dict[str, Any] = {
        "cpu_processes": 1,
        "trainer": {
            "log_every_n_steps": 1,
            "val_check_interval": EVERY,
            "check_val_every_n_epoch": None,
            "gradient_clip_val": 1.0,
            "enable_progress_bar": False,
        },
        "model": {
            "class_path": "lit_fsdp.tasks.CausalLM",
            "init_args": {"config": MODEL, "lr_scheduler": {"type": "cosine", "warmup_steps": 10}},
        },
        "data": {
            "class_path": "lit_fsdp.tasks.TextData",
            "init_args": {
                "train": str(folder / "first.jsonl"),
                "validation_fraction": 0.1,
                "tokenizer": {"vocab_size": MODEL["vocab_size"]},
                "seq_length": 128,
                "batch_size": 8,
                "num_workers": 0,
                "cache_dir": str(folder / "cache"),
            },
        },
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(config))


def make_base(folder: Path, steps: int) -> None:
    """Train the model that all fine-tuning starts from, and export it."""
    fit(folder, "base", ["--model.optimizer.learning_rate=2e-3"], steps=steps)
    export = [sys.executable, "-m", "lit_fsdp", "export", "--checkpoint=runs/base", "--out=model"]
    subprocess.run(export, cwd=folder, check=True, capture_output=True)


def tune(folder: Path, way: str, rate: float, seed: int, steps: int) -> list[tuple[int, str, float]]:
    """Fine-tune in one way."""
    options = [
        "--model.config=null",
        f"--model.pretrained={folder / 'model'}",
        f"--data.tokenizer={folder / 'model'}",
        f"--data.train={folder / 'second.jsonl'}",
        f"--model.optimizer.learning_rate={rate}",
        *WAYS[way],
    ]
    name = f"{way}_{rate:g}_{seed}".replace(" ", "_")
    return fit(folder, name, options, steps=steps, seed=seed)


def pick(curve: list[tuple[int, str, float]], metric: str) -> list[tuple[int, float]]:
    """Return one metric of a curve."""
    return [(step, value) for step, name, value in curve if name == metric]


def summarize(curves: dict[str, list[Any]], rates: dict[str, float], args: argparse.Namespace) -> str:
    """Return the page of numbers."""
    packages = ", ".join(f"{n} {version(n)}" for n in ("torch", "bitsandbytes", "peft", "transformers"))
    options = f"--repeats {args.repeats} --base-steps {args.base_steps} --steps {args.steps}"
    setting = (
        f"`python benchmarks/lora_curves.py {options}` on CPU ({platform.machine()}), no GPU; {packages}. 1.0 M "
        f"parameters, fp32 compute, batches of 8 rows of 128 tokens, {args.steps} steps; rank 16 on all linear layers. "
        "Learning rate: the best of a sweep with seed 0; QLoRA takes that of LoRA. Validation loss: median and range "
        f"over {args.repeats} seeds. A spike is a training loss more than 0.3 above the mean of the ten before it."
    )
    lines = [
        f"# Full fine-tuning, LoRA and QLoRA from one base, {date.today().isoformat()}",
        "",
        setting,
        "",
        "| way | learning rate | first training loss | last validation loss | range | largest gradient norm | spikes |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, runs in curves.items():
        first = statistics.median(pick(run, "train/loss")[0][1] for run in runs)
        last = [pick(run, "val/loss")[-1][1] for run in runs]
        norm = max(value for run in runs for _, value in pick(run, "train/grad_norm"))
        spikes = sum(count_spikes([value for _, value in pick(run, "train/loss")]) for run in runs)
        middle, span = statistics.median(last), f"{min(last):.3f} to {max(last):.3f}"
        lines.append(f"| {way} | {rates[way]:g} | {first:.3f} | {middle:.3f} | {span} | {norm:.2f} | {spikes} |")
    return "\n".join(lines) + "\n"


def count_spikes(losses: list[float]) -> int:
    """Return how often the loss jumped."""
    return sum(losses[i] > statistics.mean(losses[i - 10 : i]) + 0.3 for i in range(10, len(losses)))


def draw(curves: dict[str, list[Any]], path: Path) -> None:
    """Draw the validation losses."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for way, runs in curves.items():
        points = [pick(run, "val/loss") for run in runs]
        steps = [step for step, _ in points[0]]
        middle = [statistics.median(p[i][1] for p in points) for i in range(len(steps))]
        axes.plot(steps, middle, label=way, linewidth=1.5)
    axes.set(xlabel="step", ylabel="validation loss (nats per token)", title="From one base, the same data")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=140)


def main() -> None:
    """Train the base, sweep, train all ways, write page and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--base-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="without a suffix")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        folder = Path(name)
        write_documents(folder)
        write_config(folder)
        make_base(folder, args.base_steps)

        def run_all(jobs: list[tuple[str, float, int]]) -> dict[tuple[str, float, int], Any]:
            return dict(zip(jobs, pool.map(lambda job: tune(folder, *job, args.steps), jobs), strict=True))

        # Ways of LoRA share the rate that is best without quantization: their adapters are the same.
        swept = run_all([(way, rate, 0) for way, options in RATES.items() for rate in options])
        best = {w: min(r, key=lambda rate: pick(swept[w, rate, 0], "val/loss")[-1][1]) for w, r in RATES.items()}
        rates = {way: best["full" if way == "full" else "LoRA"] for way in WAYS}
        jobs = [(way, rates[way], seed) for way in WAYS for seed in range(args.repeats)]
        done = swept | run_all([job for job in jobs if job not in swept])
        curves = {way: [done[way, rates[way], seed] for seed in range(args.repeats)] for way in WAYS}
        page = summarize(curves, rates, args)
        print(page)
        if args.out:
            args.out.with_suffix(".md").write_text(page + f"\n![Validation loss]({args.out.name}.png)\n")
            draw(curves, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
