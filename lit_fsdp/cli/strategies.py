"""``bench strategies``: one configuration under several strategies of Lightning, on the user's machine."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from lit_fsdp.cli.scaling import QUIET_TRAINER, exit_at_sigterm, make_table, run_command
from lit_fsdp.errors import ConfigError, suggest
from lit_fsdp.parsing.config_files import check_config_files, list_quiet_callbacks, load_yaml
from lit_fsdp.parsing.parser import check_out_folder
from lit_fsdp.strategy.processes import is_torchrun

_PACKAGE = "lightning.pytorch.strategies"
NUM_UNTIMED = 4  # steps at the beginning: what warms up, and the one whose collectives are counted
# What Lightning refuses on CPUs though it runs there.
_ON_CPU = {
    name: f"lit_fsdp.strategy.cpu_trials.{name.removesuffix('Strategy')}OnCPU"
    for name in ("FSDPStrategy", "DeepSpeedStrategy")
}
_SAME_LOSS = 1e-5  # of float32: another order of additions
_FILES = (".yaml", ".yml")
_HELD = ("parameters", "gradients", "optimizer state")


def list_strategies(num_ranks: int) -> dict[str, dict[str, Any]]:
    """Return what each name stands for, as ``trainer.strategy`` of a configuration file."""
    sizes = {"data_parallel_size": num_ranks, "tensor_parallel_size": 1}
    return {
        "fsdp2": {"class_path": "lit_fsdp.FSDP2Strategy"},
        "ddp": {"class_path": f"{_PACKAGE}.DDPStrategy"},
        "fsdp": {"class_path": f"{_PACKAGE}.FSDPStrategy"},
        "model_parallel": {"class_path": f"{_PACKAGE}.ModelParallelStrategy", "init_args": sizes},
        "deepspeed_stage_2": {"class_path": f"{_PACKAGE}.DeepSpeedStrategy", "init_args": {"stage": 2}},
        "deepspeed_stage_3": {"class_path": f"{_PACKAGE}.DeepSpeedStrategy", "init_args": {"stage": 3}},
    }


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What all rounds under one strategy did.

    Args:
        name: Of the strategy.
        step_s: Median of the rounds, each the median of its steps on the slowest rank.
        step_s_low: The fastest round.
        step_s_high: The slowest round.
        peak_gib: Largest of all ranks and rounds: allocated by torch on a GPU, resident for a process on a CPU.
        wire_bytes: What a rank sends in a step, by collective; the largest of all ranks.
        held: What a rank has of parameters, gradients and optimizer state, as a share of all; ``None`` if the
            strategy does not show it.
        losses: Of the steps of the first round.
        unknown: Collectives that were seen, but not counted.
        why_not: Why it did not run.
    """

    name: str
    step_s: float = 0.0
    step_s_low: float = 0.0
    step_s_high: float = 0.0
    peak_gib: float = 0.0
    wire_bytes: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, float | None] = field(default_factory=dict)
    losses: Sequence[float] = ()
    unknown: Sequence[str] = ()
    why_not: str = ""


def bench_strategies(
    config: list[str] | str,
    strategies: str | None = None,
    ranks: int | None = None,
    steps: int = 20,
    rounds: int = 3,
    options: list[str] | str | None = None,
    out: Path | None = None,
    timeout_s: float = 600.0,
) -> int:
    """Train a configuration under several strategies for a few steps, and compare time, memory, bytes and losses.

    The runs are interleaved: each round has one of every strategy, in processes of its own. They start from the same
    weights and see the same rows, so that losses are equal unless the model draws random numbers, as dropout does.
    Runs write into a temporary folder, without checkpoints, logs or monitoring, and without callbacks that need these,
    such as ModelCheckpoint. On CPUs, FSDP1 and DeepSpeed run by subclasses of Lightning's strategies, which allow GPUs
    only.

    Args:
        config: Configuration file, as for `fit`, or a list of them.
        strategies: Which to compare, such as fsdp2,ddp. The first is what the others are compared with. Names:
            fsdp2, ddp, fsdp, model_parallel, deepspeed_stage_2, deepspeed_stage_3, or a file with a
            `trainer.strategy` of its own. By default all names.
        ranks: Of each run. By default one for each GPU of this node; 2 on the CPU.
        steps: Of each run; the first 4 are not timed.
        rounds: Runs of each strategy.
        options: One more option for `fit`, such as "--data.batch_size=2", or a list of them.
        out: Folder for `strategies.json`. By default nothing is written.
        timeout_s: How long one run may take before it is ended.
    """
    if is_torchrun(os.environ):
        raise ConfigError("bench strategies starts its runs itself: run it without torchrun")
    if steps <= NUM_UNTIMED + 1:
        raise ConfigError(
            f"steps: got {steps}: the first {NUM_UNTIMED} only warm up: expected {NUM_UNTIMED + 2} or more"
        )
    if rounds < 1:
        raise ConfigError(f"rounds: got {rounds}: expected 1 or more")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s: got {timeout_s}: expected seconds above 0")
    if out is not None:
        check_out_folder(out)
    files = [config] if isinstance(config, str) else config
    check_config_files([f"--config={path}" for path in files])
    num_ranks = _choose_ranks(ranks)
    chosen = _choose(strategies, num_ranks)
    given = [options] if isinstance(options, str) else options or []
    found = _run_all(files, chosen, num_ranks=num_ranks, steps=steps, rounds=rounds, options=given, timeout_s=timeout_s)
    facts = _describe_machine(num_ranks, steps=steps, rounds=rounds)
    _print(found, facts)
    if out is not None:
        _write(found, facts, out)
    return 1 if any(one.why_not and not _is_missing(one) for one in found) else 0


def _choose_ranks(given: int | None) -> int:
    num_gpus = torch.cuda.device_count()
    ranks = given if given is not None else num_gpus or 2
    if ranks < 2:
        raise ConfigError(f"ranks: got {ranks}: nothing is sharded over one: expected 2 or more")
    if num_gpus and ranks > num_gpus:
        raise ConfigError(f"ranks: got {ranks}: this node has {num_gpus} GPUs")
    return ranks


def _choose(given: str | None, num_ranks: int) -> dict[str, dict[str, Any]]:
    """Return name and setting of each strategy; on CPUs with the class that runs there."""
    known = list_strategies(num_ranks)
    names = list(known) if given is None else [name.strip() for name in given.split(",")]
    titles = [Path(name).stem if name.endswith(_FILES) else name for name in names]  # in the table
    if len(set(titles)) < len(titles):
        raise ConfigError(f"strategies: got {given!r}: expected each once, also as the name of a file")
    chosen = {}
    for title, name in zip(titles, names, strict=True):
        if name.endswith(_FILES):
            chosen[title] = _read_strategy(Path(name))
        elif name in known:
            chosen[title] = known[name]
        else:
            hint = suggest(name, known, f"expected some of {', '.join(known)}, or a file")
            raise ConfigError(f"strategies: got {name!r}: {hint}")
    if not torch.cuda.device_count():
        for setting in chosen.values():
            own = setting["class_path"].rpartition(".")[2]
            setting["class_path"] = _ON_CPU.get(own, setting["class_path"])
    return chosen


def _read_strategy(path: Path) -> dict[str, Any]:
    check_config_files([f"--config={path}"])
    setting = ((load_yaml(path.read_text(encoding="utf-8")) or {}).get("trainer") or {}).get("strategy")
    if not isinstance(setting, dict) or not isinstance(setting.get("class_path"), str):
        raise ConfigError(f"strategies: got {path}: expected a file with trainer.strategy.class_path")
    return dict(setting)


def _run_all(
    files: Sequence[str], chosen: Mapping[str, dict[str, Any]], *, num_ranks: int, steps: int, rounds: int, **run: Any
) -> list[Compared]:
    """Run every strategy once a round; one that fails is not tried again."""
    done: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in chosen}
    why_not: dict[str, str] = {}
    with exit_at_sigterm(), tempfile.TemporaryDirectory() as name:
        for i in range(rounds):
            for strategy, setting in chosen.items():
                if strategy in why_not:
                    continue
                print(f"round {i + 1} of {rounds}: {strategy}, {num_ranks} ranks, {steps} steps ...", flush=True)
                folder = Path(name) / f"{strategy}_{i}"
                folder.mkdir()
                try:
                    done[strategy].append(_run(folder, files, setting, num_ranks=num_ranks, steps=steps, **run))
                except RuntimeError as error:
                    why_not[strategy] = str(error)
                    print(f"  not run: {error}", flush=True)
    return [
        Compared(name=name, why_not=why_not[name]) if name in why_not else _combine(name, done[name]) for name in chosen
    ]


def _run(
    folder: Path,
    files: Sequence[str],
    setting: dict[str, Any],
    *,
    num_ranks: int,
    steps: int,
    options: Sequence[str],
    timeout_s: float,
) -> list[dict[str, Any]]:
    """Return what each rank of one run wrote.

    Raises:
        RuntimeError: Why there is nothing.
    """
    if "DeepSpeed" in setting["class_path"] and find_spec("deepspeed") is None:
        raise RuntimeError(_MISSING)
    if setting["class_path"].endswith("FSDP2Strategy"):  # others wait as long for ranks that start slowly
        setting = {**setting, "init_args": {"start_timeout_s": timeout_s, **setting.get("init_args", {})}}
    trainer: dict[str, Any] = {"strategy": setting}
    if (callbacks := list_quiet_callbacks(files)) is not None:
        trainer["callbacks"] = callbacks
    (folder / "strategy.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    settings = {
        **QUIET_TRAINER,
        "accelerator": "gpu" if torch.cuda.device_count() else "cpu",
        "devices": num_ranks,
        "max_steps": steps,
        "default_root_dir": folder,
    }
    command = [sys.executable, "-m", "lit_fsdp", "fit", *(f"--config={path}" for path in files)]
    command += [*options, f"--config={folder / 'strategy.yaml'}"]
    command += [f"--trainer.{name}={value}" for name, value in settings.items()]
    command += ["--trainer.callbacks+=lit_fsdp.cli.strategy_probe.StrategyProbe"]
    command += [f"--trainer.callbacks.folder={folder / 'probe'}", "--run_name=bench", "--monitoring=false"]
    code, errors = run_command([*command, "--run_summary=false"], timeout_s)
    reports = sorted((folder / "probe").glob("rank_*.json"))
    if code or len(reports) != num_ranks:
        raise RuntimeError(_describe_failure(code, errors, timeout_s))
    return [json.loads(path.read_text()) for path in reports]


def _describe_failure(code: int | None, errors: str, timeout_s: float) -> str:
    if code is None:
        return f"it ran past timeout_s ({timeout_s:g} s)"
    lines = errors.strip().splitlines()
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return told[-1] if told else lines[-1] if lines else f"it ended with exit code {code}"


_MISSING = "deepspeed is not installed: pip install 'lit_fsdp[deepspeed]'"


def _is_missing(one: Compared) -> bool:
    return one.why_not == _MISSING


def _combine(name: str, rounds: Sequence[Sequence[Mapping[str, Any]]]) -> Compared:
    medians = [max(statistics.median(rank["step_s"]) for rank in ranks) for ranks in rounds]
    ranks = [rank for ranks in rounds for rank in ranks]
    most = max(rounds[0], key=lambda rank: sum(rank["wire_bytes"].values()))
    held = {
        kind: None if None in (shares := [rank["held"].get(kind) for rank in rounds[0]]) else max(shares)
        for kind in _HELD
    }
    return Compared(
        name=name,
        step_s=statistics.median(medians),
        step_s_low=min(medians),
        step_s_high=max(medians),
        peak_gib=max(rank["peak_gib"] for rank in ranks),
        wire_bytes=most["wire_bytes"],
        held=held,
        losses=rounds[0][0]["losses"],
        unknown=sorted({name for rank in ranks for name in rank["unknown"]}),
    )


def describe_sharded(one: Compared, num_ranks: int) -> str:
    """Return in words what of the model a rank has only a part of."""
    # A strategy may keep small parameters whole; half way between a part and all of it is the limit.
    limit = (1 + 1 / num_ranks) / 2
    parts = [kind for kind in _HELD if (share := one.held.get(kind)) is not None and share < limit]
    hidden = [kind for kind in _HELD if one.held.get(kind) is None]
    return ", ".join(parts or ["nothing"]) + (f" ({', '.join(hidden)}: not shown)" if hidden else "")


def measure_loss_difference(one: Compared, first: Compared) -> float | None:
    """Return the largest difference of a loss to that of the first strategy; ``None`` where there are none.

    Not a number where a loss is none, also a later one: ``max`` would pass over it.
    """
    differences = [abs(a - b) for a, b in zip(one.losses, first.losses, strict=False)]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=None)


def _describe_machine(num_ranks: int, *, steps: int, rounds: int) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.device_count() else platform.machine() + " CPU"
    versions = {name: version(name) for name in ("torch", "lightning", "transformers")}
    if find_spec("deepspeed") is not None:
        versions["deepspeed"] = version("deepspeed")
    return {"ranks": num_ranks, "device": device, "steps": steps, "rounds": rounds, "versions": versions}


def _print(found: Sequence[Compared], facts: Mapping[str, Any]) -> None:
    first = next((one for one in found if not one.why_not), None)
    title = f"{facts['ranks']} ranks on {facts['device']}, {facts['rounds']} rounds of {facts['steps']} steps"
    names = ("step s", "of rounds", "time", "peak GiB", "sent MiB", "loss differs", "sharded")
    table = make_table(title, "strategy", *names)
    notes = []
    for one in found:
        if one.why_not or first is None:
            table.add_row(one.name, *["-"] * (len(names) - 1), "not run")
            notes.append(f"{one.name}: {one.why_not}")
            continue
        difference = measure_loss_difference(one, first)
        cells = [
            f"{one.step_s:.4f}",
            f"{one.step_s_low:.4f}-{one.step_s_high:.4f}",
            f"{one.step_s / first.step_s:.2f} x",
        ]
        cells += [f"{one.peak_gib:.2f}", f"{sum(one.wire_bytes.values()) / 2**20:,.3f}"]
        cells += ["-" if difference is None else f"{difference:.1e}", describe_sharded(one, facts["ranks"])]
        table.add_row(one.name, *cells)
        if one.unknown:
            notes.append(f"{one.name}: bytes of {', '.join(one.unknown)} are not counted")
        if difference is not None and math.isnan(difference):
            notes.append(f"{one.name}: a loss of it, or of {first.name}, is not a number")
        elif difference is not None and difference > _SAME_LOSS:
            notes.append(
                f"{one.name}: its losses are not those of {first.name}: dropout, mixup and augmentation draw other "
                "numbers there, and precision below float32 rounds in other places"
            )
    Console(width=180).print(table)
    for note in notes:
        print(note)


def _write(found: Sequence[Compared], facts: Mapping[str, Any], out: Path) -> None:
    from lit_fsdp.files import refuse_unwritable, write_whole
    from lit_fsdp.reporting.report_files import make_plain

    with refuse_unwritable("out", out):
        text = json.dumps(make_plain({"version": 1, **facts, "strategies": [asdict(one) for one in found]}), indent=1)
        write_whole(out / "strategies.json", f"{text}\n")
    print(f"written: {out / 'strategies.json'}")
