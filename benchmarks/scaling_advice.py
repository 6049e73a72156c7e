"""Whether ``bench scaling --link`` recommends what is fastest: predicted and measured on links of several rates.

    python -m benchmarks.scaling_advice --rounds 5 --out benchmarks/results/scaling_advice_DATE.md

Two nodes with two ranks each are network namespaces on this machine (root, ``ip`` and ``tc``), over gloo, as in
`benchmarks/links.py`. A case is a job at a rate. For each the planner gets ``comm.json`` inside a node and between
nodes at that rate, and the seconds that forward, backward and optimizer take a rank that sends nothing. It lists the
layouts and recommends two: the fastest that keeps all bits, and the fastest of all. Then every layout is measured. One
card is a rank that sends nothing.

Cards: four ranks share few cores, so what a card computes is mostly waited for, `Job.card_s` for each micro-batch,
beside a small model that really computes and sends. What the planner gets of it is measured, not that number.

A round is one step of each layout and one step alone at each rate, so whatever else the machine does meets all of
them. Times are the lowest of all rounds: what else runs only ever adds to them. A step is forward and backward of its
micro-batches, and AdamW. Cases run beside each other, each on links of its own. Ranks are forked, and enter the
namespace of their node.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.links import NUM_NODES, NUM_RANKS, PORT, RANKS_PER_NODE, UNLIMITED, limit_rate
from benchmarks.network_namespaces import INTERFACE, Node, namespaces
from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.cli.bench import measure_links
from lit_fsdp.cli.layouts import LayoutPlan
from lit_fsdp.optim.factory import Optimizer, build_optimizer
from lit_fsdp.planning.layouts import Layout, choose_layout
from lit_fsdp.planning.search.search import format_changes
from lit_fsdp.planning.timing.hardware import parse_memory
from lit_fsdp.sharding.mesh import Mesh, build_mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import no_sync

SIZES, SIZES_INSIDE = "64KiB,256KiB,1MiB", "256KiB,2MiB,16MiB"
BURST = "16kb"  # of a limited link: what passes at once after a pause would make small messages look fast
TRIES, OFF_PCT = 2, 60.0  # of ``bench comm``: again while a line is off by more, as its user would
NEAR = 1.05  # what is chosen may take so much longer than the best
SHAPE = {"vocab_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
ALONE = "alone"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained.

    Args:
        card_s: Seconds that a card takes for a micro-batch, besides those of the model that computes.
        width: Of the model.
        length: Tokens of the row of a micro-batch.
        num_micro_batches: Accumulated in a step.
        rank: Of adapters; 0 trains all weights.
        is_tight: Whether a card has too little memory for a whole copy.
    """

    card_s: float
    width: int = 96
    length: int = 64
    num_micro_batches: int = 1
    rank: int = 0
    is_tight: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """Of the model."""
        sizes = {"hidden_size": self.width, "intermediate_size": 3 * self.width}
        return {**SHAPE, **sizes, "max_position_embeddings": self.length}


JOBS = {
    "long rows": Job(card_s=5.0),
    "short rows": Job(card_s=1.0),
    "4 micro-batches": Job(card_s=0.6, num_micro_batches=4),
    "LoRA": Job(card_s=2.0, width=128, rank=8),
    "no room for a copy": Job(card_s=3.0, is_tight=True),
}


# The planner


def write_config(job: Job, path: Path) -> None:
    """Write a job as a configuration of a run."""
    model: dict[str, Any] = {"config": {"model_type": "llama", **job.config}}
    if job.rank:
        model["lora"] = {"r": job.rank, "dtype": "float32"}
    data = {"train": "pydoc", "tokenizer": {"vocab_size": 320}, "seq_length": job.length, "batch_size": 1}
    trainer = {"accelerator": "cpu", "num_nodes": NUM_NODES, "accumulate_grad_batches": job.num_micro_batches}
    run = {
        "trainer": trainer,
        "model": {"class_path": "lit_fsdp.tasks.CausalLM", "init_args": model},
        "data": {"class_path": "lit_fsdp.tasks.TextData", "init_args": data},
    }
    path.write_text(yaml.safe_dump(run))


def write_report(path: Path, compute_s: float, optimizer_s: float) -> Path:
    """Write what a run on one card would report of its speed."""
    parts = {"forward_s": compute_s, "backward_s": 0.0, "optimizer_s": optimizer_s, "data_s": 0.0, "other_s": 0.0}
    path.write_text(json.dumps({"sections": {"speed": {"numbers": {"ranks": 1, **parts}}}}))
    return path


def predict(job: Job, config: Path, link: str, report: Path) -> list[Layout]:
    """Return all layouts of a job, as the command does."""
    plan = LayoutPlan([str(config)], [], per_node=RANKS_PER_NODE, link=link)
    layouts = plan.compare(report, None)
    # Of so small a model, memory outside of tensors is most of what a card needs: no limit would leave out copies only.
    return [replace(layout, fits="shards" in layout.name) for layout in layouts] if job.is_tight else layouts


def name_layout(layout: Layout) -> str:
    """Return a name that tells a layout from all others."""
    return f"{layout.name}: {format_changes(layout.trial.changes)}"


# One of the ranks


def build_model(job: Job) -> nn.Module:
    """Return the model on the CPU, the same on all ranks."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **job.config))
    if job.rank:
        add_adapters(model, LoRA(r=job.rank, dtype="float32"))
    return model


def measure_step(
    model: nn.Module, job: Job, settings: Settings | None, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> tuple[float, float]:
    """Return the seconds of forward and backward, and of the optimizer, of the slowest rank."""
    dist.barrier()
    marks = [time.perf_counter()]
    for i in range(job.num_micro_batches):
        is_held = settings is not None and settings.sharding.no_sync and i + 1 < job.num_micro_batches
        with no_sync(model) if is_held else nullcontext():  # type: ignore[arg-type]
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss / job.num_micro_batches
            time.sleep(job.card_s)
            loss.backward()
    marks.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    marks.append(time.perf_counter())
    seconds = torch.tensor([marks[1] - marks[0], marks[2] - marks[1]], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds[0]), float(seconds[1])


def run_rank(job: Job, by_rate: dict[str, dict[str, Settings]], rounds: int, out: Path) -> None:
    """Measure the layouts of a job at all rates, round by round; rank 0 writes what it found."""
    dist.init_process_group("gloo")
    everything = {name: settings for by_name in by_rate.values() for name, settings in by_name.items()}
    meshes: dict[Mesh, DeviceMesh] = {}
    models: dict[str, tuple[nn.Module, Settings | None, torch.optim.Optimizer]] = {}
    for name, settings in {ALONE: None, **everything}.items():
        model = build_model(job)
        if settings is not None:
            sizes = {"world_size": NUM_RANKS, "ranks_per_node": RANKS_PER_NODE}
            if settings.mesh not in meshes:
                meshes[settings.mesh] = build_mesh(settings.mesh, device_type="cpu", **sizes)
            mesh = meshes[settings.mesh]
            shard_module(model, settings, dtypes=MixedPrecision(), mesh=mesh, device=torch.device("cpu"))
        models[name] = (model, settings, build_optimizer(model.parameters(), Optimizer()))
    batch = torch.randint(SHAPE["vocab_size"], (1, job.length))
    found: dict[str, dict[str, list[tuple[float, float]]]] = {
        rate: {name: [] for name in (ALONE, *by_name)} for rate, by_name in by_rate.items()
    }
    unlimited = {UNLIMITED: {name: [] for name in models}}
    for turn in range(rounds + 1):  # the first one makes connections
        for rate, by_name in (found if turn else unlimited).items():
            dist.barrier()
            if dist.get_rank() % RANKS_PER_NODE == 0:
                limit_rate(rate, burst=BURST)
            for name, seconds in by_name.items():
                model, settings, optimizer = models[name]
                took = measure_step(model, replace(job, card_s=job.card_s * (turn > 0)), settings, optimizer, batch)
                if turn:
                    seconds.append(took)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


# The ranks as a whole


def fork_all(runs: Sequence[Callable[[], Any]]) -> None:
    """Run functions beside each other, each in a process of its own."""
    processes = [get_context("fork").Process(target=run) for run in runs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if codes := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"processes ended with {codes}")


def fork_ranks(nodes: Sequence[Node], run: Callable[[], None]) -> None:
    """Run a function on all ranks of some nodes."""
    fork_all([partial(_enter, nodes, rank, run) for rank in range(RANKS_PER_NODE * len(nodes))])


def _enter(nodes: Sequence[Node], rank: int, run: Callable[[], None]) -> None:
    node, local = divmod(rank, RANKS_PER_NODE)
    with Path(f"/var/run/netns/{nodes[node].name}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {nodes[node].name}")
    numbers = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": RANKS_PER_NODE * len(nodes)}
    os.environ.update({name: str(number) for name, number in numbers.items()}, LOCAL_WORLD_SIZE=str(RANKS_PER_NODE))
    os.environ.update(MASTER_ADDR=nodes[0].address, MASTER_PORT=PORT, GLOO_SOCKET_IFNAME=INTERFACE)
    torch.set_num_threads(1)
    run()


def measure_all_links(rates: Sequence[str], folder: Path) -> dict[str, str]:
    """Return what ``--link`` is at each rate: files of ``bench comm`` inside a node and between nodes."""
    fork_all([partial(_measure_well, name, folder / name) for name in ("inside", *rates)])
    return {rate: f"{folder / 'inside' / 'comm.json'},{folder / rate / 'comm.json'}" for rate in rates}


def _measure_well(name: str, out: Path) -> None:
    out.mkdir()
    for _ in range(TRIES):
        _measure_one(name, out)
        lines = json.loads((out / "comm.json").read_text())["collectives"].values()
        if all(line["alpha_s"] is not None and line["worst_pct"] <= OFF_PCT for line in lines):
            break


def _measure_one(name: str, out: Path) -> None:
    sizes = [parse_memory(size) for size in (SIZES_INSIDE if name == "inside" else SIZES).split(",")]
    with namespaces(1 if name == "inside" else NUM_NODES) as nodes:
        for node in nodes:
            limit_rate(UNLIMITED if name == "inside" else name, "-n", node.name, burst=BURST)
        fork_ranks(nodes, partial(measure_links, sizes, "gloo", 3, out, 300.0))


def try_job(name: str, links: dict[str, str], rounds: int, folder: Path) -> None:
    """Write for each rate what was predicted and measured of a job, as ``cases.json``."""
    folder.mkdir()
    job, config = JOBS[name], folder / "run.yaml"
    write_config(job, config)
    # Which layouts are listed does not depend on the speed of compute, which goes for all of them.
    listed = {rate: predict(job, config, link, write_report(folder / "r", 1.0, 1.0)) for rate, link in links.items()}
    by_rate = {
        rate: {name_layout(layout): layout.trial.settings for layout in layouts if layout.trial.ranks.world_size > 1}
        for rate, layouts in listed.items()
    }
    out = folder / "found.json"
    with namespaces(NUM_NODES) as nodes:
        fork_ranks(nodes, lambda: run_rank(job, by_rate, rounds, out))
    found = json.loads(out.read_text())
    cases = []
    for rate, link in links.items():
        alone = [min(column) for column in zip(*found[rate][ALONE], strict=True)]
        layouts = predict(job, config, link, write_report(folder / "r", alone[0], alone[1]))
        rows = []
        for layout in layouts:
            is_one = layout.trial.ranks.world_size == 1
            steps = [sum(step) for step in found[rate][ALONE if is_one else name_layout(layout)]]
            rows.append(
                {
                    "layout": layout.name,
                    "changes": format_changes(layout.trial.changes),
                    "num_ranks": layout.trial.ranks.world_size,
                    "rounds": layout.rounds,
                    "fits": layout.fits,
                    "needed_bytes": layout.trial.needed_bytes,
                    "planned_s": layout.time.step_s,
                    "step_s": min(steps),
                    "median_s": statistics.median(steps),
                    "high_s": max(steps),
                }
            )
        cases.append(
            {
                "job": name,
                "rate": rate,
                "compute_s": alone[0],
                "optimizer_s": alone[1],
                "layouts": rows,
            }
        )
        print("\n".join(make_case_row(cases[-1], k) for k in (0, 1)), flush=True)
    (folder / "cases.json").write_text(json.dumps(cases))


# The page


def count_speed(row: dict[str, Any]) -> float:
    """Return the rows that all cards of a layout train in a second."""
    return float(row["num_ranks"] / row["step_s"])


def choose(rows: list[dict[str, Any]], k: int) -> dict[str, Any]:
    """Return the row of the layout that is recommended; see ``judge``."""
    layouts: list[Any] = [
        SimpleNamespace(
            name=row["layout"],
            fits=row["fits"],
            rounds=row["rounds"],
            time=SimpleNamespace(tokens_per_s=row["num_ranks"] / row["planned_s"]),
        )
        for row in rows
    ]
    chosen = choose_layout(layouts, rounds=k > 0)
    return next(row for row, layout in zip(rows, layouts, strict=True) if layout is chosen)


def judge(case: dict[str, Any], k: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Return what is recommended, what was measured to be best, and how much slower the first is.

    ``k`` is 0 among layouts that keep all bits, 1 among all.
    """
    rows = [row for row in case["layouts"] if row["fits"] and (k or not row["rounds"])]
    chosen, best = choose(case["layouts"], k), max(rows, key=count_speed)
    return chosen, best, count_speed(best) / count_speed(chosen)


def describe(row: dict[str, Any]) -> str:
    """Return a layout in words."""
    changes = row["changes"].replace("sharding.", "").replace("reshard_after_forward", "reshard")
    kept = [part for part in changes.split(", ") if not part.startswith("mesh.") and part != "as configured"]
    return ", ".join([row["layout"], *(f"`{part}`" for part in kept)])


def make_case_row(case: dict[str, Any], k: int) -> str:
    """Return one line of the table of recommendations."""
    chosen, best, slower = judge(case, k)
    alone = case["layouts"][0]
    cells = [case["job"], case["rate"].replace("bit", " bit/s"), describe(chosen), describe(best)]
    cells += [f"{count_speed(chosen) / count_speed(alone):.2f}", f"{count_speed(best) / count_speed(alone):.2f}"]
    planned = chosen["num_ranks"] / chosen["planned_s"] * alone["planned_s"]
    cells += [f"{planned:.2f}", f"{100 * (slower - 1):.0f} %"]
    return f"| {' | '.join(cells)} |"


def make_table(cases: Sequence[dict[str, Any]], k: int) -> list[str]:
    """Return what was recommended beside what is best."""
    head = ["job", "rate", "recommended", "best as measured", "speed-up of the first", "of the best"]
    head += ["predicted of the first", "slower by"]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(make_case_row(case, k) for case in cases)]


def count_right(cases: Sequence[dict[str, Any]], k: int) -> int:
    """Return in how many cases the recommended layout is the best one, or within 5 % of it."""
    return sum(judge(case, k)[2] <= NEAR for case in cases)


def make_all_rows(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Return every layout of every case."""
    lines = ["| job | rate | layout | planned | lowest | median | highest | off by |", f"|{'---|' * 8}"]
    for case in cases:
        for row in case["layouts"]:
            cells = [case["job"], case["rate"], describe(row) + ("" if row["fits"] else " (does not fit)")]
            cells += [f"{row[key]:.3f} s" for key in ("planned_s", "step_s", "median_s", "high_s")]
            cells.append(f"{100 * (row['planned_s'] / row['step_s'] - 1):+.0f} %")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def make_report(cases: Sequence[dict[str, Any]], rounds: int, beside: int, loads: Sequence[float]) -> str:
    """Return the page."""
    loaded = " to ".join(f"{load:.1f}" for load in loads)
    jobs = [
        f"- {name}: a micro-batch takes a card {job.card_s} s; width {job.width}"
        + f", {job.num_micro_batches} micro-batches" * (job.num_micro_batches > 1)
        + f", adapters of rank {job.rank}" * (job.rank > 0)
        for name, job in JOBS.items()
    ]
    return "\n".join(
        [
            "# Will more cards help: recommended and measured",
            "",
            f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, gloo, {os.cpu_count()} cores, one thread a",
            f"rank, {beside} cases at a time, load average {loaded}. {NUM_NODES} nodes (network namespaces) with",
            f"{RANKS_PER_NODE} ranks each;",
            f"Llamas of {SHAPE['num_hidden_layers']} layers in float32, one row a micro-batch, the lowest of {rounds}",
            "interleaved rounds. `benchmarks/scaling_advice.py` says how. Jobs:",
            "",
            *jobs,
            "",
            f"The recommended layout is the best one or within 5 % of it in {count_right(cases, 0)} of {len(cases)}",
            f"cases among those that keep all bits, and in {count_right(cases, 1)} of {len(cases)} among all. Speed-up",
            "is in rows a second, over one card.",
            "",
            "## All bits",
            "",
            *make_table(cases, 0),
            "",
            "## Fewer bits allowed",
            "",
            *make_table(cases, 1),
            "",
            "## All layouts",
            "",
            *make_all_rows(cases),
            "",
        ]
    )


def main() -> None:
    """Measure, predict, print, and write the page and its numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="24mbit,12mbit,6mbit,3mbit", help="of the link, as tc writes them")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--beside", type=int, default=4, help="cases at a time; ranks of many wait for cores")
    parser.add_argument("--out", type=Path, help="Markdown file to write; its numbers go into a .json beside it")
    args = parser.parse_args()
    before = os.getloadavg()[0]
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, jobs = Path(name), args.jobs.split(",")
        links = measure_all_links(args.rates.split(","), folder)
        places = {(job, rate): folder / f"{job} at {rate}" for job in jobs for rate in links}
        tries = [partial(try_job, job, {r: links[r]}, args.rounds, place) for (job, r), place in places.items()]
        for i in range(0, len(tries), args.beside):
            fork_all(tries[i : i + args.beside])
        for place in places.values():
            cases += json.loads((place / "cases.json").read_text())
    report = make_report(cases, args.rounds, args.beside, [before, os.getloadavg()[0]])
    print(report)
    if args.out:
        args.out.write_text(report)
        args.out.with_suffix(".json").write_text(json.dumps({"rounds": args.rounds, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
