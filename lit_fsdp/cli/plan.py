"""``plan``: what a run will take of its GPUs, from the same configuration, with nothing of it there."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from typing_extensions import override

from lit_fsdp.cli.config_files import check_config_files
from lit_fsdp.cli.messages import describe_exception
from lit_fsdp.cli.parser import check_out_folder
from lit_fsdp.cli.train import TrainerCLI
from lit_fsdp.errors import ConfigError, is_debugging
from lit_fsdp.planning.estimate import Hardware
from lit_fsdp.planning.plan import Plan, plan_step
from lit_fsdp.planning.plan_report import choose_unit, describe_plan, draw_plan, print_report
from lit_fsdp.planning.planned_step import PlannedGpu, PlannedTrainer, prepare_step
from lit_fsdp.planning.search.report import apply_changes, describe_search, print_search
from lit_fsdp.planning.search.search import Candidate, choose, format_changes
from lit_fsdp.planning.search.steps import Steps, list_new_notes, search_steps
from lit_fsdp.planning.search.variants import prepare_variants
from lit_fsdp.planning.timing.hardware import choose_usual_gpu, find_gpu, list_cards, parse_memory, suggest_gpus
from lit_fsdp.planning.timing.links import choose_links, parse_links
from lit_fsdp.redaction import redact_yaml
from lit_fsdp.strategy.processes import count_devices

_OWN_OPTIONS = {"--device-memory": "--device_memory"}
_MAX_RANKS = 2**20
_PLAN_KEYS = {"config", "devices", "nodes", "device_memory", "gpu", "link", "exact", "search", "write", "out"}


def run_plan(args: Sequence[str]) -> int:
    """Plan a training step of a configuration, and print what it takes.

    Args:
        args: The command line, the command first.
    """
    config_files = check_config_files(args)
    warnings.filterwarnings("ignore", message=".*LightningCLI's args parameter.*")
    warnings.filterwarnings("ignore", message=".*GradScaler is enabled, but CUDA is not available.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    PlanCLI(_spell_options(args), config_files=config_files)
    return 0


class PlanTrainer(PlannedTrainer):
    """Plans where a Trainer would train."""

    given_config: Mapping[str, Any]  # as it would be for ``fit``

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        devices: int | None = None,  # noqa: ARG002  read before there is a Trainer
        nodes: int | None = None,  # noqa: ARG002
        device_memory: str | None = None,
        gpu: str | None = None,
        link: str | None = None,
        exact: bool = False,
        search: bool = False,
        write: Path | None = None,
        out: Path | None = None,
    ) -> None:
        """Plan memory and communication of a training step, without a GPU and without weights.

        Takes the configuration of `fit`. Nothing is allocated, and of a pretrained model only its config is read.

        Args:
            model: That would be trained.
            datamodule: That would give the data.
            devices: GPUs of each node. By default what the configuration says, else 1.
            nodes: How many nodes. By default what the configuration says.
            device_memory: Of one GPU, with a unit, such as 16GiB: says whether the step fits, with 1.15 times the
                tensors for what the allocator takes on top, and 1 GiB for CUDA and NCCL. By default that of `gpu`.
            gpu: Such as "RTX 4090" or "H100 SXM": estimates the time of a step as well.
            link: What connects the GPUs, inside a node and between nodes, such as "pcie4" or "nvlink4,ib400x8", or a
                comm.json of `bench comm`. By default what usually connects such GPUs.
            exact: Follow the step operator by operator on tensors without values: some seconds to minutes, for any
                model. Otherwise it is counted from what the model is made of, in a moment, where that can be.
            search: Try other settings, and show which fit, the fastest first. Without `gpu`, speed is that of a usual
                GPU with this memory.
            write: With `search`: file for the configuration with the chosen settings, for `fit --config`.
            out: Folder for `plan.json` and the picture `plan.png`. By default nothing is written.
        """
        try:
            device_bytes = None if device_memory is None else parse_memory(device_memory)
            hardware = choose_hardware(
                gpu, link, device_bytes=device_bytes, ranks_per_node=self.num_devices, search=search
            )
        except ValueError as error:  # not of the strategy, which may have settings of these names
            raise ConfigError(str(error)) from None
        if gpu is not None and device_bytes is None and hardware is not None:
            device_bytes = round(hardware.gpu.memory_gib * 2**30)
        _check_search(search=search, exact=exact, write=write, device_bytes=device_bytes)
        if out is not None:
            check_out_folder(out)
        candidates: list[Candidate] = []
        speed_unit = ""
        if search and hardware is not None and device_bytes is not None:  # which has been checked
            steps = prepare_variants(self, model, datamodule)
            candidates, speed_unit = search_steps(self, steps, datamodule, hardware, device_bytes)
        else:
            steps = [(prepare_step(self, model, datamodule), {})]
        found = self._note_uncounted(plan_step(steps[0][0], exact=exact, hardware=hardware))
        others = [card.name for card in list_cards(gpu) if card is not hardware.gpu] if gpu and hardware else []
        print_report(found, device_bytes, other_gpus=others)
        described = describe_plan(found, device_bytes)
        if device_bytes is not None and candidates:
            described["search"] = _report_search(steps, candidates, device_bytes, speed_unit)
        if out is not None:
            (out / "plan.json").write_text(json.dumps(described, indent=1) + "\n")
            draw_plan(found, device_bytes, out / "plan.png")
            print(f"written: {out / 'plan.json'}, {out / 'plan.png'}")
        if write is not None:
            self._write_config(write, choose(candidates))

    def _note_uncounted(self, found: Plan) -> Plan:
        """Say what callbacks keep that no engine knows of."""
        given = self.given_config.get("trainer", {}).get("callbacks") or []
        given = given if isinstance(given, list) else [given]
        if "lit_fsdp.callbacks.EMA" not in [callback["class_path"] for callback in given]:
            return found
        num_bytes = 4 * found.num_trained // found.num_shards
        size, name = choose_unit(num_bytes)
        where = "host memory for each rank" if found.memory.host_by_kind else "each GPU"
        note = f"EMA: its average, {num_bytes / size:.2f} {name} of {where} in float32, is not counted"
        return replace(found, notes=[*found.notes, note])

    def _write_config(self, path: Path, chosen: Candidate | None) -> None:
        if chosen is None:
            raise ConfigError(f"write: {path} is not written, as nothing fits")
        settings = apply_changes(self.given_config, chosen.changes)
        head = f"# Chosen by `plan --search true`: {format_changes(chosen.changes)}.\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(head + redact_yaml(yaml.safe_dump(settings, sort_keys=False)))
        except OSError as error:
            raise ConfigError(f"write: got {path}: {error.strerror}; choose another file") from error
        print(f"written: {path}: python -m lit_fsdp fit --config {path}")


class PlanCLI(TrainerCLI):
    """Reads the configuration of ``fit``, and builds of it what a plan needs."""

    trainer_type = PlanTrainer

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        return {self.command: {"model", "datamodule"}}

    @override
    def before_instantiate_classes(self) -> None:
        self.given_config = self._dump_given()
        trainer = self._get(self.config, "trainer")
        given = {name: self._get(self.config, name) for name in ("devices", "nodes")}
        for name, value in given.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name}: got {value}: expected 1 or more")
        if given["devices"] is None and trainer["devices"] in (-1, "-1"):
            raise ConfigError(
                "trainer.devices: got -1, all GPUs of a machine: a plan looks at none; add their number, such as "
                "--devices 4"
            )
        default = count_devices(trainer["devices"]) or self._get(self.config, "cpu_processes") or 1
        trainer["devices"] = default if given["devices"] is None else given["devices"]
        trainer["num_nodes"] = given["nodes"] or trainer["num_nodes"]
        num_ranks = (count_devices(trainer["devices"]) or 1) * trainer["num_nodes"]
        if num_ranks > _MAX_RANKS:
            raise ConfigError(f"devices: {num_ranks:,} ranks on {trainer['num_nodes']:,} nodes: at most {_MAX_RANKS:,}")
        # Nothing of a run that would write, connect or listen is built.
        for name in ("callbacks", "profiler"):
            trainer[name] = None
        trainer["logger"] = False
        super().before_instantiate_classes()

    def _dump_given(self) -> dict[str, Any]:
        """Return the configuration as ``fit`` takes it, without what is as by default."""
        assert self.subcommand is not None
        parser = self._subcommand_parsers[self.subcommand]
        given = yaml.safe_load(parser.dump(self.config[self.subcommand], skip_default=True, skip_unset=False)) or {}
        for key, name in (("devices", "devices"), ("nodes", "num_nodes")):
            if given.get(key) is not None:
                given.setdefault("trainer", {})[name] = given[key]
        return {key: value for key, value in given.items() if key not in _PLAN_KEYS}

    @override
    def choose_parts(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        self.save_config_callback = None
        accelerator = "cpu" if settings["accelerator"] == "cpu" else PlannedGpu()
        return {"callbacks": [], "logger": False, "enable_checkpointing": False, "accelerator": accelerator}

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        self.trainer.given_config = self.given_config  # type: ignore[attr-defined]
        try:
            super()._run_subcommand(subcommand)
        except ValueError as error:
            line = describe_exception(error)
            if line is None or is_debugging():
                raise
            raise ConfigError(line) from error


def choose_hardware(
    gpu: str | None, link: str | None, *, device_bytes: int | None, ranks_per_node: int, search: bool
) -> Hardware | None:
    """Return what was named, or for a search what is usual; ``None`` if time is not asked for.

    Raises:
        ValueError: No such GPU or link is known.
    """
    memory_gib = None if device_bytes is None else device_bytes / 2**30
    if gpu is None:
        if link is not None and not search:
            raise ConfigError(f"link: got {link}: not used without gpu; name one, such as --gpu 'RTX 4090'")
        if not search or memory_gib is None:
            return None
        gpu = choose_usual_gpu(memory_gib).name
        print(f"note: speed as on {gpu}, a GPU of this size; name yours with --gpu")
    found = find_gpu(gpu, memory_gib)
    if found is None:
        raise ConfigError(
            f"gpu: got {gpu!r}: not in lit_fsdp/planning/timing/hardware.py; nearest: {', '.join(suggest_gpus(gpu))}"
        )
    return Hardware(gpu=found, links=choose_links(found, ranks_per_node) if link is None else parse_links(link))


def _report_search(steps: Steps, candidates: Sequence[Candidate], device_bytes: int, speed_unit: str) -> dict[str, Any]:
    """Print what a search has found, and return it for programs."""
    chosen = choose(candidates)
    notes, per_node = list_new_notes(steps, chosen), steps[0][0].ranks.per_node
    print_search(candidates, chosen, device_bytes, ranks_per_node=per_node, speed_unit=speed_unit, notes=notes)
    return describe_search(candidates, chosen, notes)


def _check_search(*, search: bool, exact: bool, write: Path | None, device_bytes: int | None) -> None:
    if write is not None and not search:
        raise ConfigError(f"write: got {write}: not used without search; add --search true")
    if write is not None and write.exists():
        raise ConfigError(f"write: got {write}: it exists; choose another file, or remove it")
    if search and exact:
        raise ConfigError("exact: got true with search: each setting would be traced; trace the chosen one afterwards")
    if search and device_bytes is None:
        raise ConfigError("search: what has to fit is not known; add --device-memory, such as 16GiB, or --gpu")


def _spell_options(args: Sequence[str]) -> list[str]:
    """Return the command line as the parser takes it, which would read a negative size as an option of its own."""
    found: list[str] = []
    for arg in args:
        if found and found[-1] in _OWN_OPTIONS.values() and re.match(r"-[\d.]", arg):
            found[-1] += f"={arg}"
            continue
        name, sign, value = arg.partition("=")
        found.append(_OWN_OPTIONS.get(name, name) + sign + value)
    return found
