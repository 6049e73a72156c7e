"""What ``plan`` says of large models on 8 to 512 GPUs, and how our own work grows with ranks, units and parameters.

    python benchmarks/plan_scale.py --out benchmarks/results/plan_scale_DATE.md
    python benchmarks/plan_scale.py --growth --out benchmarks/results/growth_DATE.md

The first measures nothing: it shows that plans of any number of ranks come from a laptop, and what more nodes cost.
The second measures CPU time of start, step, checkpoint and plan of small models, each point in processes of its own:
on real ranks with gloo, and on ranks in name only, whose collectives return at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from forked_ranks import ForkServer
from step import run_ranks

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


def plan_all(out: Path | None) -> None:
    """Plan all, print, and write the report."""
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


NUM_STEPS = 6
# What is tried, as (ranks, units, width); the middle of each axis is that of the others.
REAL = {
    "ranks": [(1, 10, 32), (2, 10, 32), (4, 10, 32), (16, 10, 32), (64, 10, 32)],
    "units": [(2, 10, 32), (2, 100, 32), (2, 1000, 32)],
    "parameters": [(2, 10, 256), (2, 10, 512), (2, 10, 1024)],
}
IN_NAME = {
    "ranks": [(1, 10, 32), (2, 10, 32), (4, 10, 32), (64, 10, 32)],
    "units": [(64, 10, 32), (64, 100, 32), (64, 1000, 32)],
    "parameters": [(64, 10, 256), (64, 10, 512), (64, 10, 1024)],
}
REAL_WORK = {
    "start": "start of a run, to its first step",
    "first": "first step",
    "step": "later steps",
    "save": "save",
    "load": "load",
}
NAME_WORK = {"shard": "shard and fill", "step": "step", "plan": "plan, closed form", "trace": "plan, exact trace"}
LINEAR = 1.15  # a steeper growth is marked
MAX_PROCESSES = 4  # that import all for themselves; more ranks are forks, or left out
Point = tuple[int, int, int]


def describe_llama(units: int, width: int) -> dict[str, Any]:
    """Return a model with so many blocks."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": units}
    return {"vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, **sizes}


def time_cpu(work: Callable[[], Any]) -> float:
    """Return the CPU time of a call, user and system, of all threads."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def train_real(units: int, width: int, folder: Path) -> dict[str, float]:
    """Train on this rank under the Trainer, with a checkpoint at the end that is read again."""
    import lightning.pytorch as pl

    from lit_fsdp import FSDP2Strategy
    from lit_fsdp.checkpoint.sharded import load_checkpoint
    from lit_fsdp.tasks import CausalLM, LRSchedule

    found: dict[str, Any] = {"marks": []}

    class Clock(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            found["marks"].append(time.process_time())

        def on_train_end(self, trainer: Any, module: Any) -> None:
            path = folder / "saved.ckpt"
            found["save"] = time_cpu(lambda: trainer.save_checkpoint(path))
            found["load"] = time_cpu(lambda: load_checkpoint(path, module, trainer.optimizers))

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    quiet: Any = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"),
        False,
    )
    strategy = FSDP2Strategy(print_plan=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_steps=NUM_STEPS, callbacks=[Clock()], **quiet
    )
    config = {"model_type": "llama", **describe_llama(units, width)}
    task = CausalLM(config=config, lr_scheduler=LRSchedule(type="constant"))
    ids = torch.zeros(16, dtype=torch.long)
    rows = [{"input_ids": ids, "labels": ids}] * NUM_STEPS
    begin = time.process_time()
    trainer.fit(task, torch.utils.data.DataLoader(rows, batch_size=1))
    marks = found.pop("marks")
    steps = [b - a for a, b in pairwise(marks)]
    parameters = sum(p.numel() for p in task.parameters())
    times = {"start": marks[0] - begin, "first": steps[0], "step": statistics.median(steps[1:])}
    return {**found, **times, "parameters": parameters}


def work_in_name(ranks: int, units: int, width: int) -> dict[str, float]:
    """Do on one process what rank 0 of ``ranks`` does, without the others."""
    from plan_accuracy import estimate, trace
    from plan_cases import Case
    from plan_steps import make_model, make_optimizer, make_settings

    from lit_fsdp.optim.factory import build_optimizer
    from lit_fsdp.planning.trace.dry_run import fake_ranks
    from lit_fsdp.sharding.mesh import build_mesh
    from lit_fsdp.sharding.mixed_precision import read_precision
    from lit_fsdp.sharding.parallelize import shard_module
    from lit_fsdp.sharding.shard import register_steps
    from lit_fsdp.weights.load import init_weights, materialize

    case = Case(family="llama", precision="32-true", world_size=ranks, length=16, change=describe_llama(units, width))
    cpu = torch.device("cpu")
    found = {"plan": time_cpu(lambda: estimate(case, cpu))}
    module, settings = make_model(case), make_settings(case)
    found["parameters"] = sum(p.numel() for p in module.parameters())
    batch = {name: torch.zeros(1, 16, dtype=torch.long) for name in ("input_ids", "labels")}
    with fake_ranks(ranks):
        mesh = build_mesh(settings.mesh, device_type="cpu", timeout_s=60.0, world_size=ranks, ranks_per_node=ranks)

        def shard() -> None:
            shard_module(module, settings, dtypes=read_precision(case.precision), mesh=mesh, device=cpu)
            materialize(module, cpu)
            register_steps(module, ["step"])
            init_weights(module.model, 0)

        found["shard"] = time_cpu(shard)
        optimizer = build_optimizer(module.parameters(), make_optimizer(case))

        def step() -> None:
            module.step(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        found["step"] = statistics.median([time_cpu(step) for _ in range(NUM_STEPS)][1:])
    found["trace"] = time_cpu(lambda: trace(case, cpu))
    return found


def be_rank(order: Mapping[str, Any]) -> None:
    """Measure one point on this rank."""
    torch.set_num_threads(1)
    ranks, units, width = order["point"]
    in_name, folder = order["in_name"], Path(order["folder"])
    found = work_in_name(ranks, units, width) if in_name else train_real(units, width, folder)
    Path(f"{order['out']}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))


def measure_point(point: Point, server: ForkServer | None, *, in_name: bool, repeats: int) -> dict[str, float]:
    """Return the medians of a point, of the rank that takes most.

    Raises:
        RuntimeError: A rank has failed.
    """
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            order = {"point": point, "in_name": in_name, "folder": folder}
            ranks = run_ranks("plan_scale.py", order, 1 if in_name else point[0], server=server)
        if isinstance(ranks, str):
            raise RuntimeError(f"{point}: {ranks}")  # noqa: TRY004  a rank failed, no argument is wrong
        runs.append({name: max(rank[name] for rank in ranks) for name in ranks[0]})
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def compute_exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return how the last two points grow: 0 is not at all, 1 in proportion, 2 with the square."""
    return math.log(ys[-1] / ys[-2]) / math.log(xs[-1] / xs[-2])


def format_growth(axis: str, points: Sequence[Point], found: Sequence[Mapping[str, float]], *, in_name: bool) -> str:
    """Return a table: CPU seconds of each kind of work, and the exponent of its growth."""
    place = {"ranks": 0, "units": 1}.get(axis)
    xs = [one["parameters"] if place is None else float(point[place]) for point, one in zip(points, found, strict=True)]
    others = {"ranks": "10 units", "units": f"{points[0][0]} ranks", "parameters": f"{points[0][0]} ranks, 10 units"}
    where = "in name only" if in_name else "real ranks"
    heads = [f"{x:,.0f} {axis}" for x in xs]
    lines = [f"## By {axis}, {where}, {others[axis]}", "", f"| CPU s | {' | '.join(heads)} | exponent |"]
    lines.append("|---" * (len(xs) + 2) + "|")
    for name, title in (NAME_WORK if in_name else REAL_WORK).items():
        ys = [one[name] for one in found]
        exponent = compute_exponent(xs, ys)
        mark = " **worse than linear**" if exponent > LINEAR else ""
        lines.append(f"| {title} | {' | '.join(f'{y:.3f}' for y in ys)} | {exponent:.2f}{mark} |")
    return "\n".join([*lines, ""])


def grow(args: argparse.Namespace, server: ForkServer | None) -> str:
    """Measure all points, and return the page; what there is so far is written after each axis."""
    known: dict[tuple[Point, bool], dict[str, float]] = {}
    head = [
        f"# How our work grows, {datetime.now(UTC).date().isoformat()}",
        "",
        f"`python benchmarks/plan_scale.py --growth --repeats {args.repeats} --max-units {args.max_units} --axes "
        f"{' '.join(args.axes)}` on "
        f"{os.cpu_count()} cores{', points are forks' if args.fork else ''}; torch "
        f"{torch.__version__}. CPU seconds, user and system, of the rank that takes most; medians of {args.repeats}. "
        "Llama with blocks of width 32 where parameters do not grow, one row of 16 tokens, float32. The exponent is "
        f"that of the last two points: 1 is in proportion; above {LINEAR} is marked. {args.note}".strip(),
        "",
    ]
    for in_name, axes in ((False, REAL), (True, IN_NAME)):
        for axis in args.axes:
            points = [point for point in axes[axis] if point[1] <= args.max_units]
            if not (in_name or args.fork):
                points = [point for point in points if point[0] <= MAX_PROCESSES]
            for point in points:
                if (point, in_name) not in known:
                    known[point, in_name] = measure_point(point, server, in_name=in_name, repeats=args.repeats)
                    print(point, "in name" if in_name else "real", known[point, in_name], flush=True)
            head.append(format_growth(axis, points, [known[point, in_name] for point in points], in_name=in_name))
            if args.out:
                args.out.write_text("\n".join(head))
    return "\n".join(head)


def main() -> None:
    """Be a point, measure the growth, or plan."""
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        be_rank(json.loads(sys.argv[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--growth", action="store_true", help="measure how our own work grows")
    parser.add_argument("--repeats", type=int, default=3, help="of each point of the growth")
    parser.add_argument("--axes", nargs="+", choices=REAL, default=list(REAL), help="of the growth; default: all")
    parser.add_argument("--max-units", type=int, default=1000, help="of the growth: leave out larger models")
    parser.add_argument(
        "--fork",
        action="store_true",
        help=f"points are forks, which need not import: on CPUs, and for more than {MAX_PROCESSES} real ranks",
    )
    parser.add_argument("--note", default="", help="goes into the page of the growth")
    args = parser.parse_args()
    if args.repeats < 1 or args.max_units < 100:
        parser.error(f"--repeats, --max-units: got {args.repeats}, {args.max_units}: expected 1 or more, 100 or more")
    if args.growth:
        with ForkServer(Path(sys.executable)) if args.fork else nullcontext() as server:
            print(grow(args, server))
    else:
        plan_all(args.out)


if __name__ == "__main__":
    main()
