"""``fit``, ``validate``, ``test`` and ``predict``: YAML becomes a Trainer, a task and its data, and runs."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

# Private, seen in lightning 2.6.6: stores the YAML of model and data as their hyper-parameters.
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback, _InstantiatorFn
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

import lit_fsdp.tasks  # noqa: F401  so that `class_path: CausalLM` is found by its short name
from lit_fsdp.callbacks import Preemption, ProgressBar
from lit_fsdp.checkpoint.latest import describe_interruption, find_last_checkpoint
from lit_fsdp.checkpoint.reader import check_checkpoint
from lit_fsdp.checkpoint.remote import Location, is_remote, locate, locate_local
from lit_fsdp.cli.config_files import check_config_files, list_left_out, refuse_dropped_keys, refuse_left_out
from lit_fsdp.cli.defaults import choose_callbacks, choose_loggers, list_found, remove_unused_run
from lit_fsdp.cli.facts import choose_facts, describe_start
from lit_fsdp.cli.messages import describe_exception, is_refusal, report_error
from lit_fsdp.cli.parser import OneLineParser, read_path, refuse_null
from lit_fsdp.errors import ConfigError, is_debugging, join_names, nearest, suggest
from lit_fsdp.files import describe_special_file, write_whole
from lit_fsdp.planning.auto_strategy import NAME
from lit_fsdp.redaction import redact, redact_yaml
from lit_fsdp.reporting.lost_logs import check_log_folders, guard_loggers, outlive_lost_log
from lit_fsdp.sharding.settings import PRESETS
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy  # registers `strategy: fsdp2`
from lit_fsdp.strategy.launcher import describe_failed, end_for_lost, stop_children
from lit_fsdp.strategy.lightning_internals import list_waiting_monitors
from lit_fsdp.strategy.processes import choose_processes
from lit_fsdp.strategy.roll_call import share_refusal
from lit_fsdp.strategy.trainer_settings import (
    check_numbers,
    derive_accumulation,
    list_checkpoint_folders,
    refuse_float16_on_cpu,
)
from lit_fsdp.weights.file_names import NAME_RULE, is_plain_name

_KNOWN_WARNINGS = (
    ".*LightningCLI's args parameter.*",  # advice for scripts
    ".*Experiment logs directory .* exists and is not empty.*",  # meant: both loggers share it
    ".*torch.distributed.nn.functional.all_gather.*",  # Lightning's own call, seen in 2.6.6
    ".*isinstance\\(treespec, LeafSpec\\).*",  # likewise
    "The dirpath has changed from .*",  # meant: each run has its own folder
)
# Lines of Lightning that say what the configuration or the summary does, or nothing: the one line that counts is below.
_BANNERS = re.compile(
    r"(\[rank: \d+\] )?"
    r"(Seed set to|[TH]PU available|Initializing distributed:|-+\ndistributed_backend=|LOCAL_RANK: |.{0,4}Tip: )"
)
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


def run_trainer(args: Sequence[str]) -> int:
    """Run one of the Trainer's commands.

    Args:
        args: The command line, the command first.
    """
    config_files = check_config_files(args)
    for known in _KNOWN_WARNINGS if args[0] == "fit" else (*_KNOWN_WARNINGS, _ONLY_FOR_TRAINING):
        warnings.filterwarnings("ignore", message=known)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("lightning.")]:
        logging.getLogger(name).addFilter(_is_of_use)
    TrainerCLI(list(args), config_files=config_files)
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


class SaveRunConfig(SaveConfigCallback):
    """Write the merged configuration into the run's folder, where ``--config`` can read it again.

    Credentials are redacted and named; what reads the file refuses them until they are given again.

    Loggers that have no folder of their own for a run name the current one, where ``config.yaml`` may well be
    what the user wrote: then it goes to ``fallback_dir``.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, *, fallback_dir: str) -> None:
        super().__init__(parser, config, save_to_log_dir=False)
        self.fallback_dir = fallback_dir

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing yet: a run that is refused leaves no folder."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_once(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":  # in a fit, training may yet be refused
            self._save_once(trainer, pl_module)

    on_test_start = on_predict_start = on_fit_end = on_train_start

    def _save_once(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not self.already_saved:
            self.save_config(trainer, pl_module, str(trainer.state.fn))
        self.already_saved = True

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save once, on rank 0."""
        logger = trainer.logger
        folder = Path(logger.log_dir if isinstance(logger, CSVLogger | TensorBoardLogger) else self.fallback_dir)
        text = self.parser.dump(self.config, skip_unset=False)
        if (redacted := redact_yaml(text)) != text:
            names = join_names([path for path, _ in list_left_out(yaml.safe_load(redacted))])
            rank_zero_info(f"{self.config_filename}: redacted {names}: a run from it needs them again")
        with outlive_lost_log(trainer, self.config_filename, folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / self.config_filename, redacted)


class _InstantiationFailed(BaseException):
    """Carries an error past jsonargparse, which takes any ``Exception`` for a mismatch of a union."""


class TrainerCLI(LightningCLI):
    """LightningCLI with our defaults: the FSDP2 strategy, one folder a run, a summary at the end."""

    trainer_type: type[Trainer] = Trainer

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

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return only the one that runs: the parser of each takes a tenth of a second."""
        return {self.command: LightningCLI.subcommands()[self.command]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the keys that are ours."""
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
            "--monitoring",
            type=bool,
            default=True,
            help="Measure memory, communication, speed and stability, and write a report at the end. False leaves "
            "all of it out; a callback that is listed in trainer.callbacks replaces the default one of its class.",
        )
        parser.add_class_arguments(ProgressBar, "progress_bar")

    @override
    def _set_seed(self) -> None:
        """Check numbers before Lightning says which seed it takes: a refusal shall be the only line."""
        seed = self._get(self.config, "seed_everything")
        if not 0 <= seed < 2**32:
            raise ConfigError(f"seed_everything: got {seed}: expected 0 to {2**32 - 1}, or true for a random one")
        trainer = self._get(self.config, "trainer")
        try:
            check_numbers(trainer)
        except ValueError as error:
            raise ConfigError(f"trainer.{error}") from None
        _check_root(trainer["default_root_dir"])
        super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """Settle the number of processes, before anything is built."""
        refuse_dropped_keys(self.config[self.subcommand], self.config_files, self.given_args)
        refuse_left_out(self.config[self.subcommand])
        trainer = self._get(self.config, "trainer")
        if trainer["accelerator"] == "cpu":
            # Of this process and the ranks it starts. Else peft, by bitsandbytes, and Lightning, by its sanity check,
            # start CUDA on each GPU; seen in peft 0.21 and lightning 2.6.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        try:
            self.devices, self.num_nodes = choose_processes(
                trainer["devices"],
                trainer["num_nodes"],
                cpu_processes=self._get(self.config, "cpu_processes"),
                has_accelerator=trainer["accelerator"] != "cpu" and torch.accelerator.is_available(),
                environ=os.environ,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        _check_strategy_name(trainer["strategy"])
        model = self._get(self.config, "model")["class_path"].rsplit(".", 1)[-1]
        name = self._get(self.config, "run_name")
        if name is None:
            name = self.config_files[0].stem if self.config_files else model
        if not is_plain_name(name):
            raise ConfigError(f"run_name: got {name!r}: it becomes a folder below runs: expected {NAME_RULE}")
        try:
            self.run_root = locate_local(trainer["default_root_dir"] or ".") / "runs" / name
        except ValueError as error:
            raise ConfigError(f"trainer.default_root_dir: {error}") from None
        self.save_config_kwargs = {"fallback_dir": str(self.run_root)}

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
        settings = self._get(self.config_init, "trainer")
        kwargs |= self.choose_parts(settings)
        try:
            refuse_null(self.trainer_class, vars(settings))
            refuse_float16_on_cpu(settings["precision"], kwargs.get("accelerator", settings["accelerator"]))
            trainer = super().instantiate_trainer(devices=self.devices, num_nodes=self.num_nodes, **kwargs)
        except Exception as error:
            line = describe_exception(error, trusted=("lit_fsdp", "lightning"), is_building=True)
            if line is None or is_debugging():
                raise
            raise ConfigError(self._name_trainer_setting(line)) from error
        guard_loggers(trainer)
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
        keys = ("progress_bar", "run_summary", "monitoring")
        options = {key: self._get(self.config_init, key) for key in keys}
        added = choose_callbacks(given, settings, command=self.command, run_root=self.run_root, **options)
        return {"callbacks": [*given, *added], "logger": choose_loggers(settings, self.run_root)}

    def after_instantiate_classes(self) -> None:
        """Settle what needs all parts: the checkpoint to go on from, and the accumulation of a global batch."""
        self._choose_checkpoint()
        if self.subcommand in ("fit", "plan"):
            try:
                derive_accumulation(
                    self.trainer,
                    self.datamodule,
                    is_resumed=self.config_init[self.subcommand].get("ckpt_path") is not None,
                )
            except ValueError as error:
                raise ConfigError(self._add_path(str(error))) from None
        self._refuse_missing_parts()

    def _choose_checkpoint(self) -> None:
        """Let ``--ckpt_path last`` find the newest complete checkpoint of the runs of this name; check any other."""
        command = self.config_init[self.subcommand]
        given = command.get("ckpt_path")
        if given is None and self.subcommand == "fit" and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0:
            given = "last"  # the same job, requeued
        if given == "best":
            raise ConfigError(
                "ckpt_path: got 'best': only the process that trained knows its best checkpoint: expected its path, "
                f"below {self.run_root}, or last"
            )
        if given == "last":
            command["ckpt_path"] = self._find_last()
        elif given and given != "hpc":
            command["ckpt_path"] = given = _check_place(given)
        if command.get("weights_only") is None:
            command["weights_only"] = True  # Lightning's default for addresses runs what is there, seen in 2.6.6
        path = command.get("ckpt_path")
        if path and path != "hpc" and isinstance(self.trainer.strategy, FSDP2Strategy):
            try:
                check_checkpoint(_locate_checkpoint(path))
            except ValueError as error:  # before other ranks are started
                raise ConfigError(f"ckpt_path: {error}") from error

    def _find_last(self) -> str | None:
        # Lightning would look into the folder of the new run only.
        found = find_last_checkpoint(self._list_checkpoint_folders(), report=rank_zero_info)
        if found is not None:
            return str(found)
        if self.subcommand != "fit":
            raise ConfigError(
                f"ckpt_path: got 'last': no run below {self.run_root} has a checkpoint: expected the path of "
                "one, or the --run_name of the run that wrote one"
            )
        rank_zero_info(f"ckpt_path last: no run below {self.run_root} has a checkpoint: starting afresh")
        return None

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
                f"nothing was saved: ModelCheckpoint waited for {waiting[0]!r}, and no validation came to log it: set "
                "val_check_interval lower, or monitor what training logs"
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
        """Return what the ranks have to agree on: settings, and the checkpoint that each has found."""
        found = self.config_init[self.subcommand].get("ckpt_path")
        start = str(found) if found == "hpc" else describe_start(_locate_checkpoint(found) if found else None)
        return choose_facts(self.config[self.subcommand]) | {"ckpt_path": start}

    def _run_subcommand(self, subcommand: str) -> None:
        loggers = self.trainer.loggers if self.trainer.is_global_zero else ()
        found = {one: list_found(one) for one in loggers if isinstance(one, CSVLogger | TensorBoardLogger)}
        try:
            self._run_and_explain(subcommand)
        except BaseException:
            self._remove_unused_folders(found)
            raise

    def _run_and_explain(self, subcommand: str) -> None:
        try:
            if isinstance(strategy := self.trainer.strategy, FSDP2Strategy):
                strategy.facts |= self._list_facts()
            if (check := getattr(self.datamodule, "check_stage", None)) is not None:
                check(subcommand)  # now, as ranks take long to start
            check_log_folders(self.trainer)
            super()._run_subcommand(subcommand)
        except SIGTERMException:
            stop_children(self.trainer.strategy.launcher, patience_s=30)
            raise
        except SystemExit:  # what Lightning makes of Ctrl-C
            if subcommand == "fit" and self.trainer.interrupted and self.trainer.is_global_zero:
                report_error(describe_interruption(self._list_checkpoint_folders()))
            raise
        except Exception as error:
            line = describe_exception(error)
            if line is not None and isinstance(error, ValueError):
                line = self._add_path(line)
            # Before it waits for the ranks it started, which wait for what it says.
            is_lost = _LOST_CONNECTION.search(str(error)) is not None
            is_told = line is not None and not is_lost and not is_debugging() and share_refusal(line, 2.0, report_error)
            # Not in a `finally`: ranks that ended well are still leaving their last collective.
            codes = stop_children(self.trainer.strategy.launcher)
            if is_told:
                sys.exit(2 if is_refusal(error) else 1)
            if found := _LOST_CONNECTION.search(str(error)):
                # The cause is the message of another rank, which a traceback here would bury.
                raise RuntimeError(f"{describe_failed(codes)} ({found[0]})") from error
            if line is not None and isinstance(error, ValueError) and not is_debugging():
                raise ValueError(line) from error
            raise

    def _add_path(self, line: str, path: str = "") -> str:
        """Begin an error with the YAML path of the setting that it names first, else with ``path``."""
        name = re.match(r"\w+(?=[.: ])", line)
        sections = [section for section in _SETTINGS if section.startswith(path) or path.startswith(section)]
        for section in [path, f"{path}.init_args", *sections] if path else sections:
            settings = self._get(self.config, section)
            if name is None or not isinstance(settings, Namespace) or name[0] not in settings:
                continue
            # `train.jsonl line 3: ...` is about a file, not about the setting `train`.
            if line[name.end()] != "." or isinstance(settings[name[0]], Namespace | dict):
                return f"{section}.{line}"
        return f"{path}: {line}" if path else line

    def _name_trainer_setting(self, line: str) -> str:
        """Begin an error of the Trainer's with the setting that it speaks of: by name, else by what it quotes."""
        named = self._add_path(line, "trainer")
        settings = {k: v for k, v in vars(self._get(self.config, "trainer")).items() if v not in (None, "auto")}
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


def _is_of_use(record: logging.LogRecord) -> bool:
    return is_debugging() or record.levelno > logging.INFO or not _BANNERS.match(record.getMessage())


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


def _locate_checkpoint(given: str) -> Location:
    try:
        return locate(given)
    except ValueError as error:
        raise ConfigError(f"ckpt_path: {error}") from None


def _check_place(given: str) -> str:
    """Return the name of a checkpoint as all know it; refuse one that is not there."""
    place = _locate_checkpoint(given)
    if isinstance(place, Path) and (problem := describe_special_file(place)) is not None:
        raise ConfigError(f"ckpt_path: {given!r} {problem}")
    if not place.exists():
        folder = place.parent
        guess = nearest(place.name, [p.name for p in folder.glob("*")]) if folder.is_dir() else None
        hint = f"did you mean {folder / guess}?" if guess else "expected a checkpoint, or last"
        raise ConfigError(f"ckpt_path: {given!r} does not exist: {hint}")
    return str(place) if is_remote(given) else given


def _check_root(root: Any) -> None:
    """Refuse a place for runs that cannot be one, which loggers would answer with a traceback."""
    if root is None or "://" in str(root):
        return
    folder = Path(root).absolute()
    nearest_there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not nearest_there.is_dir():
        raise ConfigError(f"trainer.default_root_dir: got {str(root)!r}: {nearest_there} is no folder: expected one")
    if not os.access(nearest_there, os.W_OK):
        raise ConfigError(f"trainer.default_root_dir: got {str(root)!r}: {nearest_there} cannot be written to")


def _check_strategy_name(strategy: Any) -> None:
    """Refuse a name that Lightning would answer with a list of its own, without ours."""
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy not in known:
        ours = [*PRESETS, NAME]
        hint = suggest(strategy, ours, suggest(strategy, known, f"expected a name such as {', '.join(ours)}"))
        raise ConfigError(f"trainer.strategy: got {strategy!r}: {hint}")
