"""``plan``: what a run will take of its GPUs, from the same configuration, with nothing of it there."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from typing_extensions import override

from lit_fsdp.cli.messages import describe_exception
from lit_fsdp.cli.plan_options import Method, parse_counts, spell_options
from lit_fsdp.cli.quiet import hide_banners, hide_warnings
from lit_fsdp.cli.train import TrainerCLI
from lit_fsdp.errors import ConfigError, is_debugging
from lit_fsdp.files import refuse_unwritable, write_whole
from lit_fsdp.parsing.config_files import check_config_files
from lit_fsdp.parsing.parser import check_out_folder
from lit_fsdp.planning.answers import describe_what_if, make_knob_section, make_nearest_section, print_section
from lit_fsdp.planning.estimate import Hardware
from lit_fsdp.planning.machines import read_prices
from lit_fsdp.planning.nearest import find_nearest, list_knobs
from lit_fsdp.planning.plan import Plan, plan_step
from lit_fsdp.planning.plan_page import render_plan
from lit_fsdp.planning.plan_report import choose_unit, describe_plan, draw_plan, print_report
from lit_fsdp.planning.planned_step import PlannedGpu, PlannedTrainer, prepare_step
from lit_fsdp.planning.questions import Questions, answer, find_other_machines
from lit_fsdp.planning.search.report import apply_changes, describe_search, print_search
from lit_fsdp.planning.search.search import Candidate, choose, format_changes
from lit_fsdp.planning.search.steps import Steps, list_new_notes, search_steps
from lit_fsdp.planning.search.variants import prepare_variants
from lit_fsdp.planning.step_parts import NoEstimateError, Ranks
from lit_fsdp.planning.timing.hardware import Gpu, choose_usual_gpu, find_gpu, list_cards, parse_memory, suggest_gpus
from lit_fsdp.planning.timing.links import choose_links, parse_links
from lit_fsdp.planning.trials import Trials
from lit_fsdp.redaction import redact_yaml
from lit_fsdp.reporting.sections import Section
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.strategy.processes import OTHER_VARIABLES, count_devices, is_torchrun

_MAX_RANKS = 2**20
_SPELLED_KEYS = ("method", "seq_length")  # which are settings of model and data by the time of parsing
_PLAN_KEYS = {"config", "devices", "nodes", "device_memory", "gpu", "link", "exact", "search", "write", "out"}
_PLAN_KEYS |= {*_SPELLED_KEYS, "longest", "largest", "cheapest", "prices"}


def run_plan(args: Sequence[str]) -> int:
    """Plan a training step of a configuration, and print what it takes.

    Args:
        args: The command line, the command first.
    """
    start_plan(args, PlanCLI)
    return 0


def start_plan(args: Sequence[str], cli: type[PlanCLI]) -> PlanCLI:
    """Read a command line as that of ``plan``, run it with ``cli``, and return that."""
    config_files = check_config_files(args)
    if not is_torchrun(os.environ):
        for name in OTHER_VARIABLES.values():  # a plan is no rank, whoever has started it
            os.environ.pop(name, None)
    hide_warnings()
    warnings.filterwarnings("ignore", message=".*GradScaler is enabled, but CUDA is not available.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    hide_banners()
    return cli(spell_options(args), config_files=config_files)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the options of a plan come to."""

    questions: Questions
    device_bytes: int | None
    hardware: Hardware | None
    exact: bool
    search: bool
    out: Path | None


class PlanTrainer(PlannedTrainer):
    """Plans where a Trainer would train."""

    given_config: Mapping[str, Any]  # as it would be for ``fit``
    asked_ranks: Sequence[Ranks] = ()  # to compare, where a range was given
    run_title: str = ""  # of the page

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        devices: int | str | None = None,  # noqa: ARG002  read before there is a Trainer
        nodes: int | str | None = None,  # noqa: ARG002
        method: Method | None = None,  # noqa: ARG002  read before there is a parser
        seq_length: int | None = None,  # noqa: ARG002
        device_memory: str | None = None,
        gpu: str | None = None,
        link: str | None = None,
        exact: bool = False,
        search: bool = False,
        longest: bool = False,
        largest: bool = False,
        cheapest: bool = False,
        prices: Path | None = None,
        write: Path | None = None,
        out: Path | None = None,
    ) -> None:
        """Plan memory and communication of a training step, without a GPU and without weights.

        Takes the configuration of `fit`, or with `--model Qwen/Qwen3-8B`, or a folder with config.json, none at all.
        Nothing is allocated, and of a pretrained model only its config is read.

        Args:
            model: That would be trained.
            datamodule: That would give the data.
            devices: GPUs of each node. By default what the configuration says, else 1. A range such as 1..8 compares
                their speed; it needs `gpu`.
            nodes: How many nodes, or a range. By default what the configuration says.
            method: Train all of the model (full), adapters (lora), or adapters over 4-bit weights (qlora).
            seq_length: Tokens of a row, `data.seq_length`.
            device_memory: Of one GPU, with a unit, such as 16GiB: says whether the step fits, with what the allocator
                takes beside tensors, and with CUDA and NCCL. By default that of `gpu`, or less as fsdp2_auto says.
            gpu: Such as "RTX 4090" or "H100 SXM": estimates the time of a step as well.
            link: What connects the GPUs, inside a node and between nodes, such as "pcie4" or "nvlink4,ib400x8", or a
                comm.json of `bench comm`. By default that of fsdp2_auto, or else what usually connects such GPUs.
            exact: Follow the step operator by operator on tensors without values: some seconds to minutes, for any
                model. Otherwise it is counted from what the model is made of, in a moment, where that can be.
            search: Try other settings, and show which fit, the fastest first. Without `gpu`, speed is that of a usual
                GPU with this memory.
            longest: Find the longest rows that fit.
            largest: Find the largest micro-batch that fits.
            cheapest: Find GPUs that fit, up to 8 in a node, the cheapest first.
            prices: YAML file with the price of an hour of each GPU, such as "RTX 4090: 0.35": of `cheapest`, and of
                a range of nodes or devices.
            write: With `search`: file for the configuration with the chosen settings, for `fit --config`.
            out: Folder for the page `plan.html`, `plan.json` and the picture `plan.png`. By default nothing is written.
        """
        _check_search(search=search, exact=exact, write=write)
        limit = getattr(self.strategy, "device_bytes", None)  # ``device_memory`` of fsdp2_auto
        try:
            device_bytes = None if device_memory is None else parse_memory(device_memory)
            if gpu is None and device_bytes is None:
                device_bytes = limit
            hardware = self._choose_hardware(gpu, link, device_bytes=device_bytes, search=search)
        except ValueError as error:  # not of the strategy, which may have settings of these names
            raise ConfigError(str(error)) from None
        if gpu is not None and device_bytes is None and hardware is not None:
            usable = round(hardware.gpu.usable_gib * 2**30)
            device_bytes = usable if limit is None else min(usable, limit)
        questions = Questions(
            longest=longest, largest=largest, cheapest=cheapest, all_ranks=self.asked_ranks, prices=_read(prices)
        )
        named = hardware.gpu if gpu is not None and hardware is not None else None
        _check_asked(questions, search=search, device_bytes=device_bytes, gpu=named, prices=prices)
        _check_float8(getattr(self.strategy, "settings", None), named)
        if out is not None:
            check_out_folder(out)
        if write is not None:
            check_out_folder(write.parent, "write")
        asked = _Asked(
            questions=questions, device_bytes=device_bytes, hardware=hardware, exact=exact, search=search, out=out
        )
        others = [card.name for card in list_cards(gpu) if card is not hardware.gpu] if gpu and hardware else []
        candidates = self._answer(asked, model, datamodule, others)
        if write is not None:
            self._write_config(write, choose(candidates))

    def _choose_hardware(
        self, gpu: str | None, link: str | None, *, device_bytes: int | None, search: bool
    ) -> Hardware | None:
        """Return what :func:`choose_hardware` does, with the links that ``fsdp2_auto`` is told where no option is."""
        found = choose_hardware(gpu, link, device_bytes=device_bytes, ranks_per_node=self.num_devices, search=search)
        links = getattr(self.strategy, "links", None)
        return found if found is None or link is not None or links is None else replace(found, links=links)

    def _answer(
        self, asked: _Asked, model: LightningModule, datamodule: LightningDataModule | None, other_gpus: Sequence[str]
    ) -> list[Candidate]:
        """Print and write what was asked, and return what a search has found."""
        hardware, device_bytes = asked.hardware, asked.device_bytes
        # Of which no model is built, for a search if it does not fit.
        spare = deepcopy(model) if device_bytes is not None and hasattr(model, "measure_batch") else None
        steps, candidates, speed_unit = self._prepare(asked, model, datamodule)
        trials = _make_trials(steps, datamodule, is_needed=bool(asked.questions))
        # Before a trace, after which the step is of no other use.
        sections = [] if trials is None else answer(asked.questions, trials, hardware, device_bytes)
        knobs = None if asked.out is None or trials is None else _make_knobs(trials, hardware)
        found = self._note_uncounted(plan_step(steps[0][0], exact=asked.exact, hardware=hardware))
        print_report(found, device_bytes, other_gpus=other_gpus)
        described = describe_plan(found, device_bytes)
        if trials is not None and not trials.is_traced and device_bytes is not None:
            if found.time is not None and hardware is not None:
                for line in describe_what_if(found.time, find_other_machines(trials, hardware, device_bytes)):
                    print(line)
            if found.needed_bytes > device_bytes and spare is not None:
                nearest = self._find_nearest(spare, datamodule, candidates, hardware, device_bytes)
                sections.insert(0, nearest)
        if device_bytes is not None and candidates:
            described["search"] = _report_search(steps, candidates, device_bytes, speed_unit)
        for section in sections:
            print_section(section)
            described[section.name] = section.numbers
        if asked.out is not None:
            if knobs is not None:
                sections.append(knobs)
                described[knobs.name] = knobs.numbers
            chosen = _choose(candidates)
            page = render_plan(self.run_title, found, device_bytes, sections, candidates, chosen, speed_unit)
            _write_files(asked.out, found, described, device_bytes, page)
        return candidates

    def _prepare(
        self, asked: _Asked, model: LightningModule, datamodule: LightningDataModule | None
    ) -> tuple[Steps, list[Candidate], str]:
        """Return the steps that answers need, what a search has found if there is one, and the unit of its speeds."""
        if asked.search and asked.hardware is not None and asked.device_bytes is not None:  # which has been checked
            steps: Steps = prepare_variants(self, model, datamodule)
            return steps, *search_steps(self, steps, datamodule, asked.hardware, asked.device_bytes)
        if asked.questions or asked.out is not None:
            steps = prepare_variants(self, model, datamodule, keeps_result=asked.out is None, searches=False)
            return steps, [], "tokens/s"
        return [(prepare_step(self, model, datamodule), {})], [], "tokens/s"

    def _find_nearest(
        self,
        spare: LightningModule,
        datamodule: LightningDataModule | None,
        candidates: Sequence[Candidate],
        hardware: Hardware | None,
        device_bytes: int,
    ) -> Section:
        """Return the settings with which a step fits that does not.

        Args:
            spare: The module, of which no model was built.
            datamodule: That would give the data.
            candidates: Of a search, if there was one; else there is one now.
            hardware: To estimate times for; by default a usual GPU of this size.
            device_bytes: Memory of a GPU.
        """
        chosen = hardware or self._choose_hardware(None, None, device_bytes=device_bytes, search=True)
        assert chosen is not None
        steps = prepare_variants(self, spare, datamodule)
        found = candidates or search_steps(self, steps, datamodule, chosen, device_bytes)[0]
        return make_nearest_section(find_nearest(found, Trials(steps, datamodule), chosen, device_bytes), device_bytes)

    def _note_uncounted(self, found: Plan) -> Plan:
        """Say what callbacks keep that no engine knows of."""
        given = _list(self.given_config.get("trainer", {}).get("callbacks"))
        if "lit_fsdp.callbacks.EMA" not in [callback["class_path"] for callback in given]:
            return found
        num_bytes = 4 * found.num_trained_here
        size, name = choose_unit(num_bytes)
        where = "host memory for each rank" if found.is_offloaded else "each GPU"
        notes = [f"EMA: its average, {num_bytes / size:.2f} {name} of {where} in float32, is not counted"]
        if any(note.startswith("overlap_optimizer") for note in found.notes):
            notes.append("EMA: rules overlap_optimizer out, so that a step takes as long as without it")
        return replace(found, notes=[*found.notes, *notes])

    def _write_config(self, path: Path, chosen: Candidate | None) -> None:
        if chosen is None:
            raise ConfigError(f"write: {path} is not written, as nothing fits")
        settings = apply_changes(self.given_config, chosen.changes)
        count = self.num_nodes * self.num_devices
        where = f"{count} rank{'s' if count > 1 else ''}"  # which the configuration need not say
        head = f"# Chosen by `plan --search true` for {where}: {format_changes(chosen.changes)}.\n"
        with refuse_unwritable("write", path):
            write_whole(path, head + redact_yaml(yaml.safe_dump(settings, sort_keys=False)))
        print(f"written: {path}: python -m lit_fsdp fit --config {path}")


class PlanCLI(TrainerCLI):
    """Reads the configuration of ``fit``, and builds of it what a plan needs."""

    trainer_type: type[PlannedTrainer] = PlanTrainer
    usage = "(--config FILE [--config FILE ...] | --model MODEL)"
    asked_ranks: Sequence[Ranks] = ()

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self.settings["trainer"]
        for name in _SPELLED_KEYS:  # options have become settings of model and data
            if (value := self.settings.get(name)) is not None:
                raise ConfigError(f"{name}: got {value}: an option of the command line, not a key of a file")
        asked = {name: _list_counts(self.settings.get(name), name) for name in ("devices", "nodes")}
        if not asked["devices"] and trainer["devices"] in (-1, "-1"):
            raise ConfigError(
                "trainer.devices: got -1, all GPUs of a machine: a plan looks at none; add their number, such as "
                "--devices 4"
            )
        default = count_devices(trainer["devices"]) or self.settings["cpu_processes"] or 1
        all_ranks = [
            Ranks(num_nodes=nodes, per_node=devices)
            for nodes in asked["nodes"] or [trainer["num_nodes"]]
            for devices in asked["devices"] or [default]
        ]
        if (most := all_ranks[-1]).world_size > _MAX_RANKS:
            raise ConfigError(f"devices: {most.world_size:,} ranks on {most.num_nodes:,} nodes: at most {_MAX_RANKS:,}")
        first = next(filter(self._can_have, all_ranks), all_ranks[0])  # if none can, an error will say why
        self.given_config = self._dump_given(first)
        trainer["devices"], trainer["num_nodes"] = first.per_node, first.num_nodes
        if len(all_ranks) > 1:
            self.asked_ranks = all_ranks[all_ranks.index(first) :]
        # Nothing of a run that would write, connect or listen is built.
        trainer["callbacks"] = [callback for callback in _list(trainer["callbacks"]) if _is_scheduler(callback)]
        trainer["profiler"] = None
        trainer["logger"] = False
        super().before_instantiate_classes()

    def _can_have(self, ranks: Ranks) -> bool:
        """Whether a step is possible on these ranks with the mesh and the global batch that are configured."""
        strategy, data = self.settings["trainer"]["strategy"], self.settings.get("data")
        mesh = None if isinstance(strategy, str) else strategy.get("init_args.mesh")
        try:
            sizes = ranks.resolve(Mesh(**vars(mesh or Mesh())))
        except ValueError:
            return False
        rows, total = ((data or {}).get(f"init_args.{name}") for name in ("batch_size", "global_batch_size"))
        if not isinstance(total, int) or not isinstance(rows, int) or rows < 1:
            return True
        return total % (rows * sizes.num_data_ranks) == 0

    def _dump_given(self, ranks: Ranks) -> dict[str, Any]:
        """Return the configuration as ``fit`` takes it on these ranks, without what is as by default."""
        assert self.subcommand is not None
        parser = self._subcommand_parsers[self.subcommand]
        given = yaml.safe_load(parser.dump(self.settings, skip_default=True, skip_unset=False)) or {}
        for key, name, count in (("devices", "devices", ranks.per_node), ("nodes", "num_nodes", ranks.num_nodes)):
            if given.get(key) is not None:
                given.setdefault("trainer", {})[name] = count
        return {key: value for key, value in given.items() if key not in _PLAN_KEYS}

    @override
    def choose_parts(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        self.save_config_callback = None
        accelerator = "cpu" if settings["accelerator"] == "cpu" else PlannedGpu()
        return {"logger": False, "enable_checkpointing": False, "accelerator": accelerator}

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        trainer: Any = self.trainer
        trainer.given_config, trainer.asked_ranks = self.given_config, self.asked_ranks
        trainer.run_title = self.config_files[0].stem if self.config_files else _get_pretrained(self.given_config)
        try:
            super()._run_subcommand(subcommand)
        except ValueError as error:
            line = describe_exception(error)
            if line is None or is_debugging():
                raise
            raise ConfigError(line) from error


def _get_pretrained(config: Mapping[str, Any]) -> str:
    return str((config.get("model") or {}).get("init_args", {}).get("pretrained") or "plan")


def _list(callbacks: Any) -> list[Any]:
    return callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []


def _is_scheduler(callback: Any) -> bool:
    """Whether a callback, as configured, decides how many micro-batches a step accumulates."""
    return str(callback["class_path"]).endswith(".GradientAccumulationScheduler")


def _list_counts(value: int | str | None, setting: str) -> list[int]:
    return [] if value is None else parse_counts(str(value), setting)


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


def _make_knobs(trials: Trials, hardware: Hardware | None) -> Section | None:
    """Return what each setting saves; nothing where each would take a trace."""
    if trials.is_traced:
        return None
    configured = trials.estimate()
    time = None if hardware is None else configured.estimate_time(hardware)
    return make_knob_section(configured, list_knobs(trials, hardware), time)


def _choose(candidates: Sequence[Candidate]) -> Candidate | None:
    return choose(candidates) if candidates else None


def _write_files(out: Path, found: Plan, described: Mapping[str, Any], device_bytes: int | None, page: str) -> None:
    with refuse_unwritable("out", out):
        write_whole(out / "plan.json", json.dumps(described, indent=1) + "\n")
        draw_plan(found, device_bytes, out / "plan.png")
        write_whole(out / "plan.html", page)
    print(f"written: {out / 'plan.html'}, {out / 'plan.json'}, {out / 'plan.png'}")


def _read(prices: Path | None) -> dict[Gpu, float]:
    return {} if prices is None else read_prices(prices)


def _check_asked(
    questions: Questions, *, search: bool, device_bytes: int | None, gpu: Gpu | None, prices: Path | None
) -> None:
    """Refuse questions that lack what the answer depends on."""
    asked = {"search": search, "longest": questions.longest, "largest": questions.largest}
    if device_bytes is None and (name := next((name for name, is_asked in asked.items() if is_asked), "")):
        raise ConfigError(f"{name}: what has to fit is not known; add --device-memory, such as 16GiB, or --gpu")
    if questions.all_ranks and gpu is None:
        raise ConfigError("nodes, devices: got a range: it compares speed; name a GPU, such as --gpu 'RTX 4090'")
    if prices is not None and not questions.cheapest and not questions.all_ranks:
        raise ConfigError(f"prices: got {prices}: not used; add --cheapest, or a range such as --nodes 1..8")
    if prices is not None and gpu is not None and questions.all_ranks and gpu not in questions.prices:
        raise ConfigError(f"prices: {prices}: no price of {gpu.name}, which is compared; add one, such as 0.35")


def _check_float8(settings: Settings | None, gpu: Gpu | None) -> None:
    """Refuse float8 on a GPU that ``fit`` would refuse it on."""
    float8 = None if settings is None else settings.float8
    if float8 is not None and not float8.emulate and gpu is not None and not gpu.has_float8:
        raise ConfigError(
            f"trainer.strategy.init_args.float8: {gpu.name} has no products in float8: expected compute capability 8.9 "
            "or more, such as RTX 4090 or H100; leave it out"
        )


def _make_trials(steps: Steps, data: LightningDataModule | None, *, is_needed: bool) -> Trials | None:
    """Return what answers questions; ``None`` if nothing can, and nothing has to."""
    try:
        return Trials(steps, data)
    except NoEstimateError as error:
        if is_needed:
            raise ConfigError(
                f"longest, largest, cheapest, ranges of nodes and devices: no answer for this step: {error}; see "
                "docs/planning.md"
            ) from None
        return None


def _check_search(*, search: bool, exact: bool, write: Path | None) -> None:
    if write is not None and not search:
        raise ConfigError(f"write: got {write}: not used without search; add --search true")
    if write is not None and write.exists():
        raise ConfigError(f"write: got {write}: it exists; choose another file, or remove it")
    if search and exact:
        raise ConfigError("exact: got true with search: each setting would be traced; trace the chosen one afterwards")
