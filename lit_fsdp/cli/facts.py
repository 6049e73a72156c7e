"""What ranks have to agree on before they start: what changes the mathematics of a run, or the order of collectives."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lit_fsdp.checkpoint.latest import measure_age
from lit_fsdp.checkpoint.remote import Location
from lit_fsdp.cli.source_digest import describe_source
from lit_fsdp.redaction import redact
from lit_fsdp.strategy.roll_call import PLACE

# All else may differ, such as num_workers, devices, folders and the progress bar. Seeds too: rank 0 hands on its own.
_SHARED = re.compile(
    r"model\..+|data\.class_path|monitoring|run_summary|trainer\.callbacks|"
    r"data\.init_args\.(\w*batch_size|seq_length|packing|pad_to_multiple_of|group_by_length|shuffle|seed|repeat|share|"
    r"\w*_fraction)|"
    r"trainer\.(precision|accumulate_grad_batches|gradient_clip_\w+|(max|min)_(steps|epochs)|max_time|"
    r"limit_\w+_batches|overfit_batches|fast_dev_run|val_check_interval|check_val_every_n_epoch|"
    r"num_sanity_val_steps|log_every_n_steps|use_distributed_sampler|enable_checkpointing)|"
    r"trainer\.strategy(\.class_path|\.init_args\.(?!print_plan|\w*timeout_s|verify_checkpoint).+)?"
)
# Settings of the data that name what a command reads.
_SOURCES = {
    "fit": ("train", "validation"),
    "validate": ("train", "validation"),
    "test": ("train", "test"),
    "predict": ("predict",),
}


def choose_facts(settings: Namespace) -> dict[str, str]:
    """Return the settings that have to be the same on all ranks, as text; credentials redacted.

    Paths are none of them, in whatever setting: a node may have its files in a folder of its own.
    """
    flat = {name: value for name, value in vars(settings.as_flat()).items() if _SHARED.fullmatch(name)}
    return {name: redact(json.dumps(_drop_places(value), sort_keys=True)) for name, value in flat.items()}


def list_versions(settings: Namespace) -> dict[str, str]:
    """Return the versions of the packages that the task of these settings computes with."""
    flat = vars(settings.as_flat())
    if not str(flat.get("model.class_path")).startswith("lit_fsdp."):
        return {}
    given = {name.removeprefix("model.init_args.") for name, value in flat.items() if value is not None}
    is_8bit = "8bit" in str(flat.get("model.init_args.optimizer.name"))
    uses = {
        "transformers": True,
        "peft": any(name.startswith("lora") for name in given),
        "bitsandbytes": is_8bit or any(name.startswith("quantization") for name in given),
    }
    return {name: version(name) for name, is_used in uses.items() if is_used}


def list_sources(settings: Namespace, command: str) -> dict[str, str]:
    """Return what is known of the data of a command before it is read, see ``describe_source``."""
    data = settings.get("data.init_args") or {}
    given = {name: data.get(name) for name in _SOURCES.get(command, ())}
    return {f"data.init_args.{name}": _describe(value) for name, value in given.items() if value is not None}


def _describe(source: Any) -> str:
    parts = source if isinstance(source, list | tuple) else [source]
    if all(isinstance(part, str | Path) for part in parts):
        return describe_source(source)
    if all(
        isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("path"), str | list))
        for part in parts
    ):
        return "; ".join(_describe_part(part) for part in parts)
    return redact(json.dumps(_drop_places(source), sort_keys=True))  # whatever data of the user's own takes


def _describe_part(part: str | Mapping[str, Any]) -> str:
    """Return what is known of one of several sources, and its settings; of a path, what it holds."""
    if isinstance(part, str):
        return describe_source(part)
    own = {name: value for name, value in part.items() if name != "path" and value is not None}
    return f"{describe_source(part['path'])} {redact(json.dumps(_drop_places(own), sort_keys=True))}"


def describe_start(checkpoint: Location | None) -> str:
    """Return where a run begins: each node may have the checkpoint at a path of its own."""
    if checkpoint is None:
        return "no checkpoint"
    age = measure_age(checkpoint)
    return f"step {age.step}, save {age.save_number}"


def _drop_places(value: Any) -> Any:
    if isinstance(value, Namespace | Mapping):
        items = vars(value) if isinstance(value, Namespace) else value
        return {str(key): _drop_places(item) for key, item in items.items()}
    if isinstance(value, list | tuple):
        return [_drop_places(item) for item in value]
    if isinstance(value, str):
        # Absolute on one rank, it may be relative on another.
        is_place = value.startswith(("/", "~", "./", "../")) or os.path.lexists(value)  # False of what is no name
        return PLACE if is_place else value
    if value is None or isinstance(value, bool | int | float):
        return value
    return PLACE if isinstance(value, Path) else type(value).__name__
