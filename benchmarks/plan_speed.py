"""Compares predicted step times with measurements that others have published.

    python benchmarks/plan_speed.py --out benchmarks/results/plan_speed_2026-11-21.md

CPU only: models are built on the meta device, and FLOPs, bytes and moved bytes counted as ``plan`` counts them. Takes a
few minutes, most of it for building the models. The measurements and where they are from: published_speed.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.layers import list_adapter_parameters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.closed_form.engine import estimate_step
from lit_fsdp.planning.step_parts import MicroBatch, ModelToTrain, Ranks
from lit_fsdp.planning.timing.hardware import Gpu, find_gpu, get_product_share
from lit_fsdp.planning.timing.links import LINKS, Interconnect, parse_links
from lit_fsdp.planning.timing.step_time import (
    CONTENTION,
    CONTENTION_THROUGH_HOST,
    MODEL_SHARE,
    Machine,
    StepTime,
    Workload,
    count_update_bytes,
    estimate_time,
)
from lit_fsdp.profiling.expected_communication import estimate_bytes
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision, cast_parameters
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.wrap import count_shard_bytes, plan_module


def _llama(hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return {"model_type": "llama", **sizes, "num_attention_heads": heads, "num_key_value_heads": key_heads}


def _mpt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Return a GPT-2 of the sizes of an MPT: both have LayerNorm, GELU, learned positions and tied embeddings."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": 50368, "n_positions": 8192}
    return {"model_type": "gpt2", **sizes, "activation_function": "gelu", **off}


MODELS = {
    "llama2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "llama2-13b": _llama(5120, 13824, 40, 40, 40, 32000),
    "llama2-34b": _llama(8192, 22016, 48, 64, 8, 32000),
    "llama2-70b": _llama(8192, 28672, 80, 64, 8, 32000),
    "llama3-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama3-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "yi-34b": _llama(7168, 20480, 60, 56, 8, 64000),
    "t5-11b stand-in": _llama(4096, 11776, 48, 32, 32, 32128),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56),
    "mpt-70b": _mpt(8192, 80, 64),
}
COLUMNS = ["source", "GPU", "ranks", "link", "run", "measured s", "compute s", "exposed s", "optimizer s"]
COLUMNS += ["step s", "error", "MFU", "e"]
FITTED_BOARD = "fsdp_qlora, RTX 3090: LoRA 1x512 and 4x2048"
FITTED_SHARE = "fsdp_qlora, RTX 3090: LoRA 4x2048, replicated"
FITTED_CONTENTION = "llm-foundry, A100 80GB: mpt-70b, both rows"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    source: str
    gpu: str
    memory_gb_s: float | None
    links: str
    model: str
    mode: str
    rows: int
    length: int
    micro_batches: int
    recompute: str
    storage: str
    reduce: str
    replicas: int
    shards: int
    per_node: int
    compiled: bool
    cpu_offload: bool
    measured_s: float

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.replicas * self.shards

    @property
    def is_fitted(self) -> bool:
        """Whether a constant was fitted to it."""
        if self.source == "llm-foundry A100 80GB":
            return self.model == "mpt-70b"
        batch = (self.rows, self.length)
        return self.gpu == "RTX 3090" and self.mode == "lora" and batch in ((4, 2048), (1, 512))

    def __str__(self) -> str:
        mode = {"full": "", "lora": ", LoRA", "nf4": ", NF4 + LoRA", "fp8": ", fp8"}[self.mode]
        batch = f"{self.rows}x{self.length}" + f" x{self.micro_batches}" * (self.micro_batches > 1)
        extra = {"none": "", "full": ", recompute", "selective": ", selective"}[self.recompute]
        return f"{self.model}{mode}, {batch}{extra}" + ", compiled" * self.compiled + ", offload" * self.cpu_offload


def read_rows(path: Path) -> list[Row]:
    """Read the measurements."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    rows = []
    for raw in csv.DictReader(lines):
        values: dict[str, Any] = dict(raw)
        for name in ("rows", "length", "micro_batches", "replicas", "shards", "per_node"):
            values[name] = int(values[name])
        step, rate = values.pop("step_s"), values.pop("tokens_per_s_per_gpu")
        tokens = values["rows"] * values["length"] * values["micro_batches"]
        values["measured_s"] = float(step) if step else tokens / float(rate)
        for name in ("compiled", "cpu_offload"):
            values[name] = values[name] == "yes"
        values["memory_gb_s"] = float(values["memory_gb_s"]) if values["memory_gb_s"] else None
        rows.append(Row(**values))
    return rows


@cache
def count_work(row: Row) -> Workload:
    """Return what a rank does: counted by the modules that ``plan`` uses."""
    module, per_node = _build(row), min(row.per_node, row.num_ranks)
    settings = Settings(activation_checkpointing=_recompute(row), mesh=Mesh(replicate=row.replicas))
    dtypes = MixedPrecision(storage_dtype=row.storage, param_dtype="bfloat16", reduce_dtype=row.reduce)  # type: ignore[arg-type]
    cast_parameters(module, dtypes, keep=list_adapter_parameters(module))
    plan = plan_module(module, settings.wrap)
    step = estimate_step(
        ModelToTrain(module=module, units=plan, dtypes=dtypes, optimizer=Optimizer()),
        settings,
        MicroBatch(rows=row.rows, length=row.length),
        ranks=Ranks(num_nodes=row.num_ranks // per_node, per_node=per_node),
        num_micro_batches=row.micro_batches,
    )
    counts = {"num_replicas": row.replicas, "num_micro_batches": row.micro_batches, "num_shards": row.shards}
    return Workload(
        flops=step.flops,
        plan=plan,
        units=estimate_bytes(module, plan, settings.sharding, dtypes, **counts),
        tokens=row.rows * row.length,
        num_micro_batches=row.micro_batches,
        moved_bytes=step.moved_bytes,
        update_bytes=count_update_bytes(plan, Optimizer(), num_shards=row.shards, itemsize=4),
        is_compiled=row.compiled,
        offloaded_bytes=sum(count_shard_bytes(module, unit, row.shards) for unit in plan) if row.cpu_offload else 0,
    )


def _build(row: Row) -> nn.Module:
    with torch.device("meta"):
        config = AutoConfig.for_model(**MODELS[row.model])
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if row.mode == "nf4":
        quantize_model(model, Quantization(type="nf4"))
    if row.mode in ("lora", "nf4"):
        add_adapters(model, LoRA(r=64))
    return model


def _recompute(row: Row) -> ActivationCheckpointing:
    return ActivationCheckpointing(mode=row.recompute)  # type: ignore[arg-type]


def predict(row: Row, board_gb_s: float = 1.0, **changes: Any) -> StepTime:
    """Return the prediction for a measurement."""
    gpu = _find(row.gpu)
    if row.memory_gb_s is not None:
        gpu = replace(gpu, bandwidth_gb_s=row.memory_gb_s)
    board = Interconnect(intra=replace(LINKS["pcie3x4"], name="board", gb_s=board_gb_s))
    machine = Machine(
        gpu=gpu,
        links=board if row.links == "board" else parse_links(row.links),
        num_shards=row.shards,
        num_replicas=row.replicas,
        ranks_per_node=row.per_node,
        **changes,
    )
    return estimate_time(count_work(row), machine)


def _find(name: str) -> Gpu:
    gpu = find_gpu(name)
    assert gpu is not None, name
    return gpu


def solve(error: Callable[[float], float], low: float, high: float) -> float:
    """Return where ``error``, which falls, is 0."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) > 0 else (low, middle)
    return (low + high) / 2


def find_efficiency(row: Row, **options: Any) -> float:
    """Return the share of the peak with which the prediction is what was measured."""
    return solve(lambda e: predict(row, efficiency=e, **options).step_s - row.measured_s, 0.02, 1.1)


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Fit the four constants, each to one or two rows."""
    grid = [row for row in rows if row.gpu == "RTX 3090" and row.is_fitted]
    replicated = next(row for row in grid if row.replicas == 2)
    small, large = (next(r for r in grid if r.shards == 2 and r.length == n) for n in (512, 2048))

    def find_board(contention: float) -> float:
        return solve(lambda b: predict(small, b, contention=contention).step_s - small.measured_s, 0.5, 20)

    through_host = solve(lambda c: large.measured_s - predict(large, find_board(c), contention=c).step_s, low=0, high=1)
    board = find_board(through_host)
    share = find_efficiency(replicated, board_gb_s=board) / get_product_share(_find("RTX 3090"))
    pair = [row for row in rows if row.is_fitted and row.gpu != "RTX 3090"]

    def compare(contention: float) -> float:
        first, second = (find_efficiency(row, contention=contention) for row in pair)
        return first - second

    return {"share": share, "board": board, "through_host": through_host, "contention": solve(compare, 0, 1)}


def write_report(rows: Sequence[Row], fitted: dict[str, float], seconds: float) -> str:
    """Return the results as Markdown."""
    board = round(fitted["board"], 1)
    found = [(row, predict(row, board)) for row in rows if row.mode != "fp8"]
    seconds_all = _time_all(rows, board)
    lines = [
        "# Predicted step times against published ones",
        "",
        f"{datetime.now(UTC):%Y-%m-%d} UTC, torch {torch.__version__}, CPU. {len(found)} measurements, counted in",
        f"{seconds:.0f} s and predicted in {seconds_all:.2f} s.",
        "",
        "Error: predicted over measured step time, minus 1. Negative: predicted too fast.",
        "",
        "## Fitted",
        "",
        "| constant | fitted | used | fitted to |",
        "|---|---|---|---|",
        f"| products in a model, of a large product | {fitted['share']:.3f} | {MODEL_SHARE} | {FITTED_SHARE} |",
        f"| cost of hidden communication | {fitted['contention']:.2f} | {CONTENTION} | {FITTED_CONTENTION} |",
        f"| the same through host memory | {fitted['through_host']:.2f} | {CONTENTION_THROUGH_HOST} | {FITTED_BOARD} |",
        f"| link of that board, GB/s | {fitted['board']:.2f} | {board} | the same two |",
        "",
        "Nothing was fitted to the other measurements, which are called held out; but the form of the model (what",
        "products reach, what else is moved, contention) was chosen with all of them in sight.",
        "",
        "## Errors",
        "",
        *_list_groups([(row, step) for row, step in found if not row.is_fitted], board),
        "",
        "## Scaling",
        "",
        "Throughput of a GPU on more of them, relative to fewer, with the efficiency that makes the smaller run exact.",
        "fp8 runs compute in another dtype; their gathers are taken to be in bfloat16.",
        "",
        *_list_scaling(rows),
        "",
        "## Crossover",
        "",
        *_list_crossovers(),
        "",
        "## All rows",
        "",
        "MFU is predicted, and counts attention as if it were not causal. `e`: the share of the peak that would have",
        "made the prediction exact.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    for row, step in found:
        ranks = f"{row.replicas} x {row.shards}" if row.replicas > 1 else str(row.shards)
        parts = " | ".join(f"{value:.3g}" for value in (step.compute_s, step.exposed_s, step.optimizer_s, step.step_s))
        mark = " (fitted)" if row.is_fitted else ""
        exact = find_efficiency(row, board_gb_s=board)
        lines.append(
            f"| {row.source} | {row.gpu} | {ranks} | {row.links} | {row} | {row.measured_s:.4g} | {parts} | "
            f"{_find_error(row, step):+.0f} %{mark} | {step.mfu_pct:.0f} % | {exact:.2f} |"
        )
    return "\n".join([*lines, ""])


def _find_error(row: Row, step: StepTime) -> float:
    return 100 * (step.step_s / row.measured_s - 1)


def _time_all(rows: Sequence[Row], board: float) -> float:
    begin = time.perf_counter()
    for row in rows:
        predict(row, board)
    return time.perf_counter() - begin


def _list_groups(found: Sequence[tuple[Row, StepTime]], board: float) -> list[str]:
    """Compare the model with its two limits: all communication hidden for nothing, and none hidden."""
    lines = [
        "| held out | rows | median error | mean | worst | if all hides | if nothing hides |",
        "|---|---|---|---|---|---|---|",
    ]
    names = list(dict.fromkeys((row.source, row.gpu) for row, _ in found))
    groups = [
        (f"{source}, {gpu}", [(r, s) for r, s in found if (r.source, r.gpu) == (source, gpu)]) for source, gpu in names
    ]
    for name, group in [*groups, ("all", found)]:
        errors = [_find_error(row, step) for row, step in group]
        sizes = [abs(error) for error in errors]
        cells = [f"{statistics.median(sizes):.0f} %", f"{statistics.mean(errors):+.0f} %", f"{max(sizes):.0f} %"]
        for contention in (0.0, 1.0):
            others = [abs(_find_error(row, predict(row, board, contention=contention))) for row, _ in group]
            cells.append(f"{statistics.median(others):.0f} %")
        lines.append(f"| {name} | {len(group)} | {' | '.join(cells)} |")
    return lines


def _list_scaling(rows: Sequence[Row]) -> list[str]:
    """Compare the fewest and the most ranks of runs that differ in nothing else."""
    lines = ["| run | ranks | measured | predicted |", "|---|---|---|---|"]
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        if row.replicas == 1 and row.links != "board":
            groups.setdefault(replace(row, shards=0, per_node=0, measured_s=0.0), []).append(row)
    for group in groups.values():
        few, *_, many = sorted([*group, group[0]], key=lambda row: row.shards)
        if few.shards == many.shards:
            continue
        step = predict(many, efficiency=find_efficiency(few))
        changes = [100 * (few.measured_s / seconds - 1) for seconds in (many.measured_s, step.step_s)]
        ranks = f"{few.shards} to {many.shards}"
        lines.append(f"| {few.source}: {few} | {ranks} | {changes[0]:+.1f} % | {changes[1]:+.1f} % |")
    t5 = next(row for row in rows if row.gpu == "A100 SXM 80GB")
    t5 = replace(t5, model="t5-11b stand-in", length=512, recompute="full", reduce="bfloat16", per_node=8)
    for num_rows in (8, 16):
        runs = [replace(t5, rows=num_rows, micro_batches=1, shards=n, links="nvlink3,roce200x10") for n in (8, 512)]
        first, last = (predict(row).step_s for row in runs)
        name = f"FSDP paper (arXiv:2304.11277): T5-11B, {num_rows}x512; predicted a decoder of 11 billion"
        lines.append(f"| {name} | 8 to 512 | -7 % | {100 * (first / last - 1):+.1f} % |")
    return lines


def _list_crossovers() -> list[str]:
    lines = ["Tokens of a GPU and gather below which communication cannot hide, see docs/speed_model.md:", ""]
    lines += ["| machine | full, recomputed | LoRA, recomputed | QLoRA, recomputed |", "|---|---|---|---|"]
    for name, tflops, gb_s in (
        ("2 x RTX 3090, old board", 49.6, 2.5),
        ("RTX 4090, PCIe 4 x16", 99, 20),
        ("H100, NVLink", 400, 300),
    ):
        modes = ((8, 8), (4, 6), (2 * (0.5 + 1 / 64), 6))  # bytes of a parameter, and its FLOPs for a token
        cells = [f"{num_bytes / flops * tflops * 1e12 / (gb_s * 1e9):,.0f}" for num_bytes, flops in modes]
        lines.append(f"| {name}: {tflops} TFLOP/s, {gb_s} GB/s | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Count, fit, predict, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    out = parser.parse_args().out
    rows = read_rows(Path(__file__).with_name("published_speed.csv"))
    begin = time.perf_counter()
    for row in rows:
        count_work(row)
    seconds = time.perf_counter() - begin
    report = write_report(rows, fit(rows), seconds)
    print(report)
    if out:
        out.write_text(report)


if __name__ == "__main__":
    main()
