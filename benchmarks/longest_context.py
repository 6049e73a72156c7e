"""The longest row that QLoRA of Llama 3.1 8B can train on cards of a size, as the planner sees it.

    python -m benchmarks.longest_context --out benchmarks/results/longest_context_DATE.md

Nothing is measured: each number is a trace of the whole model (``plan --exact true``), which needs no GPU and no
weights. Peaks are nearly straight lines over length, so two traces of each setting give a guess for each card, and a
third one at that length says whether it holds.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lit_fsdp.cli.plan import run_plan
from lit_fsdp.planning.needed_memory import HEADROOM, count_outside_bytes
from lit_fsdp.sharding.mesh import MeshSizes

ROOT = Path(__file__).parent.parent
GIB = 2**30
CAPS_GIB = (8, 16, 24, 80)
MODEL = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
MODEL |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
MODEL |= {"max_position_embeddings": 2**20, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
# Of unsloth's README: one GPU, rank 32 on all linear layers, one row a batch.
PUBLISHED = {
    "unsloth": {8: 2972, 16: 40724, 24: 78475, 80: 342733},
    "Transformers with FlashAttention 2": {8: 0, 16: 2551, 24: 5789, 80: 28454},
}
STEP = 512  # lengths are multiples of it, and a part of the loss has as many tokens
GUESSES = (8192, 65536)  # of the first two traces, on one card
MOST_TRACES = 4  # for a card, until one fits


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is planned: how many cards share each row, what lies on the host, and pieces of MLPs."""

    num_cards: int = 1
    is_offloaded: bool = True  # inputs of blocks
    has_weights_on_host: bool = False
    mlp_chunks: int | None = None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a step of one row takes of each card and of the host of each, in bytes."""

    length: int
    peak_bytes: int
    host_bytes: int


SETTINGS = {
    "`offload: true`, `mlp_chunks: 16`": Setting(mlp_chunks=16),
    "`offload: true`": Setting(),
    "`cpu_offload: {}`, `offload: true`, `mlp_chunks: 16`": Setting(has_weights_on_host=True, mlp_chunks=16),
    "inputs of blocks on the card": Setting(is_offloaded=False),
    "`offload: true`, `mesh.sequence: 8`": Setting(num_cards=8),
    "`offload: true`, `mesh.sequence: 4`": Setting(num_cards=4),
}


def trace(setting: Setting, length: int, folder: Path) -> Trace:
    """Return what ``plan`` says of rows of a length, without padding."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    strategy = "--trainer.strategy"
    command = ["plan", f"--config={ROOT / 'configs' / 'causal_lm_qlora_2x8gb.yaml'}"]
    command += [f"--model.pretrained={model}", f"--data.tokenizer={model}", "--model.lora.r=32"]
    command += ["--model.optimizer.name=adamw_8bit", f"--model.loss_chunks={-(-length // STEP)}"]
    command += [f"--data.seq_length={length}", "--data.packing=false", "--trainer.accumulate_grad_batches=1"]
    command += [f"--devices={setting.num_cards}", f"{strategy}.mesh.sequence={setting.num_cards}", "--exact=true"]
    command += [f"{strategy}.activation_checkpointing.offload={setting.is_offloaded}".lower(), f"--out={folder}"]
    if setting.mlp_chunks is not None:
        command += [f"{strategy}.activation_checkpointing.mlp_chunks={setting.mlp_chunks}"]
    if setting.has_weights_on_host:
        command += [f"{strategy}.cpu_offload={{}}"]
    # A process for each, as a plan makes ranks of its own; forked, so that nothing is imported again.
    process = multiprocessing.get_context("fork").Process(target=run_quietly, args=(command,))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.exitcode}")
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    host_bytes = sum(found["host"]["bytes_by_kind"].values())
    return Trace(length=length, peak_bytes=found["memory"]["peak_bytes"], host_bytes=host_bytes)


def run_quietly(command: Sequence[str]) -> None:
    """Plan, and print nothing but errors."""
    with redirect_stdout(io.StringIO()):
        run_plan(command)


def draw_line(one: Trace, other: Trace, length: int) -> Trace:
    """Return what the line through two traces says of a length."""
    share = (length - one.length) / (other.length - one.length)
    between = [round(a + share * (b - a)) for a, b in zip(astuple(one)[1:], astuple(other)[1:], strict=True)]
    return Trace(length=length, peak_bytes=between[0], host_bytes=between[1])


def solve(one: Trace, other: Trace, peak_bytes: float) -> Trace | None:
    """Return the longest rows within a peak by the line through two traces; ``None`` if there are none."""
    slope = (other.peak_bytes - one.peak_bytes) / (other.length - one.length)
    length = int((one.length + (peak_bytes - one.peak_bytes) / slope) // STEP * STEP)
    return draw_line(one, other, length) if length > 0 else None


def choose_near(known: list[Trace], peak_bytes: float) -> tuple[Trace, Trace]:
    """Return the two traces whose peaks are nearest."""
    one, other = sorted(known, key=lambda trace: abs(trace.peak_bytes - peak_bytes))[:2]
    return one, other


def find_longest(known: list[Trace], peak_bytes: float, look: Callable[[int], Trace]) -> Trace | None:
    """Return the trace of the longest rows within a peak; new traces are added to those that are known."""
    for _ in range(MOST_TRACES):
        guess = solve(*choose_near(known, peak_bytes), peak_bytes)
        if guess is None:
            return None
        found = next((trace for trace in known if trace.length == guess.length), None) or look(guess.length)
        if found not in known:
            known.append(found)
        if found.peak_bytes <= peak_bytes:
            return found
    return None


def subtract_outside(cap_bytes: int, setting: Setting) -> int:
    """Return what is left of a card beside CUDA and NCCL."""
    return cap_bytes - count_outside_bytes(MeshSizes(1, 1, sequence=setting.num_cards))


def plan_setting(setting: Setting, look: Callable[[int], Trace]) -> dict[str, Any]:
    """Return the longest rows of a setting on each card: traced on one card, by the line through two on several."""
    known = [look(length * setting.num_cards) for length in GUESSES]
    first, second = known
    rows: dict[str, dict[str, Any]] = {"longest": {}, "tensors_alone": {}}
    for cap in CAPS_GIB:
        budget = subtract_outside(cap * GIB, setting) / HEADROOM
        best = find_longest(known, budget, look) if setting.num_cards == 1 else solve(first, second, budget)
        if best is not None:
            rows["longest"][str(cap)] = asdict(best)
    for cap in CAPS_GIB:  # once all traces are there
        peak_bytes = subtract_outside(cap * GIB, setting)
        if (alone := solve(*choose_near(known, peak_bytes), peak_bytes)) is not None:
            rows["tensors_alone"][str(cap)] = asdict(alone)
    slope = (second.peak_bytes - first.peak_bytes) / (second.length - first.length)
    return {**rows, "bytes_per_token": slope, "traces": [asdict(trace) for trace in known]}


def make_row(name: str, num_cards: int, rows: dict[str, Any], show: Callable[[dict[str, Any]], str]) -> str:
    """Return a line of a table, with a cell for each card; empty where nothing fits."""
    cells = [show(rows[str(cap)]) if str(cap) in rows else "none" for cap in CAPS_GIB]
    return f"| {name} | {num_cards} | {' | '.join(cells)} |"


def make_report(found: dict[str, Any]) -> list[str]:
    """Return the page."""
    caps, line = " | ".join(f"{cap} GB" for cap in CAPS_GIB), f"|---|---|{'---|' * len(CAPS_GIB)}"
    lines, hosts = [f"| longest row, tokens | cards | {caps} |", line], [f"| GiB of the host | cards | {caps} |", line]
    slopes, errors = [], []
    for name, rows in found["settings"].items():
        num_cards = SETTINGS[name].num_cards
        lines.append(make_row(name, num_cards, rows["longest"], lambda row: f"{row['length']:,}"))
        without = f"{name}, nothing for the allocator"
        lines.append(make_row(without, num_cards, rows["tensors_alone"], lambda row: f"{row['length']:,}"))
        hosts.append(make_row(name, num_cards, rows["longest"], lambda row: f"{row['host_bytes'] / GIB:.1f}"))
        slopes.append(f"{rows['bytes_per_token'] / 1024:.0f} KiB ({name})")
        first, second, *others = [Trace(**trace) for trace in rows["traces"]]
        errors += [abs(draw_line(first, second, t.length).peak_bytes / t.peak_bytes - 1) for t in others]
    for name, published in PUBLISHED.items():
        shown = {str(cap): length for cap, length in published.items()}
        lines.append(make_row(f"{name}, published", 1, shown, lambda row: f"{row:,}" if row else "out of memory"))
    return [
        "# The longest row for QLoRA of Llama 3.1 8B, as planned",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, CPU: traced without values, not measured on a GPU.",
        "nf4 with double quantization, rank 32 on all linear layers, full recomputation, loss in parts of",
        f"{STEP} tokens, 8-bit AdamW, one row without padding, bf16-true. `benchmarks/longest_context.py` makes it.",
        "",
        *lines,
        "",
        "Rows fit as `plan` says: tensors at the peak times 1.15 for the allocator, and 1 GiB for CUDA and NCCL. Rows",
        "with nothing for the allocator leave the 15 % out. On one card, those with it were traced at that length.",
        "All others are on the line through the two nearest traces. That through the first two of a setting was off by",
        f"{100 * max(errors, default=0):.1f} % at most where that was looked at. At the peak a token takes",
        f"{', '.join(slopes)}.",
        "",
        *hosts,
        "",
        "That is pinned memory for each card.",
        "",
        "## What cannot be compared",
        "",
        "- The published numbers are on a line through measured peaks; ours are plans. No card has run them.",
        "- unsloth computes MLP, norms and loss in kernels of its own that keep less; ours are of Transformers.",
        "- unsloth keeps all weights on the card. With `cpu_offload` they come from the host in each forward and",
        "  each backward; what that costs was not measured.",
        "- Whether its peaks are of tensors or of what the allocator has reserved is not said, nor is the optimizer.",
        "- Their GB may be 10^9 bytes; ours are GiB. Llama 3.1 was trained for rows of up to 131,072 tokens.",
        "- Several cards have no published counterpart in that table. They share each row, and the weights as well.",
        "",
    ]


def main() -> None:
    """Trace, print, and write the page and its numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Markdown file to write; its numbers go into a .json beside it")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, help="rows to make; others stay as the file has them")
    args = parser.parse_args()
    found: dict[str, Any] = {"published": PUBLISHED, "settings": {}}
    if args.only and args.out and args.out.with_suffix(".json").exists():
        found["settings"] = json.loads(args.out.with_suffix(".json").read_text())["settings"]
    with tempfile.TemporaryDirectory() as name:
        for title in args.only or SETTINGS:
            setting = SETTINGS[title]

            def look(length: int, setting: Setting = setting, title: str = title) -> Trace:
                step = trace(setting, length, Path(name))
                print(f"{title}: {length:,} tokens, {step.peak_bytes} bytes", file=sys.stderr, flush=True)
                return step

            made = {**found["settings"], title: plan_setting(setting, look)}
            found["settings"] = {title: made[title] for title in SETTINGS if title in made}
            if args.out:  # after each, as all of them take minutes
                args.out.write_text("\n".join(make_report(found)))
                args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(make_report(found)))


if __name__ == "__main__":
    main()
