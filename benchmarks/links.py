"""What slow links between nodes cost, and which settings help: step time, bytes, and what the planner says.

    python -m benchmarks.links --rates none,1gbit,200mbit,50mbit --rounds 7 --out benchmarks/results/links_DATE.md

Two nodes with two ranks each are network namespaces on this machine (root, ``ip`` and ``tc``), computing on the CPU
over gloo. All settings run in one set of processes: a round is one step of each setting at each rate, so whatever else
the machine does meets all of them. A step is forward and backward, without an optimizer.

Bytes are those that the network interface of a node has sent, in the mean of both nodes. Gloo's reduce-scatter sends
what an all-reduce does, twice what NCCL sends. Predicted seconds are those of ``planning/timing`` for the collectives,
with lines of ``bench comm`` inside a node and between the nodes at that rate, and the compute of a step without any.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.network_namespaces import INTERFACE, Node, namespaces
from lit_fsdp.planning.timing.hardware import GPUS
from lit_fsdp.planning.timing.links import parse_links
from lit_fsdp.planning.timing.step_time import Machine, Workload, estimate_time
from lit_fsdp.profiling.expected_communication import UnitBytes, estimate_bytes
from lit_fsdp.profiling.flops import Flops
from lit_fsdp.sharding.mesh import Mesh, build_mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision, cast_parameters
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import Sharding, no_sync, reshard
from lit_fsdp.sharding.wrap import Unit, plan_module

ROOT = Path(__file__).parent.parent
NUM_NODES, RANKS_PER_NODE = 2, 2
NUM_RANKS = NUM_NODES * RANKS_PER_NODE
UNLIMITED = "none"
PORT = "29500"  # of namespaces that nobody else is in
ALONE = "compute alone"
SIZES = "64KiB,256KiB,1MiB,4MiB"
ROWS, LENGTH, VOCABULARY = 1, 32, 256


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is compared: settings of the strategy, and how many micro-batches a step has."""

    settings: Settings = field(default_factory=Settings)
    num_micro_batches: int = 1

    @property
    def dtypes(self) -> MixedPrecision:
        """That the model is sharded with."""
        return self.settings.mixed_precision or MixedPrecision()

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.settings.mesh.replicate


SETTINGS = {
    "full shard": Setting(),
    "`reshard_after_forward: false`": Setting(settings=Settings(sharding=Sharding(reshard_after_forward=False))),
    "hybrid, `mesh.replicate: 2`": Setting(settings=Settings(mesh=Mesh(replicate=NUM_NODES))),
    "`reduce_dtype: bfloat16`": Setting(settings=Settings(mixed_precision=MixedPrecision(reduce_dtype="bfloat16"))),
    "`param_dtype` too": Setting(
        settings=Settings(mixed_precision=MixedPrecision(param_dtype="bfloat16", reduce_dtype="bfloat16"))
    ),
    "4 micro-batches": Setting(num_micro_batches=4),
    "4 micro-batches, `no_sync`": Setting(settings=Settings(sharding=Sharding(no_sync=True)), num_micro_batches=4),
    "the same, `reshard_after_backward: false`": Setting(
        settings=Settings(sharding=Sharding(reshard_after_forward=False, reshard_after_backward=False, no_sync=True)),
        num_micro_batches=4,
    ),
}


def build_model(width: int, num_layers: int, *, length: int = LENGTH) -> nn.Module:
    """Return the model, on the device that is set."""
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": length}
    model: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", vocab_size=VOCABULARY, **shape, **heads)
    )
    return model


# What should be: bytes and seconds


def plan_setting(setting: Setting, width: int, num_layers: int) -> tuple[list[Unit], list[UnitBytes]]:
    """Return the units of a setting, and what their collectives have in a step."""
    with torch.device("meta"):
        model = build_model(width, num_layers)
    cast_parameters(model, setting.dtypes)
    plan = plan_module(model, setting.settings.wrap)
    units = estimate_bytes(
        model,
        plan,
        setting.settings.sharding,
        setting.dtypes,
        num_shards=NUM_RANKS // setting.num_replicas,
        num_replicas=setting.num_replicas,
        num_micro_batches=setting.num_micro_batches,
    )
    return plan, units


def count_sent_bytes(setting: Setting, units: Sequence[UnitBytes]) -> float:
    """Return what a node should send to the other one in a step.

    Rings pass a node once, so what a rank sends to its neighbour in a collective crosses once. Between replicas, every
    rank of a node has a ring of its own, and shards stay inside.
    """
    if setting.num_replicas > 1:
        return RANKS_PER_NODE * sum(unit.all_reduce_step for unit in units)
    share = (NUM_RANKS - 1) / NUM_RANKS
    return share * sum(unit.gather_step + 2 * unit.reduce_scatter_step for unit in units)


def predict_communication(setting: Setting, plan: list[Unit], units: list[UnitBytes], links: str) -> float:
    """Return the seconds that the planner says the collectives of a step take."""
    n = setting.num_micro_batches
    work = Workload(flops=Flops(), plan=plan, units=units, tokens=1, moved_bytes=0, num_micro_batches=n)
    machine = Machine(
        gpu=GPUS[0],
        links=parse_links(links),
        num_shards=NUM_RANKS // setting.num_replicas,
        num_replicas=setting.num_replicas,
        ranks_per_node=RANKS_PER_NODE,
    )
    return estimate_time(work, machine).communication_s


def correlate_ranks(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's correlation of two rankings without ties."""
    order = np.array([np.argsort(np.argsort(values)) for values in (first, second)])
    return float(np.corrcoef(order)[0, 1])


# What is: one of the ranks


def limit_rate(rate: str, *where: str, burst: str = "256kb") -> None:
    """Let an interface send this much, in the namespace of this process or in another (``-n``, its name).

    ``burst`` may pass at once after a pause. It has to be what the rate sends in 4 ms, at least.
    """
    subprocess.run(["tc", *where, "qdisc", "del", "dev", INTERFACE, "root"], check=False, capture_output=True)
    if rate != UNLIMITED:
        limit = ["root", "tbf", "rate", rate, "burst", burst, "latency", "400ms"]
        subprocess.run(["tc", *where, "qdisc", "add", "dev", INTERFACE, *limit], check=True)


def read_sent_bytes() -> int:
    """Return what the interface of this namespace has sent so far."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if f"{INTERFACE}:" in line)
    return int(line.partition(":")[2].split()[8])


def run_step(model: nn.Module, setting: Setting, batch: torch.Tensor) -> None:
    """Run forward and backward of all micro-batches."""
    for i in range(setting.num_micro_batches):
        is_held = setting.settings.sharding.no_sync and i + 1 < setting.num_micro_batches
        with no_sync(model) if is_held else nullcontext():  # type: ignore[arg-type]
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    reshard(model)
    model.zero_grad()


def measure_step(model: nn.Module, setting: Setting, batch: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of a step on the slowest rank, and the bytes that a node sends, in the mean."""
    dist.barrier()
    sent, begin = read_sent_bytes(), time.perf_counter()
    run_step(model, setting, batch)
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.barrier()  # behind all else in the queue of the link
    sent_now = torch.tensor(read_sent_bytes() - sent, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(sent_now)
    return float(seconds), float(sent_now) / NUM_RANKS


def run_rank(
    rates: list[str], rounds: int, width: int, num_layers: int, out: Path, settings: Mapping[str, Setting] = SETTINGS
) -> None:
    """Measure all settings at all rates, round by round; rank 0 writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    models, cpu = {ALONE: build_model(width, num_layers)}, torch.device("cpu")
    for name, setting in settings.items():
        models[name] = build_model(width, num_layers)
        mesh = build_mesh(setting.settings.mesh, device_type="cpu", world_size=NUM_RANKS, ranks_per_node=RANKS_PER_NODE)
        shard_module(models[name], setting.settings, dtypes=setting.dtypes, mesh=mesh, device=cpu)
    batch = torch.randint(VOCABULARY, (ROWS, LENGTH))
    found: dict[str, dict[str, dict[str, list[float]]]] = {
        rate: {name: {"seconds": [], "sent": []} for name in models} for rate in rates
    }
    for turn in range(rounds + 1):  # the first one makes connections
        for rate in rates if turn else [UNLIMITED]:
            dist.barrier()
            if rank % RANKS_PER_NODE == 0:
                limit_rate(rate)
            for name, model in models.items():
                seconds, sent = measure_step(model, settings.get(name, Setting()), batch)
                if turn:
                    found[rate][name]["seconds"].append(seconds)
                    found[rate][name]["sent"].append(sent)
            if rank == 0:
                print(f"round {turn}, {rate}", flush=True)
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


# The ranks as a whole


@contextmanager
def start_ranks(nodes: Sequence[Node], *command: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a Python command on all ranks of some nodes, and kill what is left in the end."""
    world_size, ranks = RANKS_PER_NODE * len(nodes), []
    try:
        for rank in range(world_size):
            group, local = divmod(rank, RANKS_PER_NODE)
            numbers = {"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": group, "WORLD_SIZE": world_size}
            numbers |= {"LOCAL_WORLD_SIZE": RANKS_PER_NODE, "OMP_NUM_THREADS": 1}
            variables = {name: str(number) for name, number in numbers.items()}
            variables |= {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": INTERFACE}
            wrapped = nodes[group].wrap([sys.executable, *command])
            ranks.append(subprocess.Popen(wrapped, cwd=ROOT, env={**os.environ, **variables}))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def run_ranks(nodes: Sequence[Node], *command: str) -> None:
    """Run a Python command on all ranks of some nodes."""
    with start_ranks(nodes, *command) as ranks:
        codes = [process.wait() for process in ranks]
    if any(codes):
        raise RuntimeError(f"{' '.join(command)} ended with {codes}")


def measure(rates: list[str], rounds: int, width: int, num_layers: int, folder: Path, *, is_planned: bool) -> Any:
    """Return what all settings took at all rates, and leave a ``comm.json`` of each rate in ``folder``."""
    with namespaces(NUM_NODES) as nodes:
        if is_planned:
            comm = ["-m", "lit_fsdp", "bench", "comm", "--backend=gloo", f"--sizes={SIZES}", "--repeats=3"]
            run_ranks(nodes[:1], *comm, f"--out={folder / 'inside'}")
            for rate in rates:
                for node in nodes:
                    limit_rate(rate, "-n", node.name)
                run_ranks(nodes, *comm, f"--out={folder / rate}")
        out = folder / "found.json"
        numbers = [f"--rounds={rounds}", f"--width={width}", f"--layers={num_layers}"]
        run_ranks(nodes, "-m", "benchmarks.links", f"--rates={','.join(rates)}", *numbers, f"--found={out}")
        return json.loads(out.read_text())


def summarize(found: Any, width: int, num_layers: int, folder: Path) -> dict[str, Any]:
    """Return the medians by rate and setting, with what should have been sent and what the planner says."""
    summary: dict[str, Any] = {}
    for rate, by_setting in found.items():
        alone_s = statistics.median(by_setting[ALONE]["seconds"])
        summary[rate] = {"compute_s": alone_s, "settings": {}}
        for name, setting in SETTINGS.items():
            seconds = by_setting[name]["seconds"]
            plan, units = plan_setting(setting, width, num_layers)
            planned_s = predict_communication(
                setting, plan, units, f"{folder / 'inside' / 'comm.json'},{folder / rate / 'comm.json'}"
            )
            summary[rate]["settings"][name] = {
                "step_s": statistics.median(seconds),
                "low_s": min(seconds),
                "high_s": max(seconds),
                "sent_mb": statistics.median(by_setting[name]["sent"]) / 1e6,
                "expected_mb": count_sent_bytes(setting, units) / 1e6,
                "planned_s": planned_s + setting.num_micro_batches * alone_s,
            }
    return summary


def make_table(summary: dict[str, Any]) -> list[str]:
    """Return step times and bytes as Markdown; documentation shows the same lines."""
    rates = list(summary)
    names = ["no limit" if rate == UNLIMITED else rate.replace("bit", " bit") for rate in rates]
    names = [name.replace("g bit", " Gbit/s").replace("m bit", " Mbit/s") for name in names]
    lines = [f"| setting | MB sent | {' | '.join(names)} |", f"|---|{'---|' * (len(rates) + 1)}"]
    for name in SETTINGS:
        rows = [summary[rate]["settings"][name] for rate in rates]
        cells = [f"{rows[0]['sent_mb']:.1f}", *(f"{row['step_s']:.2f} s" for row in rows)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def make_plan_table(summary: dict[str, Any]) -> list[str]:
    """Return what the planner says of each rate beside what was measured."""
    lines = ["| rate | setting | step | lowest | highest | planned | off by |", "|---|---|---|---|---|---|---|"]
    for rate, found in summary.items():
        for name, row in found["settings"].items():
            cells = [f"{row[key]:.3f} s" for key in ("step_s", "low_s", "high_s", "planned_s")]
            cells.append(f"{100 * (row['planned_s'] / row['step_s'] - 1):+.0f} %")
            lines.append(f"| {rate} | {name} | {' | '.join(cells)} |")
    lines += ["", "| rate | Spearman | fastest of one micro-batch | planned | `no_sync` saves | planned |"]
    lines += ["|---|---|---|---|---|---|"]
    for rate, found in summary.items():
        rows = found["settings"]
        pair = [[row[key] for row in rows.values()] for key in ("step_s", "planned_s")]
        single = [name for name in rows if SETTINGS[name].num_micro_batches == 1]
        best = [min(single, key=lambda name, key=key: rows[name][key]) for key in ("step_s", "planned_s")]  # type: ignore[misc]
        summed, held, *_ = (rows[name] for name in rows if name not in single)
        saved = [f"{100 * (1 - held[key] / summed[key]):.0f} %" for key in ("step_s", "planned_s")]
        cells = [f"{correlate_ranks(*pair):.2f}", *best, *saved]
        lines.append(f"| {rate} | {' | '.join(cells)} |")
    return lines


def make_report(summary: dict[str, Any], rounds: int, loads: list[float], num_params: int) -> list[str]:
    """Return the page."""
    loaded = " to ".join(f"{load:.1f}" for load in loads)
    sent = [
        abs(row["sent_mb"] / row["expected_mb"] - 1) for found in summary.values() for row in found["settings"].values()
    ]
    return [
        "# Slow links: settings, bytes and seconds",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, gloo, {os.cpu_count()} cores, one thread a rank,",
        f"load average {loaded}. {NUM_NODES} nodes (network namespaces) with {RANKS_PER_NODE} ranks each,",
        f"a Llama of {num_params / 1e6:.2f} M parameters in float32 ({4 * num_params / 1e6:.1f} MB), {ROWS} row of",
        f"{LENGTH} tokens a micro-batch. Medians of {rounds} interleaved rounds; `benchmarks/links.py` says how.",
        "",
        *make_table(summary),
        "",
        f"MB are what a node sends in a step; they differ from the closed form by {100 * max(sent):.1f} % at most.",
        "",
        "## The planner",
        "",
        "Planned is the compute of a step without any communication, plus what `planning/timing` says of its",
        "collectives with lines of `bench comm` at that rate.",
        "",
        *make_plan_table(summary),
        "",
    ]


def main() -> None:
    """Measure, predict, print, and write the page and its numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default=f"{UNLIMITED},1gbit,200mbit,50mbit", help="of the link, as tc writes them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--out", type=Path, help="Markdown file to write; its numbers go into a .json beside it")
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)  # as one of the ranks
    args = parser.parse_args()
    rates = args.rates.split(",")
    if args.found is not None:
        run_rank(rates, args.rounds, args.width, args.layers, args.found)
        return
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        found = measure(rates, args.rounds, args.width, args.layers, Path(name), is_planned=True)
        summary = summarize(found, args.width, args.layers, Path(name))
    with torch.device("meta"):
        num_params = sum(p.numel() for p in build_model(args.width, args.layers).parameters())
    report = "\n".join(make_report(summary, args.rounds, [before, os.getloadavg()[0]], num_params))
    print(report)
    if args.out:
        args.out.write_text(report)
        args.out.with_suffix(".json").write_text(json.dumps({"rounds": args.rounds, "rates": summary}, indent=1) + "\n")


if __name__ == "__main__":
    main()
