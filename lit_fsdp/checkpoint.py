"""Sharded checkpoints: one folder per checkpoint, written by all ranks, read at any number of ranks."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

META = "meta.pt"  # everything that is not a tensor of model or optimizer: plain types, loads with weights_only


def save_checkpoint(
    path: Path,
    *,
    model_state: Mapping[str, Any],
    optimizer_states: Sequence[Mapping[str, Any]],
    meta: Mapping[str, Any],
) -> None:
    """Write a checkpoint folder that ``torch.distributed.checkpoint`` can read. All ranks must call it.

    It is written beside ``path`` and renamed when it is complete, so a folder of that name is whole.

    Args:
        path: The folder; one that exists is replaced.
        model_state: This rank's shards by parameter name.
        optimizer_states: Of each optimizer, by parameter name.
        meta: Everything else; dataclasses, paths and enums in it become plain types.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    beside = path.with_name(f".{path.name}.incomplete")
    if is_first:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    _wait_for_all()
    state = {"state_dict": dict(model_state)}
    state |= {f"optimizer_{i}": dict(s) for i, s in enumerate(optimizer_states)}
    save(state, checkpoint_id=beside, no_dist=not dist.is_initialized())
    if is_first:
        torch.save(to_plain(meta), beside / META)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        beside.rename(path)
    _wait_for_all()


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer] = (), *, strict: bool = True
) -> dict[str, Any]:
    """Load a checkpoint folder into a sharded model and its optimizers; return the rest. All ranks must call it.

    The number of ranks and the mesh may differ from those it was saved with.

    Args:
        path: The folder.
        model: Sharded as it shall be used from now on.
        optimizers: As many as were saved; empty loads the model alone.
        strict: Refuse a checkpoint that lacks parameters of the model or holds others.

    Raises:
        ValueError: It is no complete checkpoint, or one of another model or number of optimizers.
    """
    if not (path / META).is_file():
        raise ValueError(f"{path} is no complete checkpoint: {META} is missing; choose another one")
    options = StateDictOptions(strict=strict)
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    count = len({key.split(".")[0] for key in stored if key.startswith("optimizer_")})
    if optimizers and count != len(optimizers):
        raise ValueError(f"{path} holds {count} optimizers, the run has {len(optimizers)}; resume it with as many")
    state: dict[str, Any] = {"state_dict": get_model_state_dict(model, options=options)}
    for i, optimizer in enumerate(optimizers):
        state[f"optimizer_{i}"] = get_optimizer_state_dict(model, optimizer, options=options)
    _check_model(path, state["state_dict"], stored, strict=strict)
    # Without strict, parameters that are not stored keep their values.
    state["state_dict"] = {n: value for n, value in state["state_dict"].items() if f"state_dict.{n}" in stored}
    load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    set_model_state_dict(model, state["state_dict"], options=options)
    for i, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(model, optimizer, state[f"optimizer_{i}"], options=options)
    return torch.load(path / META, weights_only=True)


def _check_model(path: Path, state: Mapping[str, Any], stored: Mapping[str, Any], *, strict: bool) -> None:
    prefix = "state_dict."
    missing = [name for name in state if prefix + name not in stored]
    unknown = [key.removeprefix(prefix) for key in stored if key.startswith(prefix)]
    unknown = [name for name in unknown if name not in state]
    for what, names in (("lacks", missing), ("holds", unknown)):
        if names and strict:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{path} {what} {', '.join(names[:5])}{more}: it was saved from another model")
    for name, value in state.items():
        there = getattr(stored.get(prefix + name), "size", None)
        if there is not None and isinstance(value, torch.Tensor) and there != value.shape:
            raise ValueError(f"{path}: {name} has shape {tuple(there)}, the model's {tuple(value.shape)}")


def to_plain(value: Any) -> Any:
    """Return ``value`` with everything that ``weights_only`` loading refuses turned into plain types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {key if isinstance(key, int) else str(key): to_plain(v) for key, v in value.items()}
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, tuple):
        return tuple(to_plain(v) for v in value)
    if isinstance(value, list | set):
        return [to_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.Tensor):
        return value
    return str(value)


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()
