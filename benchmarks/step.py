"""What a step, its memory and its start cost in ours and in its peers: one model, one data set, one optimizer.

    python benchmarks/step.py --rounds 5 --trl-python ENV/bin/python --out benchmarks/results/step_DATE.json
    python benchmarks/step.py --cases full qlora_1 --variants plain stock ours --rounds 3
    python benchmarks/step.py --cases full --rounds 1 --add-to benchmarks/results/step_DATE.json    # one round more
    python benchmarks/step.py --cases qlora_1 --take-turns --rounds 1 --steps 600    # on a machine whose speed wavers
    python benchmarks/step.py --page benchmarks/results/step_DATE.json      # the pages again, from the numbers

Each variant runs in fresh processes, in turn, each round in another order. All read the same random weights, rows and
learning rate, without clipping, recomputation or padding, and all must end with the same loss: a run whose loss differs
by more than 1e-6 of it (bfloat16: 2**-8) is not counted, but named, and the exit code is 1. Accelerate, and so the
Trainers of Transformers and TRL, run DDP where FSDP is asked for on CPUs; here they are made to shard, and checked.

With ``--fork`` ranks are forks of a process that has imported all: more rounds in less time, and nothing of the start.
With ``--take-turns`` the variants of a case run at once and take their steps in turn, one variant at a time, so that
what slows the machine down slows down all alike: many steps give ratios that a few rounds do not. Nothing of the start.

Timed are steps after a warm-up: the median on the clock, and the mean of the CPU time, user and system, of all threads
of a rank, which other work on the machine disturbs less. The first step counts from the start of the process, imports
included. Memory is the peak on the GPU, or what a process on the CPU grows by at most after its imports. Writes JSON,
and beside it a page made of nothing else; TRL runs in an environment of its own, as it may pin other versions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forked_ranks import ForkServer
from step_cases import CASES, build_case
from step_variants import VARIANTS, Turns

STARTUP = "startup"  # begins the names of cases that measure the start
WARMUP = 4  # the callbacks of a monitored run look longer at the first steps
MAX_DIFFERENCE = {False: 1e-6, True: 2**-8}  # of losses, relative; in bfloat16 or not
LIMIT_S = 900
TITLES = {
    "plain": "plain loop over `fully_shard`",
    "stock": "stock Transformers + peft + bitsandbytes",
    "ours": "ours",
    "ours_monitored": "ours, with all monitoring",
    "ours_own_module": "ours, a module of your own",
    "model_parallel": "Lightning `ModelParallelStrategy`",
    "lightning_fsdp": "Lightning `FSDPStrategy` (FSDP1)",
    "ddp": "Lightning `DDPStrategy` (not sharded)",
    "accelerate": "accelerate",
    "accelerate_whole": "accelerate, 4-bit weights whole on each rank",
    "hf_trainer": "Trainer of Transformers",
    "trl": "TRL `SFTTrainer`",
}
PACKAGES = ("torch", "lightning", "transformers", "accelerate", "peft", "bitsandbytes")
SERVERS: dict[Path, ForkServer] = {}  # by Python
ENDING = ExitStack()  # of them
Numbers = dict[str, float]


def measure(
    variant: str, name: str, folder: Path, args: argparse.Namespace, turns: Turns | None = None
) -> Numbers | str:
    """Run a variant in processes of its own; return what its ranks have measured, or why there is nothing."""
    case = CASES[name]
    run = {"num_steps": case.num_steps or args.steps, "batch": case.batch[args.size], "is_bf16": is_bf16(name, args)}
    order = {"variant": variant, "case": name, "folder": str(folder), "run": run, "turns": turns and asdict(turns)}
    python = args.trl_python if variant == "trl" else Path(sys.executable)
    if args.fork and python not in SERVERS:
        SERVERS[python] = ENDING.enter_context(ForkServer(python))
    ranks = run_ranks("step_variants.py", order, case.ranks or args.ranks, python=python, server=SERVERS.get(python))
    return ranks if isinstance(ranks, str) else summarize(ranks)


def measure_in_turn(
    variants: Sequence[str], name: str, folder: Path, args: argparse.Namespace
) -> Iterator[tuple[str, Numbers | str]]:
    """Run the variants at once, which take turns by steps; yield what each has measured."""
    num_ranks = CASES[name].ranks or args.ranks
    with tempfile.TemporaryDirectory() as pipes, ExitStack() as held, ThreadPoolExecutor(len(variants)) as pool:
        for index in range(len(variants)):
            for rank in range(num_ranks):
                os.mkfifo(path := Path(pipes) / Turns.name_pipe(index, rank))
                pipe = held.enter_context(path.open("r+b", buffering=0))
                if index == 0:  # as if the last one had ended its step
                    pipe.write(b"." * num_ranks)
        turns = [Turns(folder=pipes, index=index, num_variants=len(variants)) for index in range(len(variants))]
        found = [pool.submit(measure, v, name, folder, args, own) for v, own in zip(variants, turns, strict=True)]
        for variant, measured in zip(variants, found, strict=True):
            yield variant, measured.result()


def run_ranks(
    script: str,
    order: Mapping[str, Any],
    num_ranks: int,
    *,
    python: Path = Path(sys.executable),
    server: ForkServer | None = None,
) -> list[dict[str, Any]] | str:
    """Run a script of this folder on ranks of its own; return what each has left, or why one has not.

    Args:
        script: Reads ``order`` from its first argument as JSON, and writes JSON into its ``out``, with the number of
            its rank at the end.
        order: What it shall do.
        num_ranks: One has no process group.
        python: That runs it.
        server: That forks the ranks instead, for a script with a function ``be_rank``.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as out:
        environs = [list_variables(rank, num_ranks, port) for rank in range(num_ranks)]
        order = {**order, "out": f"{out}/rank", "launched_s": time.time()}
        if server is not None:
            codes = server.run(script, order, environs, Path(out), LIMIT_S)
        else:
            processes = []
            for rank, variables in enumerate(environs):
                environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **variables}
                command = [str(python), str(Path(__file__).with_name(script)), json.dumps(order)]
                with Path(f"{out}/log.{rank}").open("w") as log:
                    processes.append(subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT))
            codes = wait_for(processes)
        if any(codes):
            # The others were killed, with a code below 0, as one had failed.
            cause = max((rank for rank, code in enumerate(codes) if code), key=lambda rank: codes[rank])
            return find_reason(Path(f"{out}/log.{cause}").read_text())
        return [json.loads(Path(f"{out}/rank.{rank}").read_text()) for rank in range(num_ranks)]


def list_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for a rank, without the time that it takes itself; one alone sees one GPU."""
    if num_ranks == 1:  # else the Trainer of Transformers takes a batch for each that it sees
        return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "1",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def is_bf16(name: str, args: argparse.Namespace) -> bool:
    """Whether a case runs in bfloat16; 4-bit weights are compared in float32, where their losses can be equal."""
    return bool(args.precision == "bf16-mixed" and CASES[name].adapters != "qlora")


def wait_for(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Return exit codes; when one fails or time is up, the others are ended."""
    end = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) or time.monotonic() > end:
            time.sleep(2)  # the others may be about to say why
            for process in processes:
                process.kill()
        time.sleep(0.05)
    return [process.wait() for process in processes]


def find_reason(log: str) -> str:
    """Return the last error of a log."""
    lines = [line for line in log.splitlines() if "Error" in line and not line.startswith(" ")]
    return (lines[-1] if lines else log[-300:]).strip()[:300] or "ended without a word"


def summarize(ranks: Sequence[Mapping[str, Any]]) -> Numbers:
    """Return the numbers of a run from those of its ranks."""
    warmup = min(WARMUP, len(ranks[0]["wall_s"]) - 1)
    return {
        "step_wall_s": statistics.mean(statistics.median(rank["wall_s"][warmup:]) for rank in ranks),
        "step_cpu_s": statistics.mean(statistics.mean(rank["cpu_s"][warmup:]) for rank in ranks),
        "first_step_wall_s": max(rank["first_step_wall_s"] for rank in ranks),
        "first_step_cpu_s": statistics.mean(rank["first_step_cpu_s"] for rank in ranks),
        "peak_gib": max(rank["peak_gib"] for rank in ranks),
        "loss": ranks[0]["loss"],
    }


def is_equal_work(runs: Mapping[str, Sequence[Numbers]], *, bf16: bool) -> bool:
    """Whether the last losses of all runs are those of the first one."""
    losses = [run["loss"] for found in runs.values() for run in found]
    return all(map(math.isfinite, losses)) and max(losses) - min(losses) <= MAX_DIFFERENCE[bf16] * max(losses)


def run_case(name: str, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure the variants of a case in turn; what there is so far is written after each."""
    case = CASES[name]
    variants = [v for v in case.variants if not args.variants or v in args.variants]
    if args.trl_python is None:
        variants = [v for v in variants if v != "trl"]
    ranks, steps = case.ranks or args.ranks, case.num_steps or args.steps
    given = {"ranks": ranks, "steps": steps, "bf16": is_bf16(name, args), "forked": args.fork, "turns": args.take_turns}
    entry: dict[str, Any] = found["cases"].setdefault(name, {**given, "runs": {}, "failed": {}})
    if any(entry.get(key, False) != value for key, value in given.items()):
        raise SystemExit(f"--add-to: {name} was measured with {entry}, not with {given}: write into another file")
    runs: dict[str, list[Numbers]] = entry["runs"]
    first = 1 + max((int(run["round"]) for done in runs.values() for run in done), default=-1)
    for variant in variants:
        runs.setdefault(variant, [])
    with tempfile.TemporaryDirectory() as folder:
        build_case(case, args.size, case.batch[args.size] * ranks * steps, Path(folder))
        for turn in range(first, first + args.rounds):
            order = [variants[(turn + i) % len(variants)] for i in range(len(variants))]
            order = order if turn // len(variants) % 2 == 0 else order[::-1]
            alone = ((variant, measure(variant, name, Path(folder), args)) for variant in order)
            for variant, numbers in measure_in_turn(order, name, Path(folder), args) if args.take_turns else alone:
                print(name, variant, numbers, flush=True)
                if isinstance(numbers, str):
                    entry["failed"][variant] = numbers
                else:
                    runs[variant].append({**numbers, "round": turn})
                    if not is_equal_work(runs, bf16=entry["bf16"]):
                        loss = runs[variant].pop()["loss"]
                        entry["failed"][variant] = f"its last loss is {loss!r}: not the same work"
                found["load_after"] = os.getloadavg()
                if out := args.out or args.add_to:
                    out.write_text(json.dumps(found, indent=1) + "\n")
                    out.with_suffix(".md").write_text(format_page(found))


def describe_run(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured where."""
    import torch

    has_gpu = torch.cuda.is_available()
    versions = {name: version(name) for name in PACKAGES}
    if args.trl_python is not None:
        code = "from importlib.metadata import version; print(version('trl'), version('transformers'))"
        done = subprocess.run([args.trl_python, "-c", code], capture_output=True, text=True, check=True)
        versions["trl"] = done.stdout.split()[0]
    own = f"{os.cpu_count()} cores of a CPU ({platform.machine()}), gloo"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if has_gpu else own,
        "versions": versions,
        "options": f"--steps {args.steps} --ranks {args.ranks} --size {args.size} --precision {args.precision}"
        + " --take-turns" * args.take_turns,
        "note": args.note,
        "load_before": os.getloadavg(),
        "cases": {},
    }


def continue_run(before: dict[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of earlier rounds, to which more shall be added; they must be of the same kind.

    Raises:
        SystemExit: They are not: ratios would be of different things.
    """
    for key in ("device", "versions", "options"):
        if before[key] != now[key]:
            raise SystemExit(f"--add-to: its {key} is {before[key]}, now {now[key]}: write into another file")
    return {**before, "note": now["note"] or before["note"]}


def compare(runs: Mapping[str, Sequence[Numbers]], variant: str, key: str) -> list[float]:
    """Return the ratios of a variant to the first one, round by round."""
    base = {run["round"]: run[key] for run in next(iter(runs.values()))}
    return [run[key] / base[run["round"]] for run in runs[variant] if run["round"] in base]


def show(values: Sequence[float], digits: int) -> str:
    """Return the median with the range; nothing where there are no values."""
    if not values:
        return ""
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} [{min(values):.{digits}f}-{max(values):.{digits}f}]" if len(values) > 1 else middle


def format_case(name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the section of a case."""
    case, runs = CASES[name], entry["runs"]
    ran = [variant for variant, found in runs.items() if found]
    failures = [f"| {TITLES[variant]} | failed: {why.replace('|', '/')} |" for variant, why in entry["failed"].items()]
    if not ran:
        return [f"## {case.title}", "", "| variant | |", "|---|---|", *failures, ""] if failures else []
    rounds = len(runs[ran[0]])
    precision = "bf16-mixed" if entry["bf16"] else "float32"
    heads = ["step, s", "ratio", "CPU ratio", "peak, GiB", "first step, s", "first step, CPU s", "CPU ratio"]
    ways = [
        text for key, text in (("forked", ", forked"), ("turns", ", all at once, by steps in turn")) if entry.get(key)
    ]
    if ways:
        heads = heads[:4]
    how = f"{entry['ranks']} ranks{''.join(ways)}"
    lines = [
        f"## {case.title}",
        "",
        f"{how}, {entry['steps']} steps, {precision}; {rounds} rounds. Ratios are to the first line.",
        "",
        f"| variant | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for variant in ran:
        of = {key: [run[key] for run in runs[variant]] for key in runs[variant][0]}
        cells = [show(of["step_wall_s"], 3), show(compare(runs, variant, "step_wall_s"), 2)]
        cells += [show(compare(runs, variant, "step_cpu_s"), 2), f"{statistics.median(of['peak_gib']):.3f}"]
        cells += [show(of["first_step_wall_s"], 1), show(of["first_step_cpu_s"], 1)]
        cells.append(show(compare(runs, variant, "first_step_cpu_s"), 2))
        lines.append(f"| {TITLES[variant]} | {' | '.join(cells[: len(heads)])} |")
    lines += failures
    losses = [run["loss"] for found in runs.values() for run in found]
    spread = (max(losses) - min(losses)) / max(losses)
    return [*lines, "", f"Loss of the last step: {losses[0]:.7f}; all runs agree to {spread:.1e} of it.", ""]


def format_page(found: Mapping[str, Any]) -> str:
    """Return all that was measured as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    loads = f"load {found['load_before'][0]:.1f} before, {found.get('load_after', found['load_before'])[0]:.1f} after"
    where = f"`python benchmarks/step.py {found['options']}` on {found['device']}; {versions}; {loads}."
    meaning = (
        "*step*: medians of a run on the clock; *CPU*: user and system time of a rank, the mean of its steps; both "
        f"after {WARMUP} steps. *first step*: from the start of the process to the end of its first step, imports "
        "included. Medians over rounds, with the lowest and highest; ratios are of the same round. Variants took "
        "turns; absolute times mean little on a shared CPU."
    )
    lines = [
        f"# A step in ours and in its peers, {found['date']}",
        "",
        f"{where} {found['note']}".strip(),
        "",
        meaning,
        "",
    ]
    for name, entry in found["cases"].items():
        lines += format_case(name, entry)
    return "\n".join(lines)


def format_readme(found: Mapping[str, Any]) -> str:
    """Return one line for each variant: CPU time of a step, by case, or of the start where a case measures that."""
    columns = {
        name: ("first_step_cpu_s" if name.startswith(STARTUP) else "step_cpu_s")
        for name in CASES
        if name in found["cases"]
    }
    heads = [CASES[name].title for name in columns]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for variant, title in TITLES.items():
        cells = []
        for name, key in columns.items():
            runs = found["cases"][name]["runs"]
            values = compare(runs, variant, key) if runs.get(variant) else []
            cells.append(f"{statistics.median(values):.2f}" if values else "")
        if any(cells):
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Return the options, or end with what is wrong with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[], metavar="NAME", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help=f"{WARMUP + 2} or more")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=("tiny", "cpu", "cuda"), help="of models and batches; default: by device")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    parser.add_argument(
        "--fork",
        action="store_true",
        help="ranks are forks that need not import; on CPUs, and not for --cases startup_...",
    )
    parser.add_argument(
        "--take-turns",
        action="store_true",
        help="variants run at once and take their steps in turn; not for --cases startup_...",
    )
    parser.add_argument("--trl-python", type=Path, help="Python of an environment with TRL; without it TRL is left out")
    parser.add_argument("--note", default="", help="goes into the page, such as what else ran on the machine")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--out", type=Path, help="JSON file to write; the page goes beside it")
    target.add_argument("--add-to", type=Path, help="the same, with the rounds that are in it already")
    parser.add_argument(
        "--page", type=Path, help="measure nothing: write the page of this JSON, print the README's table"
    )
    args = parser.parse_args()
    if args.steps < WARMUP + 2:
        parser.error(f"--steps: got {args.steps}: expected {WARMUP + 2} or more, as {WARMUP} warm up")
    if args.rounds < 1 or args.ranks < 1:
        parser.error(f"--rounds, --ranks: got {args.rounds}, {args.ranks}: expected 1 or more")
    if args.fork and any(name.startswith(STARTUP) for name in args.cases):
        parser.error("--fork: forks measure no start: leave it out, or choose --cases")
    if args.take_turns and (args.fork or any(name.startswith(STARTUP) for name in args.cases)):
        parser.error(
            "--take-turns: its variants are processes of their own and measure no start: "
            "leave out --fork, or choose --cases"
        )
    if args.trl_python is not None and not args.trl_python.is_file():
        parser.error(f"--trl-python: got {args.trl_python}: expected the Python of an environment that has TRL")
    for option, path in (("--out", args.out), ("--add-to", args.add_to)):
        if path is not None and path.suffix != ".json":
            parser.error(f"{option}: got {path}: expected a name ending in .json")
    return args


def main() -> None:
    """Measure, or write pages."""
    args = parse_arguments()
    if args.page is not None:
        found = json.loads(args.page.read_text())
        args.page.with_suffix(".md").write_text(format_page(found))
        print(format_readme(found))
        return
    import torch

    has_gpu = torch.cuda.is_available()
    if args.fork and has_gpu:  # which variants would use, whatever the size
        sys.exit("--fork: forks cannot use CUDA: leave it out, or hide the GPUs with CUDA_VISIBLE_DEVICES=")
    num_ranks, num_gpus = max(CASES[name].ranks or args.ranks for name in args.cases), torch.cuda.device_count()
    if has_gpu and num_ranks > num_gpus:
        sys.exit(f"--ranks: got {num_ranks}: expected {num_gpus} or fewer, as each has a GPU of its own")
    args.size = args.size or ("cuda" if has_gpu else "cpu")
    found = describe_run(args)
    if args.add_to is not None and args.add_to.is_file():
        found = continue_run(json.loads(args.add_to.read_text()), found)
    with ENDING:
        for name in args.cases:
            run_case(name, args, found)
    print(format_page(found))
    failed = {name: entry["failed"] for name, entry in found["cases"].items() if entry["failed"]}
    if failed or not any(run for entry in found["cases"].values() for run in entry["runs"].values()):
        sys.exit(f"not measured: {failed or 'anything'}")


if __name__ == "__main__":
    main()
