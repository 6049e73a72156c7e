"""The end of ``bench scaling --link``: one measured run and measured links become a table of what more cards bring."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule

from lit_fsdp.cli.plan import PlanCLI, start_plan
from lit_fsdp.errors import ConfigError
from lit_fsdp.files import refuse_unwritable, write_whole
from lit_fsdp.planning.answers import print_section
from lit_fsdp.planning.estimate import Hardware
from lit_fsdp.planning.layouts import (
    Layout,
    choose_layout,
    compare_layouts,
    derive_speed,
    describe_layout,
    make_layout_section,
)
from lit_fsdp.planning.planned_step import PlannedTrainer, prepare_step
from lit_fsdp.planning.search.report import apply_changes
from lit_fsdp.planning.search.search import format_changes
from lit_fsdp.planning.step_parts import NoEstimateError, Ranks
from lit_fsdp.planning.timing.hardware import Gpu
from lit_fsdp.planning.timing.links import parse_links
from lit_fsdp.planning.timing.step_time import MeasuredSpeed
from lit_fsdp.planning.trials import Trials
from lit_fsdp.redaction import redact_yaml

_STRATEGY = {"class_path": "lit_fsdp.FSDP2Strategy"}


class _LayoutTrainer(PlannedTrainer):
    """Keeps the step of a configuration, for :class:`LayoutPlan`."""

    trials: Trials | None = None

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        devices: int | str | None = None,  # noqa: ARG002  read before there is a Trainer
        nodes: int | str | None = None,  # noqa: ARG002
    ) -> None:
        """Read a step.

        Args:
            model: That would be trained.
            datamodule: That would give the data.
            devices: Cards of each node.
            nodes: How many nodes.
        """
        step = prepare_step(self, model, datamodule)
        try:
            self.trials = Trials([(step, {})], datamodule)
        except NoEstimateError as error:
            raise ConfigError(f"link: nothing can be predicted of this step: {error}; see docs/planning.md") from error


class _LayoutCLI(PlanCLI):
    trainer_type = _LayoutTrainer


class LayoutPlan:
    """A configuration on all its cards, to be compared with itself once a run of it was measured.

    Args:
        config: Configuration files, as for ``fit``.
        options: More options for ``fit``.
        per_node: Cards of each node; nodes are those that are configured.
        link: As ``plan --link`` takes it.

    Raises:
        ConfigError: It cannot be planned, or the link is not known or does not reach all cards.
    """

    def __init__(self, config: Sequence[str], options: Sequence[str], *, per_node: int, link: str) -> None:
        try:
            self.links = parse_links(link)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        where = [] if torch.cuda.device_count() else ["--trainer.accelerator=cpu"]
        args = ["plan", *(f"--config={path}" for path in config), *where, *options, f"--devices={per_node}"]
        cli = start_plan(args, _LayoutCLI)
        trainer: Any = cli.trainer
        self.trials: Trials = trainer.trials
        self.given: Mapping[str, Any] = cli.given_config
        self.ranks = self.trials.ranks
        if self.ranks.num_nodes > 1 and self.links.inter is None:
            raise ConfigError(
                f"link: got {link}: it does not say what is between the {self.ranks.num_nodes} nodes; add a comm.json "
                f"of bench comm on several, as {link},between/comm.json"
            )

    def compare(self, report: Path, device_bytes: int | None) -> list[Layout]:
        """Return all layouts, by the speed of a measured run of the configuration.

        Args:
            report: Its ``report.json``.
            device_bytes: Memory of a card, where that is a limit.
        """
        num_ranks, seconds = read_seconds(report)
        measured = self.trials.estimate(ranks=Ranks(num_nodes=1, per_node=num_ranks))
        speed = derive_speed(measured, **seconds)
        hardware = Hardware(gpu=_make_gpu(speed), links=self.links, speed=speed)
        return compare_layouts(self.trials, self.ranks, hardware, device_bytes)

    def show(self, layouts: Sequence[Layout], device_bytes: int | None, out: Path | None) -> None:
        """Print the comparison and what to set, and write it to ``scaling.json``."""
        print_section(make_layout_section(layouts, device_bytes))
        chosen = [choose_layout(layouts, rounds=rounds) for rounds in (False, True)]
        exact, any_bits = chosen
        if exact is None:
            print("nothing fits: `plan` names the nearest settings that do")
        else:
            print(_answer(exact, layouts[0]))
            print(self._spell(exact))
        if any_bits is not None and any_bits is not exact:
            print(f"Faster, but what is sent is rounded: {_describe(any_bits, layouts[0])}")
            print(self._spell(any_bits))
        if out is None:
            return
        numbers = {
            "version": 1,
            "layouts": [describe_layout(layout) for layout in layouts],
            "recommended": None if exact is None else list(layouts).index(exact),
            "recommended_rounded": None if any_bits is None else list(layouts).index(any_bits),
        }
        with refuse_unwritable("out", out):
            write_whole(out / "scaling.json", json.dumps(numbers, indent=1) + "\n")
        print(f"written: {out / 'scaling.json'}")

    def _spell(self, layout: Layout) -> str:
        """Return the lines of YAML that set a layout."""
        trainer = dict(self.given.get("trainer") or {})
        strategy = {"strategy": trainer["strategy"]} if "strategy" in trainer else {}
        changed = apply_changes({"trainer": strategy}, layout.trial.changes)["trainer"]
        ranks = layout.trial.ranks
        lines = {"devices": ranks.per_node, "num_nodes": ranks.num_nodes, "strategy": _STRATEGY, **changed}
        return redact_yaml(yaml.safe_dump({"trainer": lines}, sort_keys=False))


def read_seconds(path: Path) -> tuple[int, dict[str, float]]:
    """Return the ranks of a measured run, and the seconds of its step as ``derive_speed`` takes them.

    Raises:
        ConfigError: It is no such report, or communication took all of its step.
    """
    try:
        sections = json.loads(path.read_text())["sections"]
        speed = sections["speed"]["numbers"]
        exposed_s = sections.get("comm", {}).get("numbers", {}).get("step", {}).get("exposed_s", 0.0)
        found = {
            "compute_s": speed["forward_s"] + speed["backward_s"] - exposed_s,
            "optimizer_s": speed["optimizer_s"],
            "other_s": speed["data_s"] + speed["other_s"],
        }
        num_ranks = int(speed["ranks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: no report of a run with `monitoring: true` ({type(error).__name__}: {error})"
        ) from error
    if found["compute_s"] <= 0 or found["optimizer_s"] <= 0:
        raise ConfigError(f"{path}: its steps only waited for collectives: measure on fewer ranks, such as --ranks=1")
    return num_ranks, found


def _make_gpu(speed: MeasuredSpeed) -> Gpu:
    """Return the card that was measured, of which nothing else need be known."""
    name = torch.cuda.get_device_name(0) if torch.cuda.device_count() else "cpu"
    tflops = speed.flops_per_s / 1e12
    return Gpu(name, 0.0, speed.update_bytes_per_s / 1e9, tflops, tflops, tflops, tflops)


def _answer(chosen: Layout, alone: Layout) -> str:
    if chosen is alone:
        return "More cards do not help: one card trains as many tokens a second as any layout of all"
    if not alone.fits:
        return f"More cards are needed, as one has too little memory: {_describe(chosen, alone)}"
    return f"More cards help: {_describe(chosen, alone)}"


def _describe(layout: Layout, alone: Layout) -> str:
    speed_up = layout.time.tokens_per_s / alone.time.tokens_per_s
    return f"{layout.name} ({format_changes(layout.trial.changes)}), {speed_up:.2f} times one card"
