"""Writes the merged configuration of a run into its folder, where ``--config`` can read it again."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lit_fsdp.errors import join_names
from lit_fsdp.files import write_whole
from lit_fsdp.parsing.config_files import list_left_out
from lit_fsdp.parsing.mappings import find_settings
from lit_fsdp.redaction import redact_yaml
from lit_fsdp.reporting.lost_logs import outlive_lost_log
from lit_fsdp.strategy.trainer_settings import list_checkpoint_folders


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
        if trainer.is_global_zero:
            with suppress(OSError):  # then the checkpoints are found by their own path only
                link_checkpoints(trainer, Path(self.fallback_dir))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":  # in a fit, training may yet be refused
            self._save_once(trainer, pl_module)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_once(trainer, pl_module)

    on_test_start = on_predict_start = on_fit_end

    def _save_once(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not self.already_saved:
            self.save_config(trainer, pl_module, str(trainer.state.fn))
        self.already_saved = True

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save once, on rank 0."""
        logger = trainer.logger
        folder = Path(logger.log_dir if isinstance(logger, CSVLogger | TensorBoardLogger) else self.fallback_dir)
        text = self._format_config()
        if (redacted := redact_yaml(text)) != text:
            names = join_names([path for path, _ in list_left_out(yaml.safe_load(redacted))])
            rank_zero_info(f"{self.config_filename}: redacted {names}: a run from it needs them again")
        with outlive_lost_log(trainer, self.config_filename, folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / self.config_filename, redacted)

    def _format_config(self) -> str:
        """Return the configuration without what is ``null`` by default, as ``--config`` reads the same without it."""
        text, given = (
            self.parser.dump(self.config, skip_unset=False, skip_default=is_short, skip_validation=True)
            for is_short in (False, True)
        )
        settings = _drop_null(yaml.safe_load(text), yaml.safe_load(given))
        version = text.partition("\n")[0]  # of Lightning, as a comment
        return f"{version}\n{yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=2**20)}"


def link_checkpoints(trainer: Trainer, run_root: Path) -> None:
    """Let the folder of the runs of a name lead to checkpoints that lie elsewhere, as where loggers are given.

    There ``--ckpt_path last`` and commands that are given that folder look for them.
    """
    for folder in list_checkpoint_folders(trainer):
        known = [place.resolve() for place in run_root.glob("version_*/checkpoints")]
        if not isinstance(folder, Path) or (place := folder.resolve()) in known:
            continue
        if place.is_relative_to(run_root.resolve()):
            continue
        for number in count():
            with suppress(FileExistsError):
                (version := run_root / f"version_{number}").mkdir(parents=True)
                (version / "checkpoints").symlink_to(os.path.relpath(place, version.resolve()))
                break


def _drop_null(value: Any, given: Any, owner: Any = None) -> Any:
    """Return settings without those that are ``null`` and not among the ``given`` ones.

    Args:
        value: The settings.
        given: Those that are not as by default; of a dataclass all, as soon as one is.
        owner: The class or dataclass that they are of, where there is one.
    """
    if isinstance(value, dict):
        given = given if isinstance(given, dict) else {}
        if is_dataclass(owner):
            given = {key: part for key, part in given.items() if part is not None or not _is_null(owner, key)}
        inner = _import_class(value.get("class_path"))
        kept = {key: part for key, part in value.items() if part is not None or key in given}
        owners = {key: inner if key == "init_args" else owner and find_settings(owner, key) for key in kept}
        return {key: _drop_null(part, given.get(key), owners[key]) for key, part in kept.items()}
    if isinstance(value, list):
        given = given if isinstance(given, list) and len(given) == len(value) else [None] * len(value)
        return [_drop_null(part, other) for part, other in zip(value, given, strict=True)]
    return value


def _is_null(settings: Any, name: str) -> bool:
    """Whether a field of a dataclass is ``null`` by default."""
    return any(field.name == name and field.default is None for field in fields(settings))


def _import_class(path: Any) -> Any:
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    return getattr(sys.modules.get(module), name, None)  # it is there, as it was built
