"""What can be read off a Trainer about a run: its settings, units, checkpoints and environment, as sections."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_fsdp.quantization.layers import count_weights
from lit_fsdp.reporting.redaction import hide_paths, hide_secrets, shorten_path
from lit_fsdp.reporting.sections import Section, Table
from lit_fsdp.sharding.unit_table import COLUMNS, list_rows
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy

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

    Values of keys that name a secret are left out.
    """
    config = _read_saved_config(trainer, folder)
    if config is None:
        config = {"trainer": {key: getattr(trainer, key) for key in _TRAINER_KEYS}}
        config["trainer"]["strategy"] = _describe_object(trainer.strategy, getattr(trainer.strategy, "settings", None))
        for name, part in (("model", trainer.lightning_module), ("data", getattr(trainer, "datamodule", None))):
            if part is not None:
                config[name] = _describe_object(part, dict(part.hparams))
    return hide_paths(hide_secrets(_simplify(config)))


def format_config(config: Mapping[str, Any]) -> str:
    """Return a configuration as YAML."""
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100)


def describe_units(trainer: Trainer, module: LightningModule) -> Section | None:
    """Return the FSDP units of a module that has just been sharded, ``None`` where there are none."""
    strategy = trainer.strategy
    if not isinstance(strategy, FSDP2Strategy) or not strategy.plan or strategy.device_mesh is None:
        return None
    shape = tuple(strategy.device_mesh.mesh.shape)
    replicate = shape[0] if len(shape) > 1 else 1
    counts = count_weights(module)
    numbers = {
        "replicate": replicate,
        "shard": shape[-1],
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
    table = Table(title="", columns=COLUMNS, rows=list_rows(module, strategy.plan, shape[-1]))
    note = (
        f"Mesh: {replicate} x {shape[-1]} (replicate x shard). Each unit is gathered, and its gradients are reduced, "
        "as one. Units of one size share a row."
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


def describe_environment(environment: Mapping[str, Any]) -> Section:
    """Return versions and hardware as a section."""
    rows = [(name, number) for name, number in environment["packages"].items()]
    rows.insert(0, ("Python", environment["python"]))
    names = {
        "cuda": "CUDA of torch",
        "nccl": "NCCL",
        "driver": "NVIDIA driver",
        "platform": "system",
        "commit": "commit of the current folder",
    }
    rows += [(label, str(environment[key])) for key, label in names.items() if environment[key]]
    rows.append(("devices", format_devices(environment["devices"])))
    rows.append(("ranks", format_ranks(environment)))
    host = f"{environment['cpu']}, {environment['num_cpus']} threads, {environment['host_memory_gib']:,} GiB"
    rows.append(("host of rank 0", host))
    table = Table(title="", columns=("", "version or value"), rows=rows)
    return Section(title="Environment", name="environment", tables=[table])


def format_devices(devices: Sequence[Mapping[str, Any]]) -> str:
    """Return the devices of all ranks in a few words."""
    counts = Counter(
        device["name"] + ("" if device["memory_gib"] is None else f" ({device['memory_gib']} GiB)")
        for device in devices
    )
    return ", ".join(f"{number} x {name}" for name, number in counts.items())


def format_ranks(environment: Mapping[str, Any]) -> str:
    """Return how many ranks ran on how many nodes."""
    nodes = environment["num_nodes"]
    return f"{environment['world_size']} on {nodes} node{'s' if nodes > 1 else ''}"


def _read_saved_config(trainer: Trainer, folder: Path) -> dict[str, Any] | None:
    # A file of that name alone may be anybody's. Not imported here: without a command line nobody needs it.
    cli = sys.modules.get("lightning.pytorch.cli")
    for callback in trainer.callbacks if cli is not None else []:  # type: ignore[attr-defined]
        if cli is not None and isinstance(callback, cli.SaveConfigCallback):
            path = folder / callback.config_filename
            return yaml.safe_load(path.read_text()) if path.exists() else None
    return None


def _describe_object(value: Any, settings: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"class_path": f"{type(value).__module__}.{type(value).__qualname__}"}
    if settings:
        described["init_args"] = settings
    return described


def _simplify(value: Any) -> Any:
    """Return a value in the types of YAML; an object becomes the name of its class, as its repr may be anything."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
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
    return [path for path in candidates if "://" in path or (Path(path).exists() and _find_time(path) >= since)]


def _find_time(path: str) -> float:
    return Path(path).lstat().st_mtime


def _shorten(path: str, folder: Path) -> str:
    if "://" in path:
        return path
    absolute, root = Path(path).absolute(), folder.absolute()
    return str(absolute.relative_to(root)) if absolute.is_relative_to(root) else shorten_path(absolute)
