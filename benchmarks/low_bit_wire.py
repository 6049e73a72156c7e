"""What `sharding.gather_bits` and `sharding.reduce_bits` cost in loss and save on a slow link.

    python -m benchmarks.low_bit_wire --out benchmarks/results/low_bit_wire_DATE.md

Losses: two ranks on this machine train a tiny Llama on the bytes of `docs/*.md`, and then adapters for the bytes of
`lit_fsdp/**/*.py` on what the run without these settings has learned. Seeds, rows and order are the same for every
setting. Held-out losses are of the exact weights, on text that no run has seen. What is chance in them, a run with all
bits says whose weights are off by a millionth when it starts.

Seconds: two nodes with two ranks each, as `benchmarks/links.py` has them, and the same model, without an optimizer.
Needs root, ``ip`` and ``tc``; ``--rates ""`` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.multiprocessing.spawn import start_processes

from benchmarks import links
from benchmarks.links import NUM_NODES, NUM_RANKS, RANKS_PER_NODE, ROOT, UNLIMITED, Setting
from benchmarks.network_namespaces import namespaces
from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.profiling.expected_communication import UnitBytes, estimate_bytes
from lit_fsdp.sharding.mesh import Mesh, build_mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import Sharding
from lit_fsdp.sharding.wrap import plan_module

PLAIN, CHANCE, BF16 = "all bits", "all bits, off by 1e-6 at the start", "`reduce_dtype: bfloat16`"
WIRES: dict[str, Sharding] = {
    PLAIN: Sharding(),
    "`reduce_bits: 16`": Sharding(reduce_bits=16),
    "`reduce_bits: 8`": Sharding(reduce_bits=8),
    "`gather_bits: 8`": Sharding(gather_bits=8),
    "`gather_bits: 8`, `reduce_bits: 16`": Sharding(gather_bits=8, reduce_bits=16),
    "`gather_bits: 8`, `reduce_bits: 8`": Sharding(gather_bits=8, reduce_bits=8),
}
SETTINGS = {name: Setting(settings=Settings(sharding=sharding)) for name, sharding in WIRES.items()}
SETTINGS[BF16] = replace(SETTINGS[PLAIN], settings=Settings(mixed_precision=MixedPrecision(reduce_dtype="bfloat16")))
CURVES = {PLAIN: Sharding(), CHANCE: Sharding(), **WIRES}
CURVE_RANKS, WIDTH, LAYERS, LENGTH, ROWS = 2, 64, 3, 64, 8
RATES = {"full": 3e-3, "lora": 3e-3}
TAIL = 20  # the last steps, of which a training loss is the mean


# Losses


def read_text(kind: str) -> Tensor:
    """Return the bytes that a kind of run learns."""
    paths = ROOT.glob("docs/*.md") if kind == "full" else (ROOT / "lit_fsdp").glob("*/*.py")
    return torch.tensor(list(b"".join(path.read_bytes() for path in sorted(paths))), dtype=torch.uint8)


def draw_rows(text: Tensor, num_rows: int, seed: int) -> Tensor:
    """Return rows from anywhere in a text."""
    begins = torch.randint(len(text) - LENGTH, (num_rows,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[i : i + LENGTH] for i in begins.tolist()]).long()


def build(kind: str, seed: int, base: dict[str, Tensor] | None) -> nn.Module:
    """Return the model at its start; adapters begin on ``base``."""
    torch.manual_seed(seed)
    model = links.build_model(WIDTH, LAYERS, length=LENGTH)
    if kind == "lora":
        assert base is not None
        model.load_state_dict(base)
        add_adapters(model, LoRA(r=8, dtype="float32"))
    return model


def train(kind: str, name: str, seed: int, num_steps: int, base: dict[str, Tensor] | None) -> dict[str, Any]:
    """Train on this rank; return the losses of all steps, the held-out loss and the exact weights."""
    model, cpu = build(kind, seed, base), torch.device("cpu")
    if name == CHANCE:
        for parameter in model.parameters():
            parameter.data *= 1 + 1e-6 * torch.randn_like(parameter)
    mesh = build_mesh(Mesh(), device_type="cpu", world_size=CURVE_RANKS, ranks_per_node=CURVE_RANKS)
    shard_module(model, Settings(sharding=CURVES[name]), dtypes=MixedPrecision(), mesh=mesh, device=cpu)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATES[kind])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    text = read_text(kind)
    cut, losses = int(0.9 * len(text)), []
    for step in range(num_steps):
        rows = draw_rows(text[:cut], ROWS, (seed * num_steps + step) * CURVE_RANKS + dist.get_rank())
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        mean = loss.detach() / CURVE_RANKS
        dist.all_reduce(mean)
        losses.append(float(mean))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    held_out = 0.0
    if dist.get_rank() == 0:
        whole = build(kind, seed, base)
        whole.load_state_dict(state)
        rows = draw_rows(text[cut:], 256, 0)
        with torch.no_grad():
            held_out = float(whole(input_ids=rows, labels=rows, use_cache=False).loss)
    weights = [{name: value.clone() for name, value in state.items()}]
    dist.broadcast_object_list(weights, src=0)
    return {"losses": losses, "held_out": held_out, "weights": weights[0]}


def run_curves(rank: int, num_steps: int, seeds: int, folder: Path) -> None:
    """Train everything on one of the ranks; rank 0 writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=CURVE_RANKS)
    found: dict[str, dict[str, list[Any]]] = {kind: {name: [] for name in CURVES} for kind in RATES}
    for seed in range(seeds):
        base = None
        for kind, by_name in found.items():
            results = {name: train(kind, name, seed, num_steps, base) for name in CURVES}
            base = results[PLAIN]["weights"]
            for name, result in results.items():
                del result["weights"]
                by_name[name].append(result)
        if rank == 0:
            print(f"seed {seed} is done", flush=True)
    if rank == 0:
        (folder / "curves.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure_curves(num_steps: int, seeds: int) -> Any:
    """Return the losses of all runs, by kind, setting and seed."""
    with tempfile.TemporaryDirectory() as name:
        start_processes(run_curves, (num_steps, seeds, Path(name)), nprocs=CURVE_RANKS, start_method="spawn")
        return json.loads((Path(name) / "curves.json").read_text())


# Bytes and seconds


def estimate(setting: Setting, model: nn.Module, num_shards: int) -> list[UnitBytes]:
    """Return what the collectives of a step have."""
    plan = plan_module(model, setting.settings.wrap)
    return estimate_bytes(model, plan, setting.settings.sharding, setting.dtypes, num_shards=num_shards)


def count_crossing_bytes(setting: Setting, units: Sequence[UnitBytes]) -> float:
    """Return what a node should send to the other one in a step; see ``links.count_sent_bytes``.

    From all to all, each rank of a node sends a piece to each rank of the other one.
    """
    if setting.settings.sharding.reduce_bits is None:
        return links.count_sent_bytes(setting, units)
    pieces = RANKS_PER_NODE * (NUM_RANKS - RANKS_PER_NODE)
    gathered = (NUM_RANKS - 1) / NUM_RANKS * sum(unit.gather_step for unit in units)
    return gathered + pieces / NUM_RANKS * sum(unit.reduce_scatter_step for unit in units)


def measure_seconds(rates: list[str], rounds: int, width: int, num_layers: int) -> Any:
    """Return the seconds and bytes of all settings at all rates."""
    with namespaces(NUM_NODES) as nodes, tempfile.TemporaryDirectory() as name:
        out = Path(name) / "found.json"
        numbers = [f"--rounds={rounds}", f"--width={width}", f"--layers={num_layers}"]
        links.run_ranks(
            nodes, "-m", "benchmarks.low_bit_wire", f"--rates={','.join(rates)}", *numbers, f"--found={out}"
        )
        return json.loads(out.read_text())


def summarize_seconds(found: Any, width: int, num_layers: int) -> dict[str, Any]:
    """Return medians by rate and setting."""
    summary: dict[str, Any] = {}
    for rate, by_setting in found.items():
        summary[rate] = {}
        for name, setting in SETTINGS.items():
            with torch.device("meta"):
                units = estimate(setting, links.build_model(width, num_layers), NUM_RANKS)
            seconds = by_setting[name]["seconds"]
            summary[rate][name] = {
                "step_s": statistics.median(seconds),
                "low_s": min(seconds),
                "high_s": max(seconds),
                "sent_mb": statistics.median(by_setting[name]["sent"]) / 1e6,
                "expected_mb": count_crossing_bytes(setting, units) / 1e6,
            }
    return summary


# The page


def summarize_curves(curves: Any) -> dict[str, Any]:
    """Return the losses at the end, by kind and setting, with their differences to the run with all bits."""
    summary: dict[str, Any] = {}
    for kind, by_name in curves.items():
        ends = {
            name: [(statistics.fmean(run["losses"][-TAIL:]), run["held_out"]) for run in runs]
            for name, runs in by_name.items()
        }
        summary[kind] = {
            name: {
                "train": [train for train, _ in runs],
                "held_out": [held for _, held in runs],
                "gap": [held - plain for (_, held), (_, plain) in zip(runs, ends[PLAIN], strict=True)],
            }
            for name, runs in ends.items()
        }
    return summary


def make_curve_table(summary: dict[str, Any]) -> list[str]:
    """Return the losses as Markdown; documentation shows the same lines."""
    lines = [
        "| run | setting | training loss | held-out loss | off by, median [range] over seeds | off by, mean size |",
        "|---|---|---|---|---|---|",
    ]
    for kind, by_name in summary.items():
        for name, row in by_name.items():
            train, held = (statistics.fmean(row[key]) for key in ("train", "held_out"))
            gaps, size = row["gap"], statistics.fmean(map(abs, row["gap"]))
            off = f"{statistics.median(gaps):+.4f} [{min(gaps):+.4f}, {max(gaps):+.4f}] | {size:.4f}"
            lines.append(f"| {kind} | {name} | {train:.4f} | {held:.4f} | {off if name != PLAIN else '- | -'} |")
    return lines


def make_link_table(summary: dict[str, Any]) -> list[str]:
    """Return step times and bytes as Markdown; documentation shows the same lines."""
    rates = list(summary)
    names = ["no limit" if rate == UNLIMITED else rate.replace("mbit", " Mbit/s") for rate in rates]
    lines = [f"| setting | MB sent | {' | '.join(names)} |", f"|---|---|{'---|' * len(rates)}"]
    for name in SETTINGS:
        rows = [summary[rate][name] for rate in rates]
        cells = [f"{rows[0]['sent_mb']:.1f}", *(f"{row['step_s']:.2f} s" for row in rows)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def make_sampled_table(curves: Any) -> list[str]:
    """Return the training losses on the way, in the mean over seeds."""
    num_steps = len(curves["full"][PLAIN][0]["losses"])
    steps = [i for i in range(0, num_steps, max(num_steps // 8, 1)) if i + TAIL <= num_steps]
    lines = [f"| run | setting | {' | '.join(f'{i} to {i + TAIL}' for i in steps)} |"]
    lines.append(f"|---|---|{'---|' * len(steps)}")
    for kind, by_name in curves.items():
        for name, runs in by_name.items():
            means = [statistics.fmean(loss for run in runs for loss in run["losses"][i : i + TAIL]) for i in steps]
            lines.append(f"| {kind} | {name} | {' | '.join(f'{mean:.4f}' for mean in means)} |")
    return lines


def make_report(found: dict[str, Any], loads: list[float]) -> list[str]:
    """Return the page."""
    num_steps, seeds = found["num_steps"], found["seeds"]
    loaded = " to ".join(f"{load:.1f}" for load in loads)
    lines = [
        "# Fewer bits on the wire: losses, bytes and seconds",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, gloo, {os.cpu_count()} cores, one thread a rank,",
        f"load average {loaded}. `benchmarks/low_bit_wire.py` says how.",
        "",
        "## Losses",
        "",
        f"{CURVE_RANKS} ranks, a Llama of {LAYERS} layers of width {WIDTH} in float32, {num_steps} steps of",
        f"{CURVE_RANKS * ROWS} rows of {LENGTH} bytes, {seeds} seeds. Training losses are means of the last {TAIL}",
        "steps, computed with what was gathered; held-out losses are those of the exact weights. Both are means over",
        "seeds.",
        "",
        *make_curve_table(found["curves"]),
        "",
        "Training losses on the way, each the mean of some steps and of all seeds:",
        "",
        *make_sampled_table(found["losses"]),
        "",
    ]
    if links_found := found.get("links"):
        sent = [abs(r["sent_mb"] / r["expected_mb"] - 1) for rows in links_found.values() for r in rows.values()]
        lines += [
            "## Seconds",
            "",
            f"{NUM_NODES} nodes (network namespaces) with {RANKS_PER_NODE} ranks each, the model of",
            f"`benchmarks/links.py`, medians of {found['rounds']} interleaved rounds. MB are what a node sends in a",
            f"step; they differ from the closed form by {100 * max(sent):.1f} % at most.",
            "",
            *make_link_table(links_found),
            "",
            "| rate | setting | lowest | highest |",
            "|---|---|---|---|",
        ]
        for rate, rows in links_found.items():
            lines += [f"| {rate} | {n} | {row['low_s']:.2f} s | {row['high_s']:.2f} s |" for n, row in rows.items()]
        lines.append("")
    return lines


def main() -> None:
    """Train, measure, print, and write the page and its numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default=f"{UNLIMITED},200mbit,50mbit", help="of the link, as tc writes them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=256, help="of the model on the link")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--out", type=Path, help="Markdown file to write; its numbers go into a .json beside it")
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)  # as one of the ranks on the link
    args = parser.parse_args()
    rates = [rate for rate in args.rates.split(",") if rate]
    if args.found is not None:
        links.run_rank(rates, args.rounds, args.width, args.layers, args.found, SETTINGS)
        return
    before = os.getloadavg()[0]
    found: dict[str, Any] = {"num_steps": args.steps, "seeds": args.seeds, "rounds": args.rounds}
    if rates:
        seconds = measure_seconds(rates, args.rounds, args.width, args.layers)
        found["links"] = summarize_seconds(seconds, args.width, args.layers)
        print("\n".join(make_link_table(found["links"])), flush=True)
    found["losses"] = measure_curves(args.steps, args.seeds)
    found["curves"] = summarize_curves(found["losses"])
    report = "\n".join(make_report(found, [before, os.getloadavg()[0]]))
    print(report)
    if args.out:
        args.out.write_text(report)
        args.out.with_suffix(".json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
