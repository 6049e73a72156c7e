"""What can be read off a Trainer about a run: its settings, units, checkpoints, and how it ended."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_fsdp.quantization.layers import count_weights
from lit_fsdp.redaction import hide_hosts, hide_paths, redact, shorten_path
from lit_fsdp.reporting.sections import Section, Table
from lit_fsdp.sharding.unit_table import COLUMNS, describe_sizes, list_rows
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy

_MAX_MESSAGE = 1500  # characters of an error
_TRAINER_KEYS = (
    "max_steps",
    "max_epochs",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "limit_train_batches",
    "limit_val_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "log_every_n_steps",
)


def read_config(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Return the merged configuration where a command line wrote it, else what Trainer and modules tell.

    Credentials are redacted.
    """
    config = _read_saved_config(trainer, folder)
    if config is None:
        settings = {key: getattr(trainer, key) for key in _TRAINER_KEYS}
        config = {"trainer": _drop_null(Trainer, settings)}
        config["trainer"]["strategy"] = _describe_object(trainer.strategy, getattr(trainer.strategy, "settings", None))
        for name, part in (("model", trainer.lightning_module), ("data", get_data_module(trainer))):
            if part is not None:
                config[name] = _describe_object(part, _drop_null(type(part), dict(part.hparams)))
    return hide_paths(redact(_simplify(config)))


def describe_units(trainer: Trainer, module: LightningModule) -> Section | None:
    """Return the FSDP units of a module that has just been sharded, ``None`` where there are none."""
    strategy = trainer.strategy
    if not isinstance(strategy, FSDP2Strategy) or not strategy.plan or strategy.device_mesh is None:
        return None
    sizes = strategy.mesh_sizes
    counts = count_weights(module)
    numbers = {
        **sizes.by_name,
        "num_parameters": sum(counts.values()),
        "num_trainable": sum(unit.num_trainable for unit in strategy.plan),
        "units": [
            {
                "modules": unit.names,
                "kind": unit.kind,
                "num_parameters": sum(counts[name] for name in unit.parameters),
                "num_trainable": unit.num_trainable,
            }
            for unit in strategy.plan
        ],
    }
    table = Table(title="", columns=COLUMNS, rows=list_rows(module, strategy.plan, sizes.num_shards))
    note = (
        f"Mesh: {describe_sizes(sizes)}. Each unit is gathered, and its gradients are reduced, as one. Units of one "
        "size share a row."
    )
    return Section(title="FSDP units", name="units", numbers=numbers, tables=[table], notes=[note])


def describe_checkpoints(trainer: Trainer, folder: Path, since: float) -> Section | None:
    """Return the checkpoints that were written after ``since``, in seconds since 1970; ``None`` if there are none."""
    found: dict[str, dict[str, Any]] = {}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            for path in _list_checkpoints(callback, since):
                name = _shorten(path, folder)
                entry = found.setdefault(name, {"path": name, "is_best": False, "is_last": False, "score": None})
                entry["is_best"] |= path == callback.best_model_path and callback.monitor is not None
                entry["is_last"] |= path == callback.last_model_path
                if (score := callback.best_k_models.get(path)) is not None and callback.monitor is not None:
                    entry["score"] = {"name": callback.monitor, "value": float(score)}
    if not found:
        return None
    rows = [
        (
            entry["path"],
            " ".join(kind for kind in ("best", "last") if entry[f"is_{kind}"]),
            "" if entry["score"] is None else f"{entry['score']['name']} {entry['score']['value']:.5g}",
        )
        for entry in found.values()
    ]
    table = Table(title="", columns=("checkpoint", "", "monitored"), rows=rows)
    return Section(title="Checkpoints", name="checkpoints", numbers={"files": list(found.values())}, tables=[table])


def describe_disk(trainer: Trainer) -> dict[str, Any] | None:
    """Return what one checkpoint takes, what was free when ``fit`` began, and which one could not be saved."""
    if not isinstance(trainer.strategy, FSDP2Strategy) or (space := trainer.strategy.disk_space) is None:
        return None
    missing = trainer.strategy.missing_checkpoint
    return {
        "text": f"{space} at the start",
        "checkpoint_gib": space.checkpoint_bytes / 2**30,
        "free_gib": space.free_bytes / 2**30,
        "missing": None if missing is None else shorten_path(str(missing)),
    }


def list_redone_steps(trainer: Trainer) -> list[str]:
    """Return a line for each training step that was redone after a rank ran out of memory."""
    strategy = trainer.strategy
    return redact(list(strategy.redone_steps)) if isinstance(strategy, FSDP2Strategy) else []


def describe_end(exception: BaseException, when: str) -> tuple[str, str]:
    """Return a word and a sentence for a run that ended by an exception."""
    if isinstance(exception, SIGTERMException):
        return "preempted", f"a signal ended the run {when}."
    if isinstance(exception, KeyboardInterrupt):
        return "interrupted", f"Ctrl-C ended the run {when}."
    text = redact(str(exception))  # before it is cut: a part of a credential is not known as one
    text = text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ..."
    frames = traceback.extract_tb(exception.__traceback__)
    where = f" ({frames[-1].name}, {Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    return "failed", hide_paths(hide_hosts(f"{when}: {type(exception).__name__}: {text}{where}"))


def _read_saved_config(trainer: Trainer, folder: Path) -> dict[str, Any] | None:
    # A file of that name alone may be anybody's. Not imported here: without a command line nobody needs it.
    cli = sys.modules.get("lightning.pytorch.cli")
    for callback in trainer.callbacks if cli is not None else []:  # type: ignore[attr-defined]
        if cli is not None and isinstance(callback, cli.SaveConfigCallback):
            path = folder / callback.config_filename
            return yaml.safe_load(path.read_text()) if path.exists() else None
    return None


def _describe_object(value: Any, settings: Any) -> dict[str, Any]:
    path = f"{type(value).__module__}.{type(value).__qualname__}"
    return {"class_path": path, "init_args": settings} if settings else {"class_path": path}


def _drop_null(owner: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without those that are ``None``, as they are where nothing was set."""
    defaults = {name: parameter.default for name, parameter in signature(owner).parameters.items()}
    return {name: value for name, value in settings.items() if value is not None or defaults.get(name) is not None}


def _simplify(value: Any) -> Any:
    """Return a value in the types of YAML; an object becomes the name of its class, as its repr may be anything."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = _drop_null(type(value), {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _simplify(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_simplify(part) for part in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return str(value) if isinstance(value, Path | str) else f"<{type(value).__name__}>"


def _list_checkpoints(callback: ModelCheckpoint, since: float) -> list[str]:
    """Return those that the callback knows, and what lies beside them, as after a preemption."""
    known = [callback.best_model_path, callback.last_model_path, *callback.best_k_models]
    folder = Path(callback.dirpath or "")
    is_local = callback.dirpath is not None and "://" not in str(callback.dirpath) and folder.is_dir()
    beside = [str(path) for path in sorted(folder.glob("*.ckpt"))] if is_local else []
    candidates = dict.fromkeys(path for path in [*known, *beside] if path)
    return [
        path for path in candidates if "://" in path or (Path(path).exists() and Path(path).lstat().st_mtime >= since)
    ]


def _shorten(path: str, folder: Path) -> str:
    if "://" in path:
        return path
    absolute, root = Path(path).absolute(), folder.absolute()
    return str(absolute.relative_to(root)) if absolute.is_relative_to(root) else shorten_path(absolute)
