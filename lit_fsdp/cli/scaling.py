"""``bench scaling``: what one configuration loses to communication as ranks grow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Column, Table

from lit_fsdp.errors import ConfigError
from lit_fsdp.parsing.config_files import check_config_files, list_quiet_callbacks
from lit_fsdp.parsing.parser import check_out_folder
from lit_fsdp.strategy.processes import is_torchrun

_WITHOUT_SPEED = {  # how a run ended before its ranks could put together what they measured, by its status
    "failed": "failed",
    "interrupted": "was interrupted",
    "preempted": "was preempted before its first step",
}
_STEPS = 20
_MIN_STEPS = 8  # fewer leave none after the warm-up of the callbacks that measure
# Of a run that is only measured: it ends after its steps, and saves, validates and logs nothing.
QUIET_TRAINER: dict[str, Any] = {
    "num_nodes": 1,
    "max_epochs": -1,
    "max_time": "null",
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "enable_checkpointing": "false",
    "enable_progress_bar": "false",
    "logger": "false",
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What a run on ``num_ranks`` ranks did, from its report.

    Args:
        num_ranks: How many.
        unit: What is counted: tokens or samples.
        per_s: Of all ranks, a second.
        step_s: Of a step.
        exposed_s: Of a step, in which compute waits for collectives.
        exposed_pct: The same as a share.
        wire_bytes: Sent by a rank in a step, all collectives; see ``count_wire_bytes``.
    """

    num_ranks: int
    unit: str
    per_s: float
    step_s: float
    exposed_s: float
    exposed_pct: float
    wire_bytes: float

    @property
    def per_s_per_rank(self) -> float:
        """What one of the ranks does."""
        return self.per_s / self.num_ranks


def bench_scaling(
    config: list[str] | str | None = None,
    ranks: str | None = None,
    steps: int = _STEPS,
    options: list[str] | str | None = None,
    reports: list[str] | str | None = None,
    link: str | None = None,
    out: Path | None = None,
) -> int:
    """Train a configuration on 1, 2, 4 ... ranks for a few steps, and compare speed and communication.

    Every rank keeps its batch, so the whole batch grows with the ranks (weak scaling). The runs follow each other on
    this node. Of several nodes, run `fit` at each size under your launcher, and compare the reports with --reports.

    Args:
        config: Configuration file, as for `fit`, or a list of them.
        ranks: Numbers of ranks to compare, such as 1,2,4. By default 1, 2, 4 ... up to the GPUs of this node; 1 and 2
            on the CPU.
        steps: Of each run, 8 or more.
        options: One more option for `fit`, such as "--data.batch_size=2", or a list of them.
        reports: A `report.json`, or a list of them, to compare instead of running anything.
        link: What connects the ranks, best the `comm.json` of `bench comm`, as `plan --link` takes it. Then only the
            first of `ranks` runs, or its report is given. From its speed it is predicted what one card, copies,
            shards, `no_sync` and fewer bits would do with as many cards as the last of `ranks`, here or not,
            on each of `trainer.num_nodes`; with the lines to set.
        out: Folder for `scaling.json` and the plot `scaling.png`. By default nothing is written.
    """
    if link is not None and config is None:
        raise ConfigError(f"link: got {link}: what shall be predicted is not known; add --config")
    if link is None and (config is None) == (reports is None):
        raise ConfigError("config or reports: expected one of them: what to run, or what has been run")
    if out is not None:
        check_out_folder(out)
    if link is not None:
        counts = _choose_ranks(ranks, num_run=0 if reports else 1)
        _predict(_list(config), counts, steps, _list(options), _list(reports), link, out)
        return 0
    if reports is not None:
        for name, value, default in (("ranks", ranks, None), ("steps", steps, _STEPS), ("options", options, None)):
            if value != default:
                raise ConfigError(f"{name}: got {value} with reports: these are compared, nothing runs; leave it out")
        scales = [read_report(Path(path)) for path in _list(reports)]
        if len({scale.unit for scale in scales}) > 1:
            units = ", ".join(f"{path}: {scale.unit}" for path, scale in zip(_list(reports), scales, strict=True))
            raise ConfigError(f"reports: got speeds in several units ({units}): expected runs of one kind of task")
    else:
        assert config is not None
        check_config_files([f"--config={path}" for path in _list(config)])
        counts = _choose_ranks(ranks)
        _check_steps(steps)
        with exit_at_sigterm(), tempfile.TemporaryDirectory() as folder:
            runs = [_run(Path(folder), _list(config), count, steps, _list(options)) for count in counts]
            scales = [read_report(report) for report in runs]
    scales = sorted(scales, key=lambda scale: scale.num_ranks)
    _print(scales)
    if out is not None:
        _write(scales, out)
    return 0


def read_report(path: Path) -> Scale:
    """Read what a run measured.

    Args:
        path: Its ``report.json``.

    Raises:
        ConfigError: It is none, or the run was not measured.
    """
    status = None
    try:
        report = json.loads(path.read_text())
        status, sections = report.get("run", {}).get("status"), report["sections"]
        speed, comm = sections["speed"]["numbers"], sections.get("comm", {}).get("numbers", {})
        unit = next(unit for unit in ("tokens", "samples") if f"{unit}_per_s" in speed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        if status in _WITHOUT_SPEED:
            raise ConfigError(
                f"{path}: the run {_WITHOUT_SPEED[status]}, so its report says nothing of its speed: expected one of a "
                "run that came to its end"
            ) from error
        why = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise ConfigError(
            f"{path}: no report of a run with `monitoring: true` that logged its tokens or samples{why}"
        ) from error
    # One rank has no collectives, and says nothing of them.
    step = comm.get("step", {"exposed_s": 0.0, "exposed_pct": 0.0})
    return Scale(
        num_ranks=speed["ranks"],
        unit=unit,
        per_s=speed[f"{unit}_per_s"],
        step_s=speed["step_s"],
        exposed_s=step["exposed_s"],
        exposed_pct=step["exposed_pct"],
        wire_bytes=sum(total["wire_bytes"] for total in comm.get("collectives", {}).values()),
    )


def _list(given: list[str] | str | None) -> list[str]:
    return [given] if isinstance(given, str) else given or []


def _choose_ranks(given: str | None, *, num_run: int | None = None) -> list[int]:
    """Return numbers of ranks, of which the first ``num_run`` shall run, by default all."""
    if is_torchrun(os.environ):
        raise ConfigError(
            "bench scaling starts its runs itself: run it without torchrun, or compare reports with --reports"
        )
    num_gpus = torch.cuda.device_count()
    ranks = [2**i for i in range(num_gpus.bit_length())] or [1, 2]
    if given is not None:
        parts = [part.strip() for part in given.split(",")]
        ranks = [int(part) for part in parts if part.isdecimal()]
        if len(ranks) < len(parts) or min(ranks) < 1 or len(set(ranks)) < len(ranks):
            raise ConfigError(f"ranks: got {given!r}: expected different numbers from 1 on, such as 1,2,4")
    if num_gpus and (most := max(ranks[:num_run], default=0)) > num_gpus:
        raise ConfigError(f"ranks: got {most}: this node has {num_gpus} GPU{'s' * (num_gpus > 1)}")
    return ranks


def _predict(
    config: Sequence[str],
    ranks: Sequence[int],
    steps: int,
    options: Sequence[str],
    reports: Sequence[str],
    link: str,
    out: Path | None,
) -> None:
    """Say what more cards bring, from one run, or its report, and what is known of the links."""
    if len(reports) > 1:
        raise ConfigError(f"reports: got {len(reports)} with link: expected one, whose speed is that of all cards")
    _check_steps(steps)
    from lit_fsdp.cli.layouts import LayoutPlan  # late, as it loads Lightning

    plan = LayoutPlan(config, options, per_node=ranks[-1], link=link)  # first: it refuses before anything runs
    with exit_at_sigterm(), tempfile.TemporaryDirectory() as folder:
        report = Path(reports[0]) if reports else _run(Path(folder), config, ranks[0], steps, options)
        device_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.device_count() else None
        plan.show(plan.compare(report, device_bytes), device_bytes, out)


def _check_steps(steps: int) -> None:
    if steps < _MIN_STEPS:
        raise ConfigError(f"steps: got {steps}: the first ones only warm up: expected {_MIN_STEPS} or more")


def _run(folder: Path, config: Sequence[str], num_ranks: int, steps: int, options: Sequence[str]) -> Path:
    """Train for some steps, and return the report."""
    print(f"{num_ranks} rank{'s' if num_ranks > 1 else ''}, {steps} steps ...", flush=True)
    command = [sys.executable, "-m", "lit_fsdp", "fit", *(f"--config={path}" for path in config), *options]
    settings = {
        **QUIET_TRAINER,
        "devices": num_ranks,
        "max_steps": steps,
        "log_every_n_steps": steps // 2,
        "default_root_dir": folder,
    }
    if (callbacks := list_quiet_callbacks(config)) is not None:
        part = folder / "callbacks.yaml"
        part.write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
        command += [f"--config={part}"]
    command += [f"--trainer.{name}={value}" for name, value in settings.items()]
    command += [f"--run_name=ranks_{num_ranks}", "--monitoring=true"]
    code, told = run_command(command)
    if code:
        errors = [line for line in told.splitlines() if line.startswith("error: ")]
        said = errors[-1].removeprefix("error: ") if errors else "\n".join(told.splitlines()[-20:])
        raise ConfigError(f"the run on {num_ranks} ranks failed: {said}")
    return folder / "runs" / f"ranks_{num_ranks}" / "report.json"


def run_command(command: Sequence[str], timeout_s: float | None = None) -> tuple[int | None, str]:
    """Run a command and all it starts; return its exit code, ``None`` if it had to be ended, and its errors."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:  # no rank outlives its run
            if process.returncode != 0:
                _end_group(process.pid)
    return process.returncode, errors


@contextmanager
def exit_at_sigterm() -> Iterator[None]:
    """Leave by an exception at a signal to end, or a run would go on in its own session."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of them have ended


def make_table(title: str, *columns: str) -> Table:
    """Return a table of numbers, the first column of names to the left.

    Args:
        title: Above it.
        columns: Their heads.
    """
    first, *others = columns
    return Table(first, *(Column(name, justify="right") for name in others), title=title, title_justify="left")


def _print(scales: Sequence[Scale]) -> None:
    first = scales[0]
    names = ["ranks", f"{first.unit}/s", "per rank", f"of {first.num_ranks} rank{'s' if first.num_ranks > 1 else ''}"]
    names += ["step s", "exposed s", "exposed", "sent per rank, MiB"]
    table = make_table("the batch of a rank is the same in all runs", *names)
    for scale in scales:
        efficiency = scale.per_s_per_rank / first.per_s_per_rank
        cells = [f"{scale.per_s:,.1f}", f"{scale.per_s_per_rank:,.1f}", f"{100 * efficiency:.0f} %"]
        cells += [f"{scale.step_s:.4f}", f"{scale.exposed_s:.4f}", f"{scale.exposed_pct:.0f} %"]
        table.add_row(str(scale.num_ranks), *cells, f"{scale.wire_bytes / 2**20:,.1f}")
    Console(width=160).print(table)


def _write(scales: Sequence[Scale], out: Path) -> None:
    # Late, as they load Lightning.
    from lit_fsdp.files import refuse_unwritable, write_whole
    from lit_fsdp.reporting.plots import write_png
    from lit_fsdp.reporting.sections import Curve, Plot

    first = scales[0]
    x = [scale.num_ranks for scale in scales]
    efficiency = [100 * scale.per_s_per_rank / first.per_s_per_rank for scale in scales]
    curves = [
        Curve(label=f"{first.unit}/s per rank, of that on {first.num_ranks}", x=x, y=efficiency),
        Curve(label="step time that waits for collectives", x=x, y=[scale.exposed_pct for scale in scales]),
    ]
    title = "What communication takes as ranks grow"
    rows: list[dict[str, Any]] = [{**asdict(scale), "per_s_per_rank": scale.per_s_per_rank} for scale in scales]
    with refuse_unwritable("out", out):
        write_png(Plot(title=title, x_label="ranks", y_label="%", curves=curves, log_x=True), out / "scaling.png")
        write_whole(out / "scaling.json", json.dumps({"version": 1, "runs": rows}, indent=1) + "\n")
    print(f"written: {out / 'scaling.json'}, {out / 'scaling.png'}")
