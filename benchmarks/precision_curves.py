"""Loss curves of products in float8, of optimizer state in 8 bits and of Muon, beside bfloat16 with AdamW.

    python benchmarks/precision_curves.py --seeds 3 --steps 150 --out benchmarks/results/precision_curves_DATE.md
    python benchmarks/precision_curves.py --ways "bf16, adamw" "bf16, muon" --rates 0.5 1 2 4

A small Llama learns the bytes of the language reference inside Python from random weights, in bf16-mixed on one rank,
with the same weights, rows and learning rate in each way. One way more is bfloat16 with first weights that are a
millionth larger: how far rounding alone moves a curve. On CPUs products in float8 are emulated: the same rounding,
so a curve is what a GPU would give but for the order of sums, and times say nothing. With ``--rates``, each way is
also trained with multiples of the learning rate.
"""

from __future__ import annotations

import argparse
import logging
import platform
import shlex
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fsdp import Float8, FSDP2Strategy, Optimizer
from lit_fsdp.tasks import CausalLM, LRSchedule

MODEL = {"model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 384}
MODEL |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
BATCH, LENGTH, RATE, NUM_LAST = 8, 64, 2e-3, 20
_HAS_FLOAT8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
WAYS: dict[str, dict[str, Any]] = {
    "bf16, adamw": {},
    **{
        f"float8 {recipe}, adamw": {"float8": Float8(recipe=recipe, emulate=not _HAS_FLOAT8)}
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    },
    "bf16, adamw_8bit": {"optimizer": "adamw_8bit"},
    "float8 tensorwise, adamw_8bit": {"float8": Float8(emulate=not _HAS_FLOAT8), "optimizer": "adamw_8bit"},
    "bf16, muon": {"optimizer": "muon"},
    "bf16, adamw, other rounding": {"weights_factor": 1 + 1e-6},
}


def make_rows(num_rows: int, seed: int) -> list[dict[str, Tensor]]:
    """Return pieces of the text, as bytes, drawn anywhere in it."""
    from pydoc_data.topics import topics

    text = torch.frombuffer(bytearray("\n".join(topics[key] for key in sorted(topics)).encode()), dtype=torch.uint8)
    starts = torch.randint(len(text) - LENGTH, (num_rows,), generator=torch.Generator().manual_seed(seed))
    pieces = [text[start : start + LENGTH].long() for start in starts.tolist()]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def train(way: Mapping[str, Any], seed: int, steps: int) -> list[float]:
    """Return the losses of a training."""
    losses: list[float] = []

    class Keep(pl.Callback):
        def on_fit_start(self, _: Any, module: Any) -> None:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(way.get("weights_factor", 1.0))

        def on_train_batch_end(self, _: Any, module: Any, *__: Any) -> None:
            losses.append(float(module.step_loss))

    torch.manual_seed(seed)
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        accelerator="auto",
        devices=1,
        precision="bf16-mixed",
        strategy=FSDP2Strategy(float8=way.get("float8")),
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[Keep()],
        **quiet,
    )
    optimizer = Optimizer(name=way.get("optimizer", "adamw"), learning_rate=RATE * way.get("rate", 1.0))
    task = CausalLM(config=MODEL, optimizer=optimizer, lr_scheduler=LRSchedule(type="cosine", warmup_steps=10))
    trainer.fit(task, DataLoader(make_rows(BATCH * steps, seed), batch_size=BATCH))
    return losses


def format_page(found: Mapping[str, Sequence[Sequence[float]]], args: argparse.Namespace) -> str:
    """Return losses along the way, and how far each curve is from the first one."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"one core of a CPU ({platform.machine()})"
    how = "products of the GPU" if _HAS_FLOAT8 else "products emulated"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchao", "bitsandbytes") if find_spec(name))
    points = [step for step in (1, 10, 25, 50, 100, 150, 300) if step <= args.steps]
    about = (
        f"`python benchmarks/precision_curves.py {shlex.join(sys.argv[1:])}` on {where}, {how}; "
        f"{packages}. 0.7 M parameters, {BATCH} rows of {LENGTH} bytes a step, bf16-mixed. Medians over {args.seeds} "
        f"seeds, of the mean of up to 5 steps before. *last {NUM_LAST}*: mean loss of the last {NUM_LAST} steps, to "
        "that of the first line with the same seed, median [range]."
    )
    lines = [
        f"# Losses with float8, 8-bit optimizer state and Muon, {datetime.now(UTC).date().isoformat()}",
        "",
        about,
        "",
        f"| way | {' | '.join(f'step {step}' for step in points)} | last {NUM_LAST} to {next(iter(found))} |",
        "|---" * (len(points) + 2) + "|",
    ]
    base = [statistics.mean(losses[-NUM_LAST:]) for losses in next(iter(found.values()))]
    for way, runs in found.items():
        cells = [
            f"{statistics.median(statistics.mean(losses[max(step - 5, 0) : step]) for losses in runs):.3f}"
            for step in points
        ]
        ratios = [statistics.mean(losses[-NUM_LAST:]) / of for losses, of in zip(runs, base, strict=True)]
        cells.append(f"{statistics.median(ratios):.4f} [{min(ratios):.4f}-{max(ratios):.4f}]")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    spread = max(base) / min(base)
    return "\n".join([*lines, "", f"Seeds alone move the first line by a factor of {spread:.4f}.", ""])


def main() -> None:
    """Train in each way, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help=f"{NUM_LAST} or more")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=" | ".join(WAYS))
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0], help=f"multiples of {RATE}")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    if args.seeds < 1 or args.steps < NUM_LAST:
        parser.error(f"--seeds, --steps: got {args.seeds}, {args.steps}: expected 1 or more, {NUM_LAST} or more")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ways = {
        f"{way}, {rate:g} of the rate" if rate != 1 else way: {**WAYS[way], "rate": rate}
        for way in args.ways
        for rate in args.rates
    }
    found = {way: [train(settings, seed, args.steps) for seed in range(args.seeds)] for way, settings in ways.items()}
    page = format_page(found, args)
    print(page)
    if args.out:
        args.out.write_text(page)


if __name__ == "__main__":
    main()
