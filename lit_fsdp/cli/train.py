"""``fit``, ``validate``, ``test`` and ``predict``: YAML becomes a Trainer, a task and its data, and runs."""

from __future__ import annotations

import atexit
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

# Private, seen in lightning 2.6.6: stores the YAML of model and data as their hyper-parameters.
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, _InstantiatorFn
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

import lit_fsdp.tasks  # noqa: F401  so that `class_path: CausalLM` is found by its short name
from lit_fsdp.callbacks import Preemption, ProgressBar
from lit_fsdp.checkpoint.latest import describe_interruption
from lit_fsdp.checkpoint.remote import Location, is_remote, locate, locate_local
from lit_fsdp.cli.ckpt_path import CKPT_PATH_HELP, choose_checkpoint, locate_checkpoint
from lit_fsdp.cli.defaults import (
    Verbosity,
    choose_callbacks,
    choose_loggers,
    claim_folder,
    list_found,
    remove_unused_run,
)
from lit_fsdp.cli.facts import choose_facts, describe_start, list_sources, list_versions
from lit_fsdp.cli.messages import describe_exception, is_refusal, report_error
from lit_fsdp.cli.quiet import hide_banners, hide_warnings
from lit_fsdp.cli.ray_options import add_ray_arguments, is_ray_asked, refuse_ray_keys
from lit_fsdp.cli.saved_config import SaveRunConfig
from lit_fsdp.errors import ConfigError, is_debugging, suggest
from lit_fsdp.files import refuse_no_folder
from lit_fsdp.parsing.config_files import check_config_files, refuse_dropped_keys, refuse_left_out
from lit_fsdp.parsing.parser import OneLineParser, order_help, prefer_whole_numbers, read_path, refuse_null
from lit_fsdp.planning.auto_strategy import NAME
from lit_fsdp.redaction import redact
from lit_fsdp.reporting.lost_logs import check_log_folders, guard_loggers, outlive_lost_output
from lit_fsdp.sharding.settings import PRESETS
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy  # registers `strategy: fsdp2`
from lit_fsdp.strategy.launcher import describe_failed, end_for_lost, stop_children
from lit_fsdp.strategy.lightning_internals import list_waiting_monitors
from lit_fsdp.strategy.lightning_strategies import refuse_deepspeed_on_cpu
from lit_fsdp.strategy.processes import (
    choose_processes,
    count_devices,
    describe_shared_cores,
    is_torchrun,
    refuse_unread,
)
from lit_fsdp.strategy.roll_call import share_refusal
from lit_fsdp.strategy.slurm import describe_idle, find_own_tasks, mend_variables
from lit_fsdp.strategy.trainer_settings import (
    check_numbers,
    derive_accumulation,
    list_checkpoint_folders,
    refuse_float16_on_cpu,
)
from lit_fsdp.tasks.base import Task
from lit_fsdp.tasks.data import refuse_endless
from lit_fsdp.tasks.shares import refuse_unsplit
from lit_fsdp.weights.file_names import NAME_RULE, is_plain_name

_ONLY_FOR_TRAINING = "Be aware that when using `ckpt_path`.*"  # which callbacks a checkpoint has state of
# Where the settings lie that an error may name, the inner ones first.
_SETTINGS = ("trainer.strategy.init_args", "model.init_args", "data.init_args", "trainer")
# What each command takes of the model, and of the data or the model.
_PARTS = {
    "fit": ("training_step", "train_dataloader"),
    "validate": ("validation_step", "val_dataloader"),
    "test": ("test_step", "test_dataloader"),
    "predict": ("predict_step", "predict_dataloader"),
}
_LOST_CONNECTION = re.compile("Connection (closed|reset) by peer|Socket Timeout|Broken pipe")


def run_trainer(args: Sequence[str], cli: Callable[..., TrainerCLI] | None = None) -> int:
    """Run one of the Trainer's commands.

    Args:
        args: The command line, the command first.
        cli: What reads and runs it, if not what the command line asks for.
    """
    config_files = check_config_files(args)
    hide_warnings()
    if args[0] != "fit":
        warnings.filterwarnings("ignore", message=_ONLY_FOR_TRAINING)
    hide_banners()
    if cli is None and args[0] == "fit" and is_ray_asked(args):
        cli = import_module("lit_fsdp.cli.ray_launcher").RayDriverCLI
    (cli or TrainerCLI)(list(args), config_files=config_files)
    return 0


class RunParser(OneLineParser, LightningArgumentParser):
    """The parser of a run, with its own way to build classes."""

    build_class: Callable[..., Any] | None = None

    @override
    def instantiate(self, namespace: Namespace, *args: Any, **kwargs: Any) -> Namespace:
        """Build every class through ``build_class``, where that is set."""
        if self.build_class is not None:
            kwargs["instantiators"] = [(self.build_class, object, True)]
        return super().instantiate(namespace, *args, **kwargs)


class _InstantiationFailed(BaseException):
    """Carries an error past jsonargparse, which takes any ``Exception`` for a mismatch of a union."""


class TrainerCLI(LightningCLI):
    """LightningCLI with our defaults: the FSDP2 strategy, one folder a run, a summary at the end."""

    trainer_type: type[Trainer] = Trainer
    usage = "--config FILE [--config FILE ...]"

    def __init__(self, args: list[str], *, config_files: Sequence[Path] = ()) -> None:
        self.command, self.given_args = args[0], args
        self.config_files = config_files
        super().__init__(
            trainer_class=self.trainer_type,
            save_config_callback=SaveRunConfig,
            trainer_defaults={
                # A class, not the name "fsdp2": so that `--trainer.strategy.mesh.shard=2` finds it in place.
                "strategy": {"class_path": "lit_fsdp.FSDP2Strategy"},
                "enable_model_summary": False,  # the strategy prints its units
            },
            seed_everything_default=0,
            parser_class=RunParser,
            parser_kwargs={"prog": "python -m lit_fsdp"},
            args=args,
            # Lightning would build the optimizer before the parameters are sharded; a task builds its own.
            auto_configure_optimizers=False,
        )

    @property
    def settings(self) -> Any:
        """The configuration of the command, of which nothing is built yet."""
        return self.config[self.subcommand]

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return only the one that runs: the parser of each takes a tenth of a second."""
        return {self.command: LightningCLI.subcommands().get(self.command, {"model", "datamodule"})}

    @override
    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Let ``--help`` begin with what only this command has, and end with the 40 settings of the Trainer."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.usage = f"python -m lit_fsdp {subcommand} {self.usage} [--KEY=VALUE ...]"
        for action in parser._actions:  # private, seen in Python 3.11
            if action.dest == "ckpt_path":
                action.help = CKPT_PATH_HELP  # Lightning's has `best`, which only a script can know
        titles = {"model": "model", "data": "data", "progress_bar": "progress bar", "trainer": "Trainer of Lightning"}
        order_help(parser, {subcommand: f"options of {subcommand}", "options": "options of all runs", **titles})
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the keys that are ours."""
        prefer_whole_numbers(parser)
        parser.add_argument(
            "--run_name",
            type=str | None,
            default=None,
            help="Logs, checkpoints and the merged configuration go to "
            "<trainer.default_root_dir>/runs/<run_name>/version_<k>. May have sub-folders, such as sweep/lr-3. "
            "Default: the name of the first --config file, else of the model's class.",
        )
        parser.add_argument(
            "--cpu_processes",
            type=int | None,
            default=None,
            help="How many processes to start where there is no GPU and trainer.devices is 'auto'. Lightning "
            "starts one; 2 lets a configuration try its sharding anywhere. No effect where there are GPUs.",
        )
        parser.add_argument("--run_summary", type=bool, default=True, help="Print a table at the end.")
        parser.add_argument(
            "--verbosity",
            type=Verbosity,
            default="brief",
            help="`brief` prints losses and the summary. `full` prints the FSDP units and all tables of the "
            "report, too.",
        )
        parser.add_argument(
            "--monitoring",
            type=bool,
            default=True,
            help="Measure memory, communication, speed and stability, and write a report at the end. False leaves "
            "all of it out; a callback that is listed in trainer.callbacks replaces the default one of its class.",
        )
        parser.add_class_arguments(ProgressBar, "progress_bar")
        add_ray_arguments(parser)

    @override
    def _set_seed(self) -> None:
        """Check numbers before Lightning says which seed it takes: a refusal shall be the only line."""
        seed = self.settings["seed_everything"]
        if not 0 <= seed < 2**32:
            raise ConfigError(f"seed_everything: got {seed}: expected 0 to {2**32 - 1}, or true for a random one")
        trainer = self.settings["trainer"]
        try:
            check_numbers(trainer)
        except ValueError as error:
            raise ConfigError(f"trainer.{error}") from None
        _check_root(trainer["default_root_dir"])
        super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """Settle the number of processes, before anything is built."""
        refuse_dropped_keys(self.settings, self.config_files, self.given_args)
        refuse_left_out(self.settings)
        self.refuse_launcher()
        trainer = self.settings["trainer"]
        trainer["callbacks"] = _spell_enums(trainer["callbacks"])
        if trainer["accelerator"] == "cpu":
            # Of this process and the ranks it starts. Else peft, by bitsandbytes, and Lightning, by its sanity check,
            # start CUDA on each GPU; seen in peft 0.21 and lightning 2.6.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        has_accelerator = trainer["accelerator"] != "cpu" and torch.accelerator.is_available()
        try:
            has_ranks = self.command in _PARTS and not is_torchrun(os.environ)  # a plan starts nothing
            tasks = find_own_tasks() if has_ranks else None
            self.devices, self.num_nodes = choose_processes(
                trainer["devices"],
                trainer["num_nodes"],
                cpu_processes=self.settings["cpu_processes"],
                has_accelerator=has_accelerator,
                environ=os.environ,
                tasks=tasks,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if has_ranks and tasks is None and not has_accelerator:  # SLURM may give each task cores of its own
            shared = describe_shared_cores(count_devices(self.devices) or 1)
            if shared is not None:
                rank_zero_warn(shared)
        if tasks is not None:
            mend_variables(os.environ, tasks)
            is_left_open = trainer["accelerator"] != "cpu" and count_devices(trainer["devices"]) is None
            if is_left_open and (idle := describe_idle(tasks, torch.accelerator.device_count())) is not None:
                rank_zero_warn(idle)
        _check_strategy_name(trainer["strategy"])
        model = self.settings["model"]["class_path"].rsplit(".", 1)[-1]
        name = self.settings["run_name"]
        if name is None:
            name = self.config_files[0].stem if self.config_files else model
        if not is_plain_name(name):
            raise ConfigError(f"run_name: got {name!r}: it becomes a folder below runs: expected {NAME_RULE}")
        try:
            self.run_root = locate_local(trainer["default_root_dir"] or ".") / "runs" / name
        except ValueError as error:
            raise ConfigError(f"trainer.default_root_dir: {error}") from None
        self.save_config_kwargs = {"fallback_dir": str(self.run_root)}

    def refuse_launcher(self) -> None:
        """Refuse keys of a launcher that this is not."""
        refuse_ray_keys(self.settings)

    def instantiate_classes(self) -> None:
        """Build everything; an error of our own classes keeps its message and gains its YAML path."""
        try:
            super().instantiate_classes()
        except _InstantiationFailed as failed:
            error = failed.__cause__
            assert error is not None
            line = describe_exception(error, trusted=("lit_fsdp", "lightning"))
            if line is None or is_debugging():
                raise error from None
            raise ConfigError(self._add_path(line, read_path(failed))) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer, with our loggers and callbacks where the configuration has none of the kind."""
        settings = self.config_init[self.subcommand]["trainer"]
        kwargs |= self.choose_parts(settings)
        try:
            refuse_null(self.trainer_class, vars(settings))
            refuse_float16_on_cpu(*({**vars(settings), **kwargs}[name] for name in ("precision", "accelerator")))
            trainer = super().instantiate_trainer(devices=self.devices, num_nodes=self.num_nodes, **kwargs)
            environment = getattr(trainer.strategy, "cluster_environment", None)
            refuse_unread(os.environ, environment, trainer.num_devices, trainer.num_nodes)
        except Exception as error:
            line = describe_exception(error, trusted=("lit_fsdp", "lightning"), is_building=True)
            if line is None or is_debugging():
                raise
            raise ConfigError(self._name_trainer_setting(line)) from error
        guard_loggers(trainer)
        if self.config_init[self.subcommand]["verbosity"] == "full" and isinstance(trainer.strategy, FSDP2Strategy):
            trainer.strategy.prints_plan = True
        return trainer

    def _remove_unused_folders(self, found: Mapping[CSVLogger | TensorBoardLogger, Collection[Path]]) -> None:
        """Remove what loggers began, if the run ended before it did."""
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, SaveRunConfig) and callback.already_saved for callback in callbacks):
            return
        for logger, before in found.items():
            remove_unused_run(Path(logger.log_dir), before)

    def choose_parts(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the Trainer is built of besides its settings: loggers and callbacks."""
        given = settings["callbacks"] or []
        given = list(given) if isinstance(given, list | tuple) else [given]
        keys = ("progress_bar", "run_summary", "monitoring", "verbosity")
        options = {key: self.config_init[self.subcommand][key] for key in keys}
        if settings["barebones"]:  # in which Lightning has neither loggers nor callbacks of its own
            rank_zero_info("trainer.barebones: nothing is logged, saved, shown or monitored")
            return {"callbacks": given, "logger": settings["logger"]}
        added = choose_callbacks(given, settings, command=self.command, run_root=self.run_root, **options)
        parts: dict[str, Any] = {"callbacks": [*given, *added], "logger": choose_loggers(settings, self.run_root)}
        if self.command == "fit" and settings["log_every_n_steps"] is None:
            parts["log_every_n_steps"] = 1  # until the length of the run is known, see LogInterval
        return parts

    def after_instantiate_classes(self) -> None:
        """Settle what needs all parts: the checkpoint to go on from, and the accumulation of a global batch."""
        self._settle_checkpoint()
        if self.subcommand in ("fit", "plan"):
            try:
                derive_accumulation(
                    self.trainer,
                    self.datamodule,
                    is_resumed=self.config_init[self.subcommand].get("ckpt_path") is not None,
                )
                refuse_unsplit(self.trainer, self.datamodule)
                refuse_endless(self.trainer, self.datamodule)
            except ValueError as error:
                raise ConfigError(self._add_path(str(error))) from None
        self._refuse_missing_parts()

    def _settle_checkpoint(self) -> None:
        """Set the checkpoint that the command begins with, as Lightning takes it."""
        command = self.config_init[self.subcommand]
        if command.get("weights_only") is None:
            command["weights_only"] = True  # Lightning's default for addresses runs what is there, seen in 2.6.6
        given = command.get("ckpt_path")
        chosen = choose_checkpoint(
            given,
            command=self.command,
            trainer=self.trainer,
            model=self.model,
            run_root=self.run_root,
            list_folders=self._list_checkpoint_folders,
        )
        if chosen != given:
            command["ckpt_path"] = chosen

    def _refuse_missing_parts(self) -> None:
        """Refuse a run without data, or a model without a step, before logs are begun and ranks started."""
        if self.subcommand not in _PARTS:  # a plan, which asks for other parts itself
            return
        step, loader = _PARTS[self.subcommand]
        model, data = type(self.model), self.datamodule
        # Lightning predicts with forward.
        if step != "predict_step" and not is_overridden(step, self.model, LightningModule):
            raise ConfigError(f"model: got {model.__name__}: it has no {step}: expected a class_path of a task")
        if is_overridden(loader, self.model, LightningModule):
            return
        if data is None:
            raise ConfigError(f"data: missing: {model.__name__} has no {loader} of its own: expected a class_path")
        if not is_overridden(loader, data, LightningDataModule):
            raise ConfigError(f"data: got {type(data).__name__}: it has no {loader}: expected data that does")

    def before_fit(self) -> None:
        """Say where checkpoints lie, and listen to signals before the other ranks are started."""
        atexit.unregister(end_for_lost)  # after_fit looks
        if isinstance(self.trainer.strategy, FSDP2Strategy):
            self.trainer.strategy.checkpoint_folders = self._list_checkpoint_folders()
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Preemption):
                callback.listen(self.trainer)

    def after_fit(self) -> None:
        """Let no run pass for a good one whose result is lost."""
        strategy = self.trainer.strategy
        lost = None
        if isinstance(strategy, FSDP2Strategy) and (path := strategy.missing_checkpoint) is not None:
            lost = f"{path} could not be saved, see above: the disk is full"
        elif waiting := list_waiting_monitors(self.trainer):
            lost = (
                f"ModelCheckpoint waited for {waiting[0]!r}, and no validation came to log it: set val_check_interval "
                "lower, or monitor what training logs; what was trained is saved without it"
            )
        if lost is not None:
            if not self.trainer.is_global_zero:
                sys.exit(1)  # the first rank says it
            raise RuntimeError(f"training came to its end, but {lost}")

    def _list_checkpoint_folders(self) -> list[Location]:
        """Return where runs of this configuration leave their checkpoints."""
        own = list_checkpoint_folders(self.trainer)
        # Without a logger there are no folders by version.
        plain = [] if self.trainer.loggers else [Path(self.trainer.default_root_dir) / "checkpoints"]
        return [*own, *plain, *self.run_root.glob("version_*/checkpoints")]

    @override
    def _dump_config(self) -> None:
        """Keep credentials out of the hyper-parameters too, which loggers and checkpoints write."""
        super()._dump_config()
        self.config_dump = redact(self.config_dump)

    def _add_instantiators(self) -> None:
        assert isinstance(self.parser, RunParser)
        self.parser.build_class = self._instantiate

    def _instantiate(
        self, class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any
    ) -> Any:
        is_data = issubclass(class_type, LightningDataModule)
        key = "model" if issubclass(class_type, LightningModule) else "data" if is_data else None
        try:
            _set_places(kwargs)
            refuse_null(class_type, kwargs)
            if key is None:
                return class_type(*args, **kwargs)
            build = _InstantiatorFn(cli=self, key=key)
            return build(class_type, *args, applied_instantiation_links=applied_instantiation_links, **kwargs)
        except Exception as error:
            raise _InstantiationFailed from error

    def _list_facts(self) -> dict[str, str]:
        """Return what the ranks have to agree on: settings, versions, data, and the checkpoint that each has found."""
        path = self.config_init[self.subcommand].get("ckpt_path")
        start = str(path) if path == "hpc" else describe_start(locate_checkpoint(path) if path else None)
        settings = self.settings
        found = list_versions(settings) | list_sources(settings, self.command)
        return choose_facts(settings) | found | {"ckpt_path": start}

    def _run_subcommand(self, subcommand: str) -> None:
        loggers = self.trainer.loggers if self.trainer.is_global_zero else ()
        found = {one: list_found(one) for one in loggers if isinstance(one, CSVLogger | TensorBoardLogger)}
        try:
            if found and self.settings["trainer"]["logger"] in (None, True):  # those of choose_loggers
                claim_folder(list(found))
            self.run_and_explain(subcommand)
        except BaseException:
            self._remove_unused_folders(found)
            raise

    def start(self, subcommand: str) -> None:
        """Start the command, with all that is built and checked."""
        refuse_deepspeed_on_cpu(self.trainer.strategy)
        with outlive_lost_output() if subcommand == "fit" else nullcontext():
            super()._run_subcommand(subcommand)

    def _check_parts(self, subcommand: str) -> None:
        if (check := getattr(self.datamodule, "check_stage", None)) is not None:
            check(subcommand)
        if isinstance(self.model, Task) and subcommand == "fit":
            self.model.check_strategy(self.trainer)
        # Reading all rows takes long: only where no other rank is started yet, which would wait for this one.
        environment = getattr(self.trainer.strategy, "cluster_environment", None)
        starts_ranks = environment is None or not environment.creates_processes_externally
        is_first = starts_ranks and self.trainer.local_rank == 0 and self.trainer.num_nodes == 1
        if isinstance(self.model, Task) and subcommand in _PARTS and is_first:
            self.model.check_data(self.datamodule, subcommand)

    def run_and_explain(self, subcommand: str) -> None:
        """Start the command; an error gains its YAML path, and ranks that this process has started end with it."""
        try:
            strategy = self.trainer.strategy
            if isinstance(strategy, FSDP2Strategy) and self.trainer.world_size > 1:
                strategy.facts |= self._list_facts()
                strategy.check_module(self.model)  # now, as ranks take long to start
            self._check_parts(subcommand)  # now, too
            check_log_folders(self.trainer)
            self.start(subcommand)
        except SIGTERMException:
            stop_children(self.trainer.strategy.launcher, patience_s=30)
            raise
        except SystemExit:  # what Lightning makes of Ctrl-C
            if subcommand == "fit" and self.trainer.interrupted:
                way_on = describe_interruption(self._list_checkpoint_folders())
                # A rank that was interrupted alone says so itself.
                has_started_all = bool(stop_children(self.trainer.strategy.launcher))
                if has_started_all or not share_refusal(way_on, 2.0, report_error):
                    report_error(way_on)
            raise
        except Exception as error:
            line = describe_exception(error)
            if line is not None and isinstance(error, ValueError):
                line = self._add_path(line)
            # Before it waits for the ranks it started, which wait for what it says.
            # A pipe that Python itself finds broken is that of what is printed.
            found = None if isinstance(error, BrokenPipeError) else _LOST_CONNECTION.search(str(error))
            is_told = line is not None and not found and not is_debugging() and share_refusal(line, 2.0, report_error)
            # Not in a `finally`: ranks that ended well are still leaving their last collective.
            codes = stop_children(self.trainer.strategy.launcher)
            if is_told:
                sys.exit(2 if is_refusal(error) else 1)
            if found is not None:
                # The cause is the message of another rank, which a traceback here would bury.
                raise RuntimeError(f"{describe_failed(codes)} ({found[0]})") from error
            if line is not None and isinstance(error, ValueError) and not is_debugging():
                raise ValueError(line) from error
            raise

    def _add_path(self, line: str, path: str = "") -> str:
        """Begin an error with the YAML path of the setting that it names first, else with ``path``."""
        name = re.match(r"\w+(?=(\[\d+\])?[.: ])", line)  # `train[0].weight: ...` too
        sections = [section for section in _SETTINGS if section.startswith(path) or path.startswith(section)]
        for section in [path, f"{path}.init_args", *sections] if path else sections:
            settings = self.settings.get(section)
            if name is None or not isinstance(settings, Namespace) or name[0] not in settings:
                continue
            # `train.jsonl line 3: ...` is about a file, not about the setting `train`.
            if line[name.end()] != "." or isinstance(settings[name[0]], Namespace | dict):
                return f"{section}.{line}"
        return f"{path}: {line}" if path else line

    def _name_trainer_setting(self, line: str) -> str:
        """Begin an error of the Trainer's with the setting that it speaks of: by name, else by what it quotes."""
        named = self._add_path(line, "trainer")
        settings = {k: v for k, v in vars(self.settings["trainer"]).items() if v not in (None, "auto")}
        quoted = re.findall(r"'([^']+)'", line)
        known = [word for word in re.findall(r"\w+", line) if word in settings]
        known += [key for key, value in settings.items() for word in quoted if f"'{word}'" in repr(value)]
        if not known or named != f"trainer: {line}":
            return named
        value = settings[known[0]]
        got = "" if isinstance(value, Namespace | list) else f"got {value!r}: "
        return f"trainer.{known[0]}: {got}{line}"

    def _parse_ckpt_path(self) -> None:
        """Keep the settings stored in ``--ckpt_path`` from beating the command line in silence."""


def _set_places(settings: dict[str, Any]) -> None:
    """Refuse addresses that a callback or logger could not use, before it makes a local folder of their name.

    Others are written as Lightning knows them: ``S3://`` in small letters, paths of this machine without ``file://``.
    """
    for name, check in (("dirpath", locate), ("save_dir", locate_local)):
        if (given := settings.get(name)) is not None:
            try:
                place = check(given)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            if is_remote(given):
                settings[name] = str(place)


def _check_root(root: Any) -> None:
    """Refuse a place for runs that cannot be one, which loggers would answer with a traceback."""
    if root is not None and "://" not in str(root):
        try:
            refuse_no_folder("trainer.default_root_dir", Path(root))
        except ValueError as error:
            raise ConfigError(str(error)) from None


def _spell_enums(value: Any) -> Any:
    """Return settings with the words of Lightning's enums in their place, such as the default of its ``Timer``.

    jsonargparse (seen in 4.53) cannot write an enum where a parameter is annotated as text. Where one is annotated as
    an enum, as in callbacks of a user's own, it has to stay.
    """
    if isinstance(value, Enum) and type(value).__module__.startswith("lightning."):
        return value.value
    if isinstance(value, list):
        return [_spell_enums(item) for item in value]
    if isinstance(value, Namespace):
        return Namespace({name: _spell_enums(item) for name, item in vars(value).items()})  # type: ignore[no-untyped-call]
    return value


def _check_strategy_name(strategy: Any) -> None:
    """Refuse a name that Lightning would answer with a list of its own, without ours."""
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy not in known:
        ours = [*PRESETS, NAME]
        hint = suggest(strategy, ours, suggest(strategy, known, f"expected a name such as {', '.join(ours)}"))
        raise ConfigError(f"trainer.strategy: got {strategy!r}: {hint}")
