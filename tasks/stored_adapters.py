"""Adapters that were trained before: in a folder of peft, as exports are, or in a checkpoint of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_fsdp.adapters.layers import is_adapter_name
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.reader import StoredCheckpoint, open_checkpoint, resolve_checkpoint
from lit_fsdp.checkpoint.remote import RemotePath, locate
from lit_fsdp.checkpoint.sharded import agree
from lit_fsdp.errors import join_names
from lit_fsdp.export.adapter import ADAPTER_FILE, name_for_peft, needs_base
from lit_fsdp.export.folder import ADAPTER_CONFIG
from lit_fsdp.export.merge import is_saved
from lit_fsdp.weights.base_weights import BASE, LORA, fetch_pretrained, get_pretrained_folder
from lit_fsdp.weights.safetensors_io import TensorFiles, compute_fingerprint
from lit_fsdp.weights.shard_writer import ShardWriter

_SETTING = "lora.pretrained"
_FILES = (ADAPTER_CONFIG, ADAPTER_FILE)
# Of peft's settings of an adapter, those that ours have, those that change nothing of what it computes, and what
# others may be. One that is not here may only be empty.
_SAME = (
    *("r", "target_modules", "target_parameters", "exclude_modules", "modules_to_save"),
    *("use_rslora", "use_dora", "rank_pattern"),
)
_NO_MATTER = (
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version", "parent_library"),
    *("inference_mode", "runtime_config", "lora_alpha", "alpha_pattern", "lora_dropout", "eva_config"),
    *("megatron_core", "qalora_group_size", "loftq_config"),  # each of a setting that would be refused
    "fan_in_fan_out",  # of Conv1D, which the layer itself knows
)
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),  # others change the base when peft loads them
}
_OF_CLASSIFIERS = ("classifier", "score")  # peft trains both in full, whichever the model has
_OF_RUN = ("pretrained", "init_lora_weights", "dropout", "dtype")  # settings that adapters do not bring along


@dataclass(frozen=True, kw_only=True)
class StoredAdapters:
    """Adapters that a run starts from.

    Args:
        given: What the user calls them.
        lora: Their settings, with ``dropout`` and ``dtype`` of the run that starts from them.
        base: What the run that trained them called the model below them, if it is known.
        checkpoint: Where they are, if not in a folder of peft.
    """

    given: str
    lora: LoRA
    base: str | None
    checkpoint: StoredCheckpoint | None = None

    def fetch(self) -> None:
        """Download them, unless they are there."""
        if self.checkpoint is None:
            fetch_pretrained(self.given, _SETTING, _FILES)

    def choose_saved(self, model: nn.Module, lora: LoRA) -> LoRA:
        """Return settings without the head of another classifier, which peft names in those of all of them."""
        names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        saved = [n for n in lora.modules_to_save if n in names or n not in _OF_CLASSIFIERS]
        return replace(lora, modules_to_save=saved)

    def fill(self, model: nn.Module) -> None:
        """Read this rank's rows of them into a model with adapters of these settings.

        Raises:
            ValueError: They do not fit the model, or ranks have found others.
        """
        with naming(_SETTING):
            if self.checkpoint is not None and len({*agree(self.compute_fingerprint)}) > 1:
                raise ValueError(
                    f"got {self.given!r}: ranks have found several checkpoints, as it goes on saving; set it to one of "
                    f"them, such as {self.checkpoint.path}"
                )
            if self.checkpoint is None:
                fill_adapters(model, get_pretrained_folder(self.given, _FILES), self.lora)
            else:
                _fill_from_checkpoint(model, self.checkpoint, self.lora)

    @property
    def place(self) -> str:
        """Where they are: of a run, which checkpoint."""
        return self.given if self.checkpoint is None else str(self.checkpoint.path)

    def describe(self) -> str:
        """Return a line about their settings: one of the run that is the default gives way to theirs."""
        own, names = LoRA(), [field.name for field in fields(LoRA) if field.name not in _OF_RUN]
        changed = [n for n in names if n in ("r", "alpha") or getattr(self.lora, n) != getattr(own, n)]
        return f"lora: {', '.join(f'{name} {_show(getattr(self.lora, name))}' for name in changed)}, as in {self.place}"

    def compute_fingerprint(self) -> str:
        """Return what tells their values from others."""
        if self.checkpoint is None:
            return compute_fingerprint(get_pretrained_folder(self.given, _FILES), ADAPTER_FILE)
        return json.dumps(read_manifest(self.checkpoint.path), sort_keys=True)


def open_adapters(lora: LoRA) -> StoredAdapters:
    """Return the adapters of ``lora.pretrained`` with their settings. Their values are not read yet.

    Raises:
        ValueError: There are none, or other settings of ``lora`` contradict theirs.
    """
    given = str(lora.pretrained)
    with naming(_SETTING):
        path = locate(given)
        path = path.expanduser() if isinstance(path, Path) else path
        is_run = isinstance(path, RemotePath) or (path.exists() and not (path / ADAPTER_CONFIG).is_file())
        if not is_run:
            given = str(path) if path.exists() else given  # an address of this machine, too
            fetch_pretrained(given, _SETTING, (ADAPTER_CONFIG,))
            found = read_adapter_folder(get_pretrained_folder(given, (ADAPTER_CONFIG,)))
            return StoredAdapters(given=given, lora=_complete(lora, found.lora, given), base=found.base)
        checkpoint = open_checkpoint(resolve_checkpoint(path))
        if LORA not in checkpoint.meta or BASE not in checkpoint.meta:
            raise ValueError(
                f"{checkpoint.path} holds all weights of its model: export it, and set pretrained to that folder"
            )
        stored = LoRA(**checkpoint.meta[LORA])
        if needs_base(stored):
            raise ValueError(
                f"the adapters of {checkpoint.path} began with what {stored.init_lora_weights} took out of their base: "
                "export them, which puts that back, and set it to that folder"
            )
        base = str(checkpoint.meta[BASE]["name"])
        return StoredAdapters(given=given, lora=_complete(lora, stored, given), base=base, checkpoint=checkpoint)


@dataclass(frozen=True, kw_only=True)
class AdapterFolder:
    """What a folder of peft says of its adapters: their settings, the name of their base model, and its kind."""

    lora: LoRA
    base: str | None
    task_type: str | None


def read_adapter_folder(folder: Path) -> AdapterFolder:
    """Return what a folder of peft says of its adapters.

    Raises:
        ValueError: It holds none, or some that would compute something else here.
    """
    path = folder / ADAPTER_CONFIG
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        lora = _read_peft(settings)
        lora.check(is_quantized=False)
        base, kind = settings.get("base_model_name_or_path"), settings.get("task_type")
        return AdapterFolder(lora=lora, base=base, task_type=kind)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: {error}: expected adapters of LoRA, as export writes them") from error


def fill_adapters(model: nn.Module, folder: Path, lora: LoRA) -> None:
    """Read this rank's rows of all that was trained from a folder of peft.

    Args:
        model: With adapters, sharded or not.
        folder: Holds them.
        lora: Their settings.

    Raises:
        ValueError: It lacks some of it, or has it in another shape, or holds what the model does not train.
    """
    with TensorFiles(folder, ADAPTER_FILE) as files:
        shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
        _fill(model, shapes, files.read_rows, lora, str(folder / ADAPTER_FILE), name_for_peft)


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Put the name of a setting before errors inside this context."""
    try:
        yield
    except ValueError as error:
        text = str(error).removeprefix("checkpoint: ")
        raise ValueError(text if text.startswith("lora.") else f"{setting}: {text}") from error


def _fill_from_checkpoint(model: nn.Module, stored: StoredCheckpoint, lora: LoRA) -> None:
    # One with frozen weights holds those of the base, which is compared by its fingerprint.
    trained = [name for name in stored.tensors if is_adapter_name(name) or is_saved(name, lora)]
    shapes = {name: tuple(stored.tensors[name].size) for name in trained}

    def read_rows(name: str, begin: int, end: int) -> Tensor:
        tensor = stored.read({name: stored.describe(name)})[name]
        return tensor[begin:end] if tensor.dim() else tensor

    _fill(model, shapes, read_rows, lora, str(stored.path))


def _fill(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    read_rows: Callable[[str, int, int], Tensor],
    lora: LoRA,
    where: str,
    rename: Callable[[str], str] = str,
) -> None:
    """Read this rank's rows of what was trained; what a task has added since, such as a new head, stays as it is."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wanted = {name: p for name, p in trained.items() if is_adapter_name(name) or is_saved(name, lora)}
    for name, parameter in wanted.items():
        writer = ShardWriter(parameter)
        if tuple(shapes.get(rename(name), ())) != writer.shape:
            raise ValueError(f"{where} has no {rename(name)} of shape {writer.shape}")
    known = {rename(name) for name in wanted}
    if unknown := [name for name in shapes if name not in known and ".base_layer." not in name]:
        is_frozen = unknown[0] in map(rename, dict(model.named_parameters()))
        answer = (
            "which stays as it is in pretrained: save them without it, or start from the model with them merged"
            if is_frozen
            else "which the model does not train: it is of another model"
        )
        raise ValueError(f"{where} holds {unknown[0]}, {answer}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            writer = ShardWriter(parameter)
            writer.write(writer.begin, read_rows(rename(name), writer.begin, writer.end))


def _complete(given: LoRA, stored: LoRA, where: str) -> LoRA:
    """Return the settings of stored adapters with those that are the run's; refuse others that differ from theirs."""
    for setting in fields(LoRA):
        name = setting.name
        own, theirs = getattr(given, name), getattr(stored, name)
        if name not in _OF_RUN and own not in (getattr(LoRA(), name), theirs):
            raise ValueError(f"lora.{name}: got {own!r}: the adapters of {where} have {theirs!r}; leave it out")
    if given.init_lora_weights != "default":
        raise ValueError(
            f"lora.init_lora_weights: got {given.init_lora_weights!r} with {_SETTING}, where adapters have values "
            "already; leave one of them out"
        )
    return replace(stored, pretrained=None, init_lora_weights="default", dropout=given.dropout, dtype=given.dtype)


def _show(value: Any) -> str:
    return f"[{join_names([*map(str, value)])}]" if isinstance(value, list | tuple) else str(value)


def _read_peft(settings: Mapping[str, Any]) -> LoRA:
    for name, value in settings.items():
        if value and name not in (*_SAME, *_NO_MATTER) and value not in _ALLOWED.get(name, ()):
            raise ValueError(f"{name}: got {value!r}: not known here")
    values = {name: settings[name] for name in _SAME if settings.get(name) is not None}
    if "target_modules" not in values and values.get("target_parameters"):
        values["target_modules"] = ()  # peft writes null for adapters of parameters alone
    alphas = {"alpha": settings["lora_alpha"], "alpha_pattern": settings.get("alpha_pattern") or {}}
    # What trained in full is excluded too, which would be said twice.
    kept = [n for n in values.get("exclude_modules", ()) if n not in values.get("modules_to_save", ())]
    return LoRA(**{**values, "exclude_modules": kept}, **alphas)
