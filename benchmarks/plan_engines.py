"""What ``plan`` takes of the CPU by each engine: the closed form, a trace of few blocks, a trace of all.

    python benchmarks/plan_engines.py --repeats 3 --out benchmarks/results/plan_engines_DATE.md

Whole processes from the command line, user and system time with that of their children; medians. Two models in full
training, from a ``config.json`` that is written here, so nothing is downloaded. ``plan`` takes the closed form of these
models; to see a trace of few blocks in its place, the same command is run with a closed form that has no rules. The
trace of all blocks is run once.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

_COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 40960}
_COMMON |= {"num_key_value_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "8B": {**_COMMON, "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "head_dim": 128}
    | {"intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "70B": {**_COMMON, "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192}
    | {"intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
_OPTIONS = "--devices 8 --seq_length 4096"
_SEARCH = ["--search", "true", "--gpu", "RTX 4090"]
_COUNTED = "settings estimated:"


def run_in_place(what: str, arguments: list[str]) -> None:
    """Run a command here: up to where it builds the model, with another engine, or counting what a search estimates."""
    gc.disable()  # as the command does while it imports
    from lit_fsdp.cli import plan as plan_command
    from lit_fsdp.cli.main import main
    from lit_fsdp.planning import plan
    from lit_fsdp.planning.search import search
    from lit_fsdp.planning.step_parts import NoEstimateError

    gc.enable()
    gc.freeze()

    sys.argv = ["lit_fsdp", *arguments]
    estimate, num = search.estimate_step, 0

    def refuse(*_: Any, **__: Any) -> Any:
        raise NoEstimateError("left out")

    def count(*args: Any, **options: Any) -> Any:
        nonlocal num
        num += 1
        return estimate(*args, **options)

    def stop(*_: Any, **__: Any) -> Any:
        sys.exit(0)

    changed: dict[str, tuple[Any, str, Any]] = {
        "start": (plan_command, "prepare_step", stop),
        "few": (plan, "estimate_step", refuse),
        "count": (search, "estimate_step", count),
    }
    with patch.object(*changed[what]):
        main()
    if what == "count":
        print(_COUNTED, num)


def measure(command: Sequence[str]) -> tuple[float, str]:
    """Return the CPU time of a command, children included, and what it printed."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}: {text[-500:]}")
    return usage.ru_utime + usage.ru_stime, text


def list_commands(folder: Path, exact: Sequence[str]) -> dict[str, list[str]]:
    """Return the commands, by name, in the order they run."""
    python, here = sys.executable, str(Path(__file__))
    commands = {}
    for name in MODELS:
        plan = ["plan", "--model", str(folder / name), *_OPTIONS.split()]
        commands.setdefault("imports and settings", [python, here, "--in_place", "start", *plan])
        commands[f"{name}, closed form"] = [python, "-m", "lit_fsdp", *plan]
        commands[f"{name}, few blocks"] = [python, here, "--in_place", "few", *plan]
        if name in exact:
            commands[f"{name}, all blocks"] = [python, "-m", "lit_fsdp", *plan, "--exact", "true"]
    plan = ["plan", "--model", str(folder / "8B"), *_OPTIONS.split()]
    commands["8B, search, closed form"] = [python, here, "--in_place", "count", *plan, *_SEARCH]
    return commands


def main() -> None:
    """Run all commands in turn, print each time, and write the medians."""
    if sys.argv[1:2] == ["--in_place"]:
        run_in_place(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--exact", nargs="*", default=["8B"], help="Models of which all blocks are traced too")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, config in MODELS.items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        commands = list_commands(folder, args.exact)
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        counts: dict[str, str] = {}
        for i in range(args.repeats):
            for name, command in commands.items():
                if i and name.endswith("all blocks"):
                    continue
                taken, text = measure(command)
                seconds[name].append(taken)
                counts[name] = text.rpartition(_COUNTED)[2].strip() if _COUNTED in text else ""
                print(f"{name}: {taken:.1f} s {counts[name]}", flush=True)
    lines = [
        "# What a plan takes of the CPU, by engine",
        "",
        f"`plan_engines.py --repeats {args.repeats}`, {datetime.now(UTC):%Y-%m-%d} UTC, torch {version('torch')},",
        f"transformers {version('transformers')}, one thread, CPU shared with other work. `plan {_OPTIONS}` of a",
        "model of 8 billion parameters (36 blocks) and one of 70 (80 blocks). The search is that of",
        f"`{' '.join(_SEARCH)}`. CPU seconds of the whole process and its children, medians; all blocks once.",
        "",
        "| command | CPU, s | least | most | settings estimated |",
        "|---|---|---|---|---|",
    ]
    for name, taken in seconds.items():
        cells = [name, *(f"{find(taken):.1f}" for find in (statistics.median, min, max)), counts[name]]
        lines.append(f"| {' | '.join(cells)} |")
    if args.out:
        args.out.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
