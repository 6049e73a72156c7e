"""The report of a run: what it was, what came out, what it took, in files to look at and to share."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lit_fsdp.redaction import hide_paths, shorten_path
from lit_fsdp.reporting import run_facts
from lit_fsdp.reporting.curves import Series, make_curves_section
from lit_fsdp.reporting.environment import describe_environment, format_devices, format_ranks, read_environment
from lit_fsdp.reporting.lost_logs import list_lost_logs
from lit_fsdp.reporting.metrics import (
    count_planned_steps,
    find_run_folder,
    get_headline,
    has_dropped_last_step,
    has_own_folder,
    is_trial,
    relative_to_here,
)
from lit_fsdp.reporting.report_files import HTML, Report, draw_section, draw_sections, make_plain, write_report
from lit_fsdp.reporting.sections import Section
from lit_fsdp.reporting.step_callback import StepCallback
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.strategy.launcher import outlive_children
from lit_fsdp.strategy.lightning_internals import read_logged

FORMAT = 1  # of report.json
_OWN_FOLDER = "run_report"


class RunReport(StepCallback):
    """Write ``report.html``, ``report.md`` and ``report.json`` into the run's folder when ``fit`` ends.

    It is written however the run ends, unless the process is killed: finished, stopped, interrupted, preempted or
    failed. A run that is refused before its first step (``ValueError``) leaves none. The page needs no other file, no
    network and no script. It holds the configuration, curves of all scalars that the module logged, the FSDP units, the
    sections of other callbacks, of the module and of the data (each that has a method ``make_section``), and the
    environment. It leaves out names of hosts and users; paths are as seen from the current folder.

    Metrics are read every ``log_every_n_steps`` steps, as reading waits for the GPU. A run that goes on from a
    checkpoint has a report of its own part. Under ``fast_dev_run`` there is none, as such a run leaves no files.

    Args:
        fallback_dir: Folder for it if the run has none of its own, which it has with TensorBoardLogger or CSVLogger.
            By default ``run_report`` in ``default_root_dir``, or where the logger saves. A report that is there is
            replaced.
    """

    def __init__(self, fallback_dir: str | None = None) -> None:
        self.fallback_dir = fallback_dir
        self._is_on = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the folder while all ranks are here: at the end it may be rank 0 alone."""
        self._is_on = stage == "fit" and not is_trial(trainer)
        if not self._is_on:
            return
        self._start, self._start_time = time.perf_counter(), datetime.now(UTC)
        self._folder = find_run_folder(trainer, self.fallback_dir)
        if self.fallback_dir is None and not has_own_folder(trainer):
            # Not the folder itself: it is likely the current one, where report.md may be the user's.
            self._folder /= _OWN_FOLDER
        self._environment = read_environment(trainer)
        self._history: dict[str, Series] = {}
        self._known: set[str] = set()  # names that are read where they are logged
        self._has_begun = False
        self.first_step = self.last_step = 0
        self._num_planned = math.inf
        self._units: Section | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_on and trainer.is_global_zero:
            self._units = run_facts.describe_units(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._has_begun = True
        if self._is_on:
            self._num_planned = count_planned_steps(trainer)

    @override
    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_on:
            return
        step = self.last_step
        if step == self.first_step + 1:
            self._known.update(read_logged(trainer))
        is_last = step >= self._num_planned or trainer.should_stop
        if is_last or step % max(trainer.log_every_n_steps, 1) == 0:  # type: ignore[attr-defined]
            self._keep_logged(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_on and not trainer.sanity_checking:
            self._keep_logged(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep_late(trainer)

    on_train_end = on_train_epoch_start

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not self._is_on:
            return
        outlive_children(trainer.strategy.launcher)
        if not self._has_begun and isinstance(exception, ValueError):
            self._is_on = False  # of a run that is refused, one line says all
            return
        when = f"at step {self.last_step:,}" if self._has_begun else "before the first step"
        self._write(trainer, *run_facts.describe_end(exception, when))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write when all callbacks have had their ``on_fit_end``."""
        if not self._is_on:
            return
        step, planned = trainer.global_step, self._num_planned
        self.first_step, self.last_step = self.first_step if self._has_begun else step, step
        if trainer.should_stop and step < planned:
            of = f" of {planned:,}" if math.isfinite(planned) else ""
            self._write(trainer, "stopped", f"training was stopped early, at step {step:,}{of}.")
        elif has_dropped_last_step(trainer):
            self._write(trainer, "finished", f"training came to its end at step {step:,}, which was left out as bad.")
        elif lost := self._find_lost():
            self._write(trainer, "diverged", f"training came to its end at step {step:,}, but {lost}.")
        else:
            self._write(trainer, "finished", f"training came to its end at step {step:,}.")

    def _find_lost(self) -> str | None:
        """Say which training loss has not come back from NaN or infinity."""
        for name, series in self._history.items():
            is_loss = name.startswith("train") and name.rpartition("/")[2] == "loss"
            if is_loss and series.last is not None and not math.isfinite(series.last[1]):
                return f"{name} is {series.last[1]} (not finite for the first time at step {series.first_not_finite:,})"
        return None

    def _keep_logged(self, trainer: Trainer) -> None:
        metrics = read_logged(trainer)
        self._known.update(metrics)
        self._keep(trainer, metrics)

    def _keep(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
        """Add values to the curves, on the first rank."""
        for name, value in metrics.items() if trainer.is_global_zero else ():
            stem = name.removesuffix("_step")
            # Lightning's doubles of one that is logged both in steps and over epochs.
            is_double = (stem != name and stem in metrics) or f"{name}_epoch" in metrics
            if not is_double and value.numel() == 1:
                self._history.setdefault(name, Series()).add(trainer.global_step, float(value))

    def _keep_late(self, trainer: Trainer) -> None:
        """Add what was logged over an epoch or at its end, once that is all there."""
        if self._is_on:
            metrics = trainer.callback_metrics
            self._keep(trainer, {name: value for name, value in metrics.items() if name not in self._known})

    def _write(self, trainer: Trainer, status: str, message: str) -> None:
        self._is_on = False
        if not trainer.is_global_zero:
            return
        try:
            write_report(self._make_report(trainer, status, message), self._folder)
        except Exception as error:  # noqa: BLE001 - neither a trained model nor the error of the run may be lost to it
            rank_zero_warn(f"the run has no report: {type(error).__name__}: {error}")
        else:
            rank_zero_info(f"report: {relative_to_here(self._folder / HTML)}")

    def _make_report(self, trainer: Trainer, status: str, message: str) -> Report:
        ended = datetime.now(UTC)
        config = run_facts.read_config(trainer, self._folder)
        checkpoints = run_facts.describe_checkpoints(trainer, self._folder, since=self._start_time.timestamp())
        curves = make_curves_section(self._history)
        data = get_data_module(trainer)
        callbacks = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        others = draw_sections([*callbacks, trainer.lightning_module, data], self._folder)
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
        parts = [
            draw_section(curves, self._folder, is_grid=True),
            *(part for part, _ in others.values()),
            *(draw_section(own, self._folder) for own in (checkpoints, self._units) if own is not None),
            draw_section(Section(title="Configuration", name="configuration"), self._folder, code=text),
            draw_section(describe_environment(self._environment), self._folder),
        ]
        run = self._describe_run(trainer, status, message, ended)
        numbers = {
            "format": FORMAT,
            "run": run,
            "curves": curves.numbers,
            "checkpoints": [] if checkpoints is None else checkpoints.numbers["files"],
            "units": None if self._units is None else self._units.numbers,
            "sections": {name: entry for name, (_, entry) in others.items()},
            "config": config,
            "environment": self._environment,
        }
        return Report(
            name=run["name"],
            status=status,
            message=message,
            facts=self._list_facts(run, ended),
            parts=parts,
            numbers=make_plain(hide_paths(numbers)),
        )

    def _describe_run(self, trainer: Trainer, status: str, message: str, ended: datetime) -> dict[str, Any]:
        first, last = self.first_step, self.last_step
        origin = trainer.ckpt_path if first else None
        return {
            "name": self._find_name(trainer),
            "folder": shorten_path(self._folder),
            "status": status,
            "message": message,
            "started_at": self._start_time.isoformat(timespec="seconds"),
            "ended_at": ended.isoformat(timespec="seconds"),
            "wall_s": round(time.perf_counter() - self._start, 3),
            "first_step": first,
            "last_step": last,
            "num_steps": last - first,
            "num_steps_planned": int(self._num_planned) if math.isfinite(self._num_planned) else None,
            "resumed_from": shorten_path(str(relative_to_here(origin))) if origin else None,
            "num_ranks": self._environment["world_size"],
            "num_nodes": self._environment["num_nodes"],
            "strategy": type(trainer.strategy).__name__,
            "precision": str(trainer.precision),
            "disk": run_facts.describe_disk(trainer),
            "lost_logs": list_lost_logs(trainer),
            "redone_steps": run_facts.list_redone_steps(trainer),
            "headline": self._describe_headline(trainer),
        }

    def _describe_headline(self, trainer: Trainer) -> dict[str, Any] | None:
        headline = get_headline(trainer.lightning_module)
        series = self._history.get(name := f"val/{headline.metric}")
        if series is None:
            return None
        best = series.low if headline.mode == "min" else series.high
        points = {"last": series.last, "best": best}
        found = {key: point and {"step": point[0], "value": point[1]} for key, point in points.items()}
        return {"name": name, "mode": headline.mode, **found}

    def _find_name(self, trainer: Trainer) -> str:
        folder = self._folder.absolute()
        if has_own_folder(trainer):
            return f"{folder.parent.name}/{folder.name}"
        return folder.name if folder.name != _OWN_FOLDER else folder.parent.name

    def _list_facts(self, run: dict[str, Any], ended: datetime) -> dict[str, str]:
        facts = {}
        if (headline := run["headline"]) is not None:
            facts[f"final {headline['name']}"] = f"{headline['last']['value']:.4f}"
            if (best := headline["best"]) is not None:
                facts[f"best {headline['name']}"] = f"{best['value']:.4f} at step {best['step']:,}"
        for name, series in self._history.items():
            if name.rpartition("/")[2] == "loss" and series.last is not None:
                facts[f"final {name}"] = f"{series.last[1]:.4f}"
                if not name.startswith("train") and series.low is not None:
                    facts[f"best {name}"] = f"{series.low[1]:.4f} at step {series.low[0]:,}"
        between = f", from {run['first_step']:,} to {run['last_step']:,}" if run["first_step"] else ""
        facts["steps"] = f"{run['num_steps']:,}{between}"
        if run["resumed_from"]:
            facts["went on from"] = run["resumed_from"]
        facts["wall time"] = str(timedelta(seconds=round(run["wall_s"])))
        facts["ranks"] = format_ranks(self._environment)
        facts["devices"] = format_devices(self._environment["devices"])
        facts |= {"strategy": run["strategy"], "precision": run["precision"]}
        if self._units is not None:
            numbers = self._units.numbers
            facts["parameters"] = f"{numbers['num_parameters']:,}"
            facts["trainable"] = f"{numbers['num_trainable']:,}"
        if run["disk"] is not None:
            facts["disk"] = run["disk"]["text"]
            if run["disk"]["missing"]:
                facts["NOT saved"] = run["disk"]["missing"]
        if run["redone_steps"]:
            facts["out of memory"] = "; ".join(run["redone_steps"])
        if run["lost_logs"]:
            facts["NOT logged"] = "; ".join(run["lost_logs"])
        facts["ended"] = f"{ended:%Y-%m-%d %H:%M} UTC"
        facts["folder"] = run["folder"]
        return hide_paths(facts)
